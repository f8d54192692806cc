"""Text from a GPT as the original makes it: each row alone, the whole window recomputed for every token."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from flax_gpt.errors import RunError
from torch_ref import random
from torch_ref.generation.draws import draw, read_rule
from torch_ref.generation.prompts import check_model, check_room, read_prompts

Overflow = Literal["slide", "error"]


@torch.no_grad()
def generate(
    model: nn.Module,
    tokens: Any,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos: int | None = None,
    key: Any = None,
    overflow: Overflow = "slide",
    lengths: Any = None,
) -> Tensor:
    """The prompts with `max_new_tokens` tokens appended, one at a time: softmax(logits / temperature), filter, draw.

    Arguments, results and errors are those of `flax_gpt.generation.sampling.generate`, which draws the same tokens from the same key: the window is
    the last max_len tokens, at positions 0 … max_len - 1. Returns (B, T + max_new_tokens) int64; the model's own mode stays as it is.
    """
    check_model(model)
    config: Any = model.config
    prompts = read_prompts(tokens, lengths, config.vocab_size)
    sample, key = read_rule(temperature, top_k, top_p, eos, key, config.vocab_size)
    check_room(prompts, max_new_tokens, config.max_len, overflow)
    out = torch.full((len(prompts), torch.as_tensor(tokens).shape[1] + max_new_tokens), 0 if eos is None else eos)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        for b, text in enumerate(prompts):
            span = min(len(text) + max_new_tokens - 1, config.max_len)
            for _ in range(max_new_tokens):
                logits = model(text[None, -config.max_len :], span=span)[0][:, -1]
                logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
                if not torch.isfinite(logits).all():
                    raise RunError(f"the logits of token {len(text)} are not finite: the weights are damaged or the dtype overflows")
                token = draw(logits, sample, None if key is None else random.fold(key, b)[None], torch.tensor([len(text)]))
                text = torch.cat([text, token])
                if eos is not None and token == eos:
                    break
            out[b, : len(text)] = text
    finally:
        for module, training in modes.items():
            module.training = training
    return out
