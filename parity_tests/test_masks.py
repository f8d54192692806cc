"""Every mask of both packages: against the original's, against its definition, and refusing what is none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flax_gpt.masks
import torch_ref.masks
from flax_gpt.errors import InputError
from parity_tests import golden_data

PACKAGES = {"flax": (flax_gpt.masks, jnp.asarray), "torch": (torch_ref.masks, torch.from_numpy)}
both = pytest.mark.parametrize(("masks", "array"), PACKAGES.values(), ids=PACKAGES)

sizes = st.sampled_from([1, 2, 5])  # a new shape is a new compilation
sides = st.none() | st.integers(0, 6)
examples = settings(max_examples=25)


def equals(mask, wanted):
    """Boolean, and the same in every place once broadcast."""
    mask = np.asarray(mask)
    assert mask.dtype == bool
    np.testing.assert_array_equal(np.broadcast_to(mask, np.shape(wanted)), wanted)


@both
def test_permutation_is_the_originals(masks, array):
    golden = golden_data.group("pieces", "masks")
    equals(masks.permutation_mask([2, 0, 3, 1, 4]), golden["permutation"] == 1)
    equals(masks.permutation_mask([2, 0, 3, 1]), golden["permutation4"] == 1)
    equals(masks.permutation_mask(np.array([2, 0, 3, 1]))[3], [True, False, True, False])


@both
def test_visible_counts_of_the_causal_mask(masks, array):
    counts = np.asarray(masks.visible_counts(masks.causal_mask(10)))
    assert (counts.mean(), counts.min(), counts.max()) == (5.5, 1, 10)


@both
@examples
@given(T=sizes, S=sizes, offsets=st.lists(st.integers(-3, 8), min_size=2, max_size=2), window=st.tuples(sides, sides))
def test_causal_and_window_follow_their_definitions(masks, array, T, S, offsets, window):
    reach = lambda q, k: (window[0] is None or k >= q - window[0]) and (window[1] is None or k <= q + window[1])
    causal = [[[[k <= t + o for k in range(S)] for t in range(T)]] for o in offsets]
    near = [[[[reach(t + o, k) for k in range(S)] for t in range(T)]] for o in offsets]
    equals(masks.causal_mask(T, S, offsets[0]), causal[0][0])
    equals(masks.window_mask(T, S, offsets[0], window=window), near[0][0])
    batch = array(np.asarray(offsets, np.int32))
    equals(masks.causal_mask(T, S, batch), causal)
    equals(masks.window_mask(T, S, batch, window=window), near)


@both
@examples
@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=3))
def test_padding_and_combined_follow_their_definitions(masks, array, lengths):
    batch = array(np.asarray(lengths, np.int32))
    equals(masks.padding_mask(batch, 6), [[[[k < length for k in range(6)]]] for length in lengths])
    equals(masks.combined_mask(batch, 6), [[[[k < length and k <= t for k in range(6)] for t in range(6)]] for length in lengths])


@both
@examples
@given(orders=st.integers(1, 6).flatmap(lambda T: st.lists(st.permutations(range(T)), min_size=1, max_size=3)))
def test_permutation_follows_its_definition(masks, array, orders):
    wanted = [[[[order.index(k) < order.index(t) for k in range(len(order))] for t in range(len(order))]] for order in orders]
    equals(masks.permutation_mask(orders[0]), wanted[0][0])
    batch = masks.permutation_mask(orders)
    assert batch.shape == np.shape(wanted)
    equals(batch, wanted)


@both
def test_an_identity_order_is_causal_without_the_diagonal(masks, array):
    equals(masks.permutation_mask(range(5)), np.asarray(masks.causal_mask(5)) & ~np.eye(5, dtype=bool))


@both
def test_bidirectional(masks, array):
    equals(masks.bidirectional_mask(3), np.ones((3, 3), bool))
    equals(masks.bidirectional_mask(3, 5), np.ones((3, 5), bool))


def test_traced_lengths_are_clamped():
    masked = jax.jit(lambda lengths: flax_gpt.masks.padding_mask(lengths, 3))(jnp.array([-1, 2, 9], jnp.int32))
    equals(masked[:, 0, 0], [[False] * 3, [True, True, False], [True] * 3])


@both
@pytest.mark.parametrize("order", [[0, 0, 1], [1, 2, 3], [0.0, 1.0], [-1, 0], [], 0, [[[0]]], [[0, 1], [1, 1]], [True, False], ["0"]])
def test_an_order_that_is_no_permutation_is_refused(masks, array, order):
    with pytest.raises(InputError, match=r"order = .*must be a permutation"):
        masks.permutation_mask(order)


@both
@pytest.mark.parametrize("lengths", [[4], [2, -1], [[1]], [1.0], [True]])
@pytest.mark.parametrize("kind", ["padding_mask", "combined_mask"])
def test_lengths_beyond_the_keys_are_refused(masks, array, lengths, kind):
    with pytest.raises(InputError, match="lengths = "):
        getattr(masks, kind)(array(np.asarray(lengths) if isinstance(lengths[0], (float, bool)) else np.asarray(lengths, np.int32)), 3)


@both
@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda masks: masks.causal_mask(0), "T"),
        (lambda masks: masks.causal_mask(2, 0, 0), "S"),
        (lambda masks: masks.causal_mask(2, 3), "offset"),
        (lambda masks: masks.window_mask(2, 3, window=(1, 1)), "offset"),
        (lambda masks: masks.window_mask(3, window=(-1, 0)), "window"),
        (lambda masks: masks.window_mask(3, window=(None, -2)), "window"),
        (lambda masks: masks.bidirectional_mask(0), "T"),
        (lambda masks: masks.bidirectional_mask(2, 0), "S"),
    ],
)
def test_impossible_sizes_are_refused(masks, array, call, argument):
    with pytest.raises(InputError, match=f"^{argument} = "):
        call(masks)
