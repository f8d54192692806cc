"""The initial weights that a key gives in `flax_gpt`, drawn in torch."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from torch_ref import jax_random
from torch_ref.nn.dropout import DropoutStream
from torch_ref.nn.linear import Embedding, Linear
from torch_ref.nn.norm import LayerNorm, RMSNorm


@torch.no_grad()
def initialise(model: nn.Module, key: Any) -> None:
    """Draws every weight and the key of dropout anew, in place: those of the same model in `flax_gpt` with rngs=nnx.Rngs(key).

    model: a MiniGPT, TinyTransformer or EncoderDecoder as it was constructed. key: (2,) 32-bit words, as from `jax_random.key`.

    nnx.Rngs gives the nth parameter, in the order of construction, the key folded with n; a norm takes its keys without drawing from them, and
    dropout takes the last. torch lists modules in the order of construction too.
    """
    count = 0

    def next_key() -> Tensor:
        nonlocal count
        count += 1
        return jax_random.fold_in(key, count - 1)

    for module in model.modules():
        if isinstance(module, Linear):
            module.weight.copy_(_draw((module.in_features, module.out_features), module, next_key()).T)
            if module.bias is not None:
                module.bias.copy_(torch.zeros_like(module.bias) if module.std is not None else _draw(tuple(module.bias.shape), module, next_key()))
                count += module.std is not None
        elif isinstance(module, Embedding):
            module.weight.copy_(_draw(tuple(module.weight.shape), module, next_key()))
        elif isinstance(module, LayerNorm | RMSNorm):
            module.reset_parameters()
            count += len(list(module.parameters()))
        elif isinstance(module, DropoutStream):
            module.seed_key = jax_random.bits(next_key(), (2,)).to(torch.int64)
            module.step = module.first_row = 0


def _draw(shape: tuple[int, ...], module: Linear | Embedding, key: Tensor) -> Tensor:
    """Normal with the module's std, or torch's uniform distribution for a Linear without one."""
    dtype = module.weight.dtype
    if module.std is None:
        bound = 1 / math.sqrt(module.weight.shape[1])
        return jax_random.uniform(key, shape, dtype, -bound, bound)
    return jax_random.normal(key, shape, dtype) * torch.tensor(module.std, dtype=dtype)
