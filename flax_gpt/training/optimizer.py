"""AdamW, Adam and SGD as torch defines them, behind torch's global-norm clip, with schedules counted in optimizer steps."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from flax_gpt.config import OptimizerConfig
from flax_gpt.errors import require


def learning_rate_factor(config: OptimizerConfig, total_steps: int, count: int) -> float:
    """Share of the peak learning rate after `count` completed steps.

    'warmup_cosine': linear from 1 / warmup_steps at count 0 to 1 at count warmup_steps - 1, then a cosine (Loshchilov & Hutter 2017, equation 5) that
    reaches min_lr_ratio at the last step, count total_steps - 1, and stays there.
    """
    if config.schedule == "constant":
        return 1.0
    warmup, count = max(config.warmup_steps, 1), min(count, total_steps - 1)
    if count < warmup:
        return (count + 1) / warmup
    progress = (count + 1 - warmup) / (total_steps - warmup)
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


def learning_rate(config: OptimizerConfig, total_steps: int) -> Callable[[Any], Any]:
    """A schedule: completed steps -> learning rate. An int gives a float; an array gives an array.

    Both are torch's LambdaLR value, lr * factor in float64, rounded once to the float type in use: arrays look it up in a table made on the host.
    """
    require(total_steps >= 1, "total_steps", total_steps, "must be at least 1")
    length = total_steps if config.schedule == "warmup_cosine" else 1
    table = np.array([config.lr * learning_rate_factor(config, total_steps, count) for count in range(length)])

    def schedule(count: Any) -> Any:
        if isinstance(count, int):
            return float(table[min(count, length - 1)])
        return jnp.array(table)[jnp.clip(count, 0, length - 1)]

    return schedule


def global_norm(tree: Any) -> jax.Array:
    """The 2-norm of all leaves together, a scalar in float32 or better."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(x.astype(jnp.promote_types(x.dtype, jnp.float32)))) for x in jax.tree.leaves(tree)))


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """torch.nn.utils.clip_grad_norm_: gradients times min(1, max_norm / (norm + 1e-6)) (Pascanu et al. 2013, algorithm 1).

    optax's own clip leaves out the 1e-6 and is NaN when norm and max_norm are both 0.
    """

    def update(updates: Any, state: optax.EmptyState, params: Any = None) -> tuple[Any, optax.EmptyState]:
        factor = jnp.minimum(max_norm / (global_norm(updates) + 1e-6), 1.0)
        return jax.tree.map(lambda g: g * factor.astype(g.dtype), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def scale_by_adam(beta1: float, beta2: float, eps: float) -> optax.GradientTransformation:
    """Adam's direction (Kingma & Ba 2015, algorithm 1); the state is optax's ScaleByAdamState (count, mu, nu).

    The bias corrections 1 - beta^t are -expm1(t log beta) with log beta from float64. Taken from a float32 beta, as optax takes them, 1 - 0.999 is
    off by 1.3e-5 of itself, so that the first step differs from torch's by 6e-6 of itself.
    """
    log1, log2 = (math.log(beta) if beta else -math.inf for beta in (beta1, beta2))

    def init(params: Any) -> optax.ScaleByAdamState:
        mu, nu = jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params)
        return optax.ScaleByAdamState(count=jnp.zeros((), jnp.int32), mu=mu, nu=nu)

    def update(updates: Any, state: optax.ScaleByAdamState, params: Any = None) -> tuple[Any, optax.ScaleByAdamState]:
        count = optax.safe_increment(state.count)
        mu = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, state.mu, updates)
        nu = jax.tree.map(lambda n, g: beta2 * n + (1 - beta2) * g * g, state.nu, updates)
        correct1, correct2 = -jnp.expm1(count * log1), -jnp.expm1(count * log2)
        direction = jax.tree.map(lambda m, n: (m / correct1.astype(m.dtype)) / (jnp.sqrt(n / correct2.astype(n.dtype)) + eps), mu, nu)
        return direction, optax.ScaleByAdamState(count=count, mu=mu, nu=nu)

    return optax.GradientTransformation(init, update)


def leaf_name(path: tuple[Any, ...]) -> str:
    """The dotted name of a leaf of a tree of NNX variables, without the variable's own `.value`."""
    return jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")


def decay_tree(params: Any, decay: str) -> Any:
    """A tree like `params` of booleans, True = decays: for 'matrices' leaves of two or more axes (kernels, embeddings), for 'all' every leaf."""
    return jax.tree.map(lambda p: decay == "all" or p.ndim >= 2, params)


def decayed_names(params: Any, config: OptimizerConfig) -> list[str]:
    """Dotted paths of the parameters that weight decay shrinks."""
    if not _decays(config):
        return []
    flat, _ = jax.tree.flatten_with_path(decay_tree(params, config.decay))
    return [leaf_name(path) for path, decays in flat if decays]


def _decays(config: OptimizerConfig) -> bool:
    return config.optimizer != "adam" and config.weight_decay > 0


def make_optimizer(config: OptimizerConfig, total_steps: int, decay_mask: Any = None) -> optax.GradientTransformation:
    """Clip, Adam, decoupled weight decay (Loshchilov & Hutter 2019, algorithm 2), learning rate: in this order, as torch does them.

    SGD: clip, weight decay in the gradient, momentum (Sutskever et al. 2013, equations 1 to 4, the learning rate outside), learning rate.

    `decay_mask`: a tree of booleans like the parameters, or a function that makes one from them; None follows `config.decay`.
    """
    mask = decay_mask if decay_mask is not None else lambda params: decay_tree(params, config.decay)
    decay = optax.add_decayed_weights(config.weight_decay, mask) if _decays(config) else optax.identity()
    if config.optimizer == "sgd":
        direction = [decay, optax.trace(config.momentum, config.nesterov) if config.momentum else optax.identity()]
    else:
        direction = [scale_by_adam(config.beta1, config.beta2, config.eps), decay]
    return optax.chain(
        clip_by_global_norm(config.clip) if config.clip is not None else optax.identity(),
        *direction,
        optax.scale_by_learning_rate(learning_rate(config, total_steps)),
    )
