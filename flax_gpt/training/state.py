"""The training state and the one jitted, donated step over it."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from flax_gpt.config import EncoderConfig, EncoderDecoderConfig, GPTConfig, TransformerConfig
from flax_gpt.models.encoder import TinyTransformer
from flax_gpt.models.encoder_decoder import EncoderDecoder
from flax_gpt.models.gpt import MiniGPT
from flax_gpt.random import key_from_seed
from flax_gpt.training import sharding
from flax_gpt.training.data import Batch
from flax_gpt.training.loss import cross_entropy, token_losses
from flax_gpt.training.optimizer import global_norm, leaf_name

MODELS: dict[type[TransformerConfig], Any] = {GPTConfig: MiniGPT, EncoderConfig: TinyTransformer, EncoderDecoderConfig: EncoderDecoder}

Loss = Callable[[Any, Any], jax.Array]
"""(model, batch) → the mean loss over the batch's `weights`."""

Totals = Callable[[Any, Any], dict[str, jax.Array]]
"""(model, batch) → sums over the batch, each () float32."""


class TrainState(NamedTuple):
    """All that a step changes; a checkpoint holds exactly this."""

    step: jax.Array
    """Completed updates, () int32."""
    params: nnx.State
    rest: nnx.State
    """Buffers, and the key of dropout."""
    optimizer: Any
    line_loss: jax.Array
    """Summed loss of the tokens since the last line of metrics.jsonl, () float32; so that no step waits for the host."""
    line_tokens: jax.Array
    """How many those are, () float32."""
    loss: jax.Array
    """Mean loss of the last batch, before its update."""
    grad_norm: jax.Array
    """Global gradient norm of the last batch, before the clip."""


def new_model(config: TransformerConfig, seed: int) -> Any:
    """The configuration's model, its weights and dropout key those of `seed`, any integer in [0, 2**64); nnx.Rngs(seed) below 2**32."""
    low, high = key_from_seed(seed)
    return MODELS[type(config)](config, rngs=nnx.Rngs(jax.random.wrap_key_data(jnp.array([high, low]), impl="threefry2x32")))


def split_model(model: nnx.Module) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
    """(graph, parameters, rest)."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)  # type: ignore[misc]
    return graph, params, rest


def new_state(params: nnx.State, rest: nnx.State, optimizer: optax.GradientTransformation, mesh: Mesh | None = None) -> TrainState:
    """The state before the first update. Arrays are copied: the step donates its state, and nobody else may hold what it deletes.

    All are committed to every device of `mesh`, or without one to the devices of the parameters, as the results of a step over such parameters are:
    a step whose second state were placed otherwise than its first would be compiled twice.
    """
    params, rest = jax.tree.map(jnp.copy, (params, rest))
    zero = lambda: jnp.zeros((), jnp.float32)
    state = TrainState(jnp.zeros((), jnp.int32), params, rest, optimizer.init(params), zero(), zero(), zero(), zero())
    return jax.tree.map(lambda leaf: jax.device_put(leaf, leaf.sharding if mesh is None else sharding.whole(mesh)), state)


def failed(state: TrainState) -> jax.Array:
    """Whether the last batch's loss or gradient norm was NaN or infinite; the state then stays as it was before that batch."""
    return ~(jnp.isfinite(state.loss) & jnp.isfinite(state.grad_norm))


def language_loss(model: Any, batch: Batch, label_smoothing: float = 0.0) -> jax.Array:
    """Mean cross-entropy of the token after each."""
    logits, _ = model(batch.tokens)
    return cross_entropy(logits, batch.targets, batch.weights, label_smoothing=label_smoothing)


def language_totals(model: Any, batch: Batch) -> dict[str, jax.Array]:
    """The summed loss of the real tokens, and how many they are."""
    logits, _ = model(batch.tokens)
    return {"loss": jnp.sum(token_losses(logits, batch.targets) * batch.weights), "count": jnp.sum(batch.weights)}


def make_step(
    graph: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    starts_line: Callable[[jax.Array], jax.Array],
    loss: Loss = language_loss,
    accumulate: int = 1,
    mesh: Mesh | None = None,
) -> Callable[[TrainState, Any], TrainState]:
    """The jitted step (state, batch) -> state; it deletes the state that it is given.

    `starts_line(completed updates)`: whether the sums of a metrics line start anew with this batch. Dropout's step is the number of completed
    updates. A batch whose loss or gradient norm is not finite changes nothing but `loss` and `grad_norm`, and no batch after it changes anything,
    so the host may look at `failed` whenever it likes. `accumulate`: how many parts a batch is cut into, whose gradients are added up. `mesh`: the
    devices that share the rows of each batch, a host's array, and each hold the whole state.
    """

    def loss_of(params: nnx.State, state: TrainState, batch: Any, first_row: Any = None) -> jax.Array:
        model = nnx.merge(graph, params, state.rest, copy=True)
        model.dropout.step[...] = state.step.astype(jnp.uint32)
        if first_row is not None:
            model.dropout.first_row[...] += first_row.astype(jnp.uint32)
        return loss(model, batch)

    def accumulated(params: nnx.State, state: TrainState, batch: Any, count: jax.Array, first_row: Any = 0) -> tuple[jax.Array, nnx.State]:
        """The mean over `count` targets, those of the batch or of more, and its gradient; each row draws the dropout of the undivided batch."""
        parts = jax.tree.map(lambda x: x.reshape(accumulate, -1, *x.shape[1:]), batch)
        counts = jnp.sum(parts.weights.reshape(accumulate, -1), axis=1)
        rows = first_row + jnp.arange(accumulate) * parts.weights.shape[1]

        def add(total: Any, part: Any) -> tuple[Any, None]:
            counted, first_row, piece = part
            found = jax.value_and_grad(loss_of)(params, state, piece, first_row)
            return jax.tree.map(lambda t, x: t + x * (counted.astype(x.dtype) / count.astype(x.dtype)), total, found), None

        like = jax.eval_shape(loss_of, params, state, jax.tree.map(lambda x: x[0], parts))
        zeros = jnp.zeros_like(count, like.dtype), jax.tree.map(jnp.zeros_like, params)
        return jax.lax.scan(add, zeros, (counts, rows, parts))[0]

    def gradients(params: nnx.State, state: TrainState, batch: Any) -> tuple[jax.Array, nnx.State]:
        if mesh is None and accumulate == 1:
            return jax.value_and_grad(loss_of)(params, state, batch)
        count = jnp.sum(batch.weights)
        if mesh is None:
            return accumulated(params, state, batch, count)

        def of_rows(shared: Any, rows: Any, first_row: jax.Array) -> tuple[jax.Array, nnx.State]:
            params, state, count = shared
            return accumulated(params, state, rows, count, first_row)

        return sharding.sum_over_rows(of_rows, mesh)((params, state, count), batch)

    def step(state: TrainState, batch: Any) -> TrainState:
        mean, grads = gradients(state.params, state, batch)
        norm = global_norm(grads)
        updates, moments = optimizer.update(grads, state.optimizer, state.params)
        fresh, count = starts_line(state.step), jnp.sum(batch.weights)
        new = TrainState(
            step=state.step + 1,
            params=optax.apply_updates(state.params, updates),
            rest=state.rest,
            optimizer=moments,
            line_loss=jnp.where(fresh, 0, state.line_loss) + mean.astype(jnp.float32) * count,
            line_tokens=jnp.where(fresh, 0, state.line_tokens) + count,
            loss=mean.astype(jnp.float32),
            grad_norm=norm.astype(jnp.float32),
        )
        stopped = failed(state)
        good = ~stopped & ~failed(new)
        kept = jax.tree.map(lambda a, b: jnp.where(good, a, b), new, state)
        return kept._replace(loss=jnp.where(stopped, state.loss, new.loss), grad_norm=jnp.where(stopped, state.grad_norm, new.grad_norm))

    if mesh is None:
        return jax.jit(step, donate_argnums=0)
    whole = sharding.whole(mesh)
    placed = jax.jit(step, donate_argnums=0, in_shardings=(whole, sharding.by_rows(mesh)), out_shardings=whole)
    return sharding.one_at_a_time(placed, mesh)


def make_evaluation(
    graph: nnx.GraphDef, totals: Totals = language_totals, mesh: Mesh | None = None
) -> Callable[[nnx.State, nnx.State, Any], dict[str, jax.Array]]:
    """The jitted `totals` of a batch without dropout: (params, rest, batch) -> sums. `mesh` as in `make_step`."""

    def evaluate(params: nnx.State, rest: nnx.State, batch: Any) -> dict[str, jax.Array]:
        model = nnx.merge(graph, params, rest, copy=True)
        model.eval()
        return totals(model, batch)

    if mesh is None:
        return jax.jit(evaluate)
    of_rows = sharding.sum_over_rows(lambda model, rows, first_row: evaluate(model[0], model[1], rows), mesh)
    whole = sharding.whole(mesh)
    shared = lambda params, rest, batch: of_rows((params, rest), batch)
    placed = jax.jit(shared, in_shardings=(whole, whole, sharding.by_rows(mesh)), out_shardings=whole)
    return sharding.one_at_a_time(placed, mesh)


def to_arrays(state: Any) -> dict[str, Any]:
    """{dotted path: array} of a tree, the names that a checkpoint holds."""
    return {leaf_name(path): leaf for path, leaf in jax.tree.leaves_with_path(state)}


def from_arrays(arrays: Mapping[str, np.ndarray], like: Any) -> Any:
    """A tree like `like` filled from {dotted path: array}, placed as its arrays are; the devices get copies, since a step may delete them."""
    place = lambda leaf: leaf.sharding if isinstance(leaf, jax.Array) else None
    return jax.tree.map_with_path(lambda path, leaf: jax.device_put(jnp.array(arrays[leaf_name(path)]), place(leaf)), like)
