"""The same Transformers as `flax_gpt`, as plain PyTorch: the same file, class and attribute names, to be read side by side.

Configurations and refusals are shared: `flax_gpt.config` and `flax_gpt.errors` use the standard library alone.
"""

from torch_ref.models.encoder import TinyTransformer
from torch_ref.models.encoder_decoder import EncoderDecoder
from torch_ref.models.gpt import MiniGPT

__all__ = ["EncoderDecoder", "MiniGPT", "TinyTransformer"]
