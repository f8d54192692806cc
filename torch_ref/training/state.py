"""A model from a seed, and the gradient of a batch."""

from typing import Any

import torch
from torch import Tensor

from flax_gpt.config import EncoderConfig, EncoderDecoderConfig, GPTConfig, TransformerConfig
from flax_gpt.errors import require
from torch_ref.models.encoder import TinyTransformer
from torch_ref.models.encoder_decoder import EncoderDecoder
from torch_ref.models.gpt import MiniGPT
from torch_ref.nn.initialise import initialise
from torch_ref.random import key_from_seed
from torch_ref.training.loss import cross_entropy

MODELS: dict[type[TransformerConfig], Any] = {GPTConfig: MiniGPT, EncoderConfig: TinyTransformer, EncoderDecoderConfig: EncoderDecoder}


def new_model(config: TransformerConfig, seed: int) -> Any:
    """The configuration's model, its weights and dropout key those of `seed` in [0, 2**64): what `flax_gpt.training.state.new_model` gives."""
    with torch.random.fork_rng(devices=[]):  # construction draws from torch's own generator, in vain
        model = MODELS[type(config)](config)
    initialise(model, key_from_seed(seed).flip(0))  # the words of a key of jax.random: the high ones first
    return model


def backward(model: Any, tokens: Tensor, targets: Tensor, weights: Tensor, *, accumulate: int = 1) -> Tensor:
    """The mean loss of a language model over a batch, its gradient added to what the parameters hold.

    tokens, targets, weights (B, T) as in `flax_gpt.training.data.Batch`. `accumulate`: how many equal parts the batch is cut into, one after the
    other; each row draws the dropout that it would in the undivided batch. The next call draws that of the same step: `model.dropout.step` is
    the caller's.
    """
    require(len(tokens) % accumulate == 0, "accumulate", accumulate, f"must divide the batch of {len(tokens)} rows")
    stream = model.dropout
    step, first_row, means = stream.step, stream.first_row, []
    for part in zip(*(x.chunk(accumulate) for x in (tokens, targets, weights)), strict=True):
        loss = cross_entropy(model(part[0])[0], part[1], part[2])
        if accumulate > 1:
            loss = loss * (part[2].sum().to(loss.dtype) / weights.sum().to(loss.dtype))
        loss.backward()
        means.append(loss.detach())
        stream.step, stream.first_row = step, stream.first_row + len(part[0])
    stream.first_row = first_row
    return sum(means[1:], means[0])
