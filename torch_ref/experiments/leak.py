"""What the causal mask is for. Mirrors `flax_gpt/experiments/leak.py`."""

import torch
from torch import Tensor

from torch_ref.models.gpt import MiniGPT
from torch_ref.training.loss import cross_entropy


def measure(model: MiniGPT, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """held_out_loss, held_out_accuracy, honest_loss and honest_accuracy on windows (B, T), each a scalar."""
    logits, _ = model(tokens)
    honest = prefix_logits(model, tokens)
    dtype = logits.dtype
    return {
        "held_out_loss": cross_entropy(logits, targets),
        "held_out_accuracy": (torch.argmax(logits, dim=-1) == targets).to(dtype).mean(),
        "honest_loss": cross_entropy(honest, targets),
        "honest_accuracy": (torch.argmax(honest, dim=-1) == targets).to(dtype).mean(),
    }


def prefix_logits(model: MiniGPT, tokens: Tensor) -> Tensor:
    """Logits (B, T, V) of tokens (B, T), those at position t from a pass over tokens 0 … t alone."""
    return torch.stack([model(tokens[:, : t + 1])[0][:, t] for t in range(tokens.shape[1])], dim=1)


@torch.no_grad()
def continue_greedily(model: MiniGPT, tokens: Tensor, count: int) -> Tensor:
    """tokens (B, T) and `count` more, each the likeliest after a whole pass over what is there: (B, T + count), at most max_len."""
    for _ in range(count):
        tokens = torch.cat([tokens, torch.argmax(model(tokens)[0][:, -1:], dim=-1).to(tokens.dtype)], dim=1)
    return tokens
