"""Small trainings: all batches known beforehand, the whole loop one jitted scan."""

import functools
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from flax_gpt.config import OptimizerConfig
from flax_gpt.training.data import Batch
from flax_gpt.training.loss import cross_entropy
from flax_gpt.training.optimizer import make_optimizer


def fit(model: nnx.Module, batches: Batch, config: OptimizerConfig) -> np.ndarray:
    """Trains `model` in place on `batches`, whose arrays are (steps, B, T), and returns the loss before each update (steps,). No dropout is drawn."""
    model.eval()
    graph, params, rest = nnx.split(model, nnx.Param, ...)  # type: ignore[misc]
    optimizer = make_optimizer(config, len(batches.tokens))
    params, losses = _scan(graph, optimizer, params, rest, batches)
    nnx.update(model, params)
    return np.asarray(losses)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _scan(graph: nnx.GraphDef, optimizer: optax.GradientTransformation, params: nnx.State, rest: nnx.State, batches: Batch) -> Any:
    def loss_of(params: nnx.State, batch: Batch) -> jax.Array:
        logits, _ = nnx.merge(graph, params, rest, copy=True)(batch.tokens)
        return cross_entropy(logits, batch.targets, batch.weights)

    def step(carry: tuple[Any, Any], batch: Batch) -> tuple[tuple[Any, Any], jax.Array]:
        params, state = carry
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    (params, _), losses = jax.lax.scan(step, (params, optimizer.init(params)), batches)
    return params, losses


def smoothed(losses: np.ndarray, points: int = 50) -> dict[str, list[Any]]:
    """{"step": last step of each of at most `points` equal parts, "loss": mean loss of the part}."""
    parts = np.array_split(np.asarray(losses, np.float64), min(points, len(losses)))
    return {"step": np.cumsum([len(part) for part in parts]).tolist(), "loss": [float(part.mean()) for part in parts]}
