"""Attention: one door, several implementations, one table that chooses between them. See docs/kernels.md."""

from flax_gpt.kernels.api import attend, explain

__all__ = ["attend", "explain"]
