"""What a mask does to gradients: a query sends none to what it does not see. Mirrors `flax_gpt/experiments/mask_gradients.py`."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torch_ref.nn.attention import SingleHeadAttention


def measure(attention: SingleHeadAttention, x: Tensor, kinds: Mapping[str, Any], **options: Any) -> dict[str, Tensor]:
    """For each of `kinds`, {name: mask or None}: NAME/grad_x (B, T, D) of the summed output, and NAME/influence (B, T, T).

    Influence has ‖∂ Σ out[t] / ∂ x[s]‖₂ in row t and column s. `options` as in `attend`.
    """
    x, found = x.detach().requires_grad_(), {}
    for name, mask in kinds.items():
        totals = torch.sum(attention(x, mask=mask, **options)[0], dim=-1)
        queries = [torch.autograd.grad(totals[:, t].sum(), x, retain_graph=True)[0] for t in range(x.shape[1])]
        found[f"{name}/grad_x"] = torch.autograd.grad(totals.sum(), x)[0]
        found[f"{name}/influence"] = torch.sqrt(torch.sum(torch.square(torch.stack(queries, dim=1)), dim=-1))
    return found
