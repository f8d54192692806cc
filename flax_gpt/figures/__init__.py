"""Pictures, one file a family."""
