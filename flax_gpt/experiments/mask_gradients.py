"""What a mask does to gradients: a query sends none to what it does not see."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_gpt import masks
from flax_gpt.config import EncoderConfig
from flax_gpt.errors import require
from flax_gpt.experiments.result import Result, check_seed
from flax_gpt.nn.attention import SingleHeadAttention


@dataclasses.dataclass(frozen=True)
class MaskGradients(Result):
    """Gradients of the sum of one head's output with respect to its input x (T, D). Keys of the mappings: "none" and the kinds of mask."""

    length: int
    """T."""
    d_model: int
    """D."""
    real: int
    """Real tokens, where padding is hidden."""
    order: list[int]
    """Of the permutation mask."""
    norm: dict[str, float]
    """‖∂ Σ out / ∂ x‖₂."""
    distance: dict[str, float]
    """2-norm of the difference from the gradient without a mask."""
    equal: dict[str, bool]
    """Whether the gradient equals the one without a mask, bit for bit."""
    position_norm: dict[str, list[float]]
    """2-norm of the gradient at each position."""
    influence: dict[str, list[list[float]]]
    """(T, T): ‖∂ Σ out[t] / ∂ x[s]‖₂ in row t and column s; the diagonal also holds what reaches x[t] through its query."""


def run(seed: int = 0, *, length: int = 8, d_model: int = 24, head_dim: int = 8) -> MaskGradients:
    """x of independent N(0, 1) numbers, weights as torch draws them. Raises InputError for a length below 2 or a width below 1."""
    check_seed(seed)
    require(length >= 2, "length", length, "must be at least 2")
    require(head_dim >= 1, "head_dim", head_dim, "must be at least 1")
    rng = np.random.default_rng(seed)
    x, order, real = rng.standard_normal((1, length, d_model)), rng.permutation(length), (length + 1) // 2
    config = EncoderConfig(d_model=d_model, num_heads=1, init="torch", positions="none")
    attention = SingleHeadAttention(config, head_dim, rngs=nnx.Rngs(seed))
    kinds: dict[str, Any] = {
        "none": None,
        "causal": masks.causal_mask(length),
        "padding": masks.padding_mask(np.asarray([real], np.int32), length),
        "combined": masks.combined_mask(np.asarray([real], np.int32), length),
        "permutation": masks.permutation_mask(order),
    }
    measured = jax.jit(lambda x: measure(attention, x, kinds))(jnp.asarray(x, jnp.float32))
    found = {name: np.asarray(value) for name, value in measured.items()}
    grads = {name: found[f"{name}/grad_x"] for name in kinds}
    return MaskGradients(
        seed,
        length,
        d_model,
        real,
        order.tolist(),
        norm={name: float(np.linalg.norm(grad)) for name, grad in grads.items()},
        distance={name: float(np.linalg.norm(grad - grads["none"])) for name, grad in grads.items()},
        equal={name: bool(np.array_equal(grad, grads["none"])) for name, grad in grads.items()},
        position_norm={name: np.linalg.norm(grad[0], axis=-1).tolist() for name, grad in grads.items()},
        influence={name: found[f"{name}/influence"][0].tolist() for name in kinds},
    )


def measure(attention: SingleHeadAttention, x: jax.Array, kinds: Mapping[str, Any], **options: Any) -> dict[str, jax.Array]:
    """For each of `kinds`, {name: mask or None}: NAME/grad_x (B, T, D) of the summed output, and NAME/influence (B, T, T) as in MaskGradients.

    `options` as in `attend`, such as empty_rows="uniform" for the fill of the original.
    """
    found = {}
    for name, mask in kinds.items():
        totals, pull = jax.vjp(lambda x, mask=mask: jnp.sum(attention(x, mask=mask, **options)[0], axis=-1), x)
        one_query = jnp.broadcast_to(jnp.eye(x.shape[1], dtype=x.dtype)[:, None], (x.shape[1], *totals.shape))
        found[f"{name}/grad_x"] = pull(jnp.ones_like(totals))[0]
        found[f"{name}/influence"] = jnp.swapaxes(jnp.sqrt(jnp.sum(jnp.square(jax.vmap(pull)(one_query)[0]), axis=-1)), 0, 1)
    return found
