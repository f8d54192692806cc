"""Attention: the same door as `flax_gpt.kernels`, with the dense implementation."""

from torch_ref.kernels.api import attend

__all__ = ["attend"]
