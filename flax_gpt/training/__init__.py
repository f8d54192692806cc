"""Data, loss, optimizer, the training step and what a run leaves on disk."""
