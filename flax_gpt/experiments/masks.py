"""Every kind of mask, for a batch of two rows."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from flax_gpt import masks
from flax_gpt.errors import require
from flax_gpt.experiments.result import Result, check_seed


@dataclasses.dataclass(frozen=True)
class Masks(Result):
    """True = the query (row) may attend to the key (column)."""

    length: int
    """T."""
    lengths: list[int]
    """Real tokens of the two rows of the batch, for padding and combined."""
    order: list[int]
    """The order in which the permutation mask lets positions see each other."""
    window: list[int]
    """Neighbours to the left and to the right."""
    kinds: dict[str, list[list[list[bool]]]]
    """Kind → (1 or 2, T, T)."""
    visible: dict[str, list[list[int]]]
    """Kind → (1 or 2, T): keys that each query sees."""


def run(seed: int = 0, *, length: int = 10) -> Masks:
    """The order is drawn; the lengths are T and about T / 2. Raises InputError for a length below 2."""
    check_seed(seed)
    require(length >= 2, "length", length, "must be at least 2")
    lengths, order, window = [length, (length + 1) // 2], np.random.default_rng(seed).permutation(length), (2, 1)
    made = {
        "causal": masks.causal_mask(length),
        "bidirectional": masks.bidirectional_mask(length),
        "window": masks.window_mask(length, window=window),
        "permutation": masks.permutation_mask(order),
        "padding": masks.padding_mask(np.asarray(lengths, np.int32), length),
        "combined": masks.combined_mask(np.asarray(lengths, np.int32), length),
    }
    whole = {name: jnp.broadcast_to(mask, (mask.shape[0] if mask.ndim == 4 else 1, 1, length, length))[:, 0] for name, mask in made.items()}
    return Masks(
        seed,
        length,
        lengths,
        order.tolist(),
        list(window),
        {name: np.asarray(mask).tolist() for name, mask in whole.items()},
        {name: np.asarray(masks.visible_counts(mask)).tolist() for name, mask in whole.items()},
    )
