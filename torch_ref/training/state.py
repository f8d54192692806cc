"""A model from a seed."""

from typing import Any

import torch

from flax_gpt.config import EncoderConfig, EncoderDecoderConfig, GPTConfig, TransformerConfig
from torch_ref.models.encoder import TinyTransformer
from torch_ref.models.encoder_decoder import EncoderDecoder
from torch_ref.models.gpt import MiniGPT
from torch_ref.nn.initialise import initialise
from torch_ref.random import key_from_seed

MODELS: dict[type[TransformerConfig], Any] = {GPTConfig: MiniGPT, EncoderConfig: TinyTransformer, EncoderDecoderConfig: EncoderDecoder}


def new_model(config: TransformerConfig, seed: int) -> Any:
    """The configuration's model, its weights and dropout key those of `seed` in [0, 2**64): what `flax_gpt.training.state.new_model` gives."""
    with torch.random.fork_rng(devices=[]):  # construction draws from torch's own generator, in vain
        model = MODELS[type(config)](config)
    initialise(model, key_from_seed(seed).flip(0))  # the words of a key of jax.random: the high ones first
    return model
