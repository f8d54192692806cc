"""Text from a model, the plain way."""
