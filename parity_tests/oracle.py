"""Runs the models of both packages on one batch and names what they compute; the float64 run of the torch side is the truth that errors refer to."""

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from flax import nnx

import torch_ref.models.encoder
import torch_ref.models.gpt
import torch_ref.training.loss
import torch_ref.training.optimizer
import torch_ref.weights.tree
from flax_gpt.config import EncoderConfig, GPTConfig, OptimizerConfig
from flax_gpt.models.encoder import TinyTransformer
from flax_gpt.models.gpt import MiniGPT
from flax_gpt.nn.positions import sinusoidal_table
from flax_gpt.training.loss import cross_entropy
from flax_gpt.training.optimizer import global_norm, make_optimizer
from flax_gpt.weights import tree
from parity_tests import arithmetic, tolerances
from parity_tests.adapters import as_numpy

Values = dict[str, np.ndarray]
Config = GPTConfig | EncoderConfig


@dataclasses.dataclass(frozen=True)
class Batch:
    """What one forward and backward pass needs, as numpy."""

    tokens: np.ndarray
    """(B, T) int32."""
    targets: np.ndarray
    """(B, T) int32, or (B,) for a classifier."""
    lengths: np.ndarray | None = None
    """(B,) int32; tokens from there on are padding and do not count in the loss."""
    positions: np.ndarray | None = None
    """(B, T) int32, where a GPT's tokens stand; None: 0 … T - 1."""
    dropout_key: np.ndarray | None = None
    """(2,) uint32, the seed key of dropout; None runs in eval mode."""

    @classmethod
    def of(cls, inputs: Mapping[str, Any]) -> Self:
        integers = {
            name: np.asarray(inputs[name], np.int32) for name in ("tokens", "targets", "lengths", "positions") if inputs.get(name) is not None
        }
        key = inputs.get("dropout_key")
        return cls(**integers, dropout_key=None if key is None else np.asarray(key, np.uint32))

    @property
    def options(self) -> dict[str, np.ndarray]:
        """What the model is called with beside the tokens."""
        return {name: value for name, value in (("lengths", self.lengths), ("positions", self.positions)) if value is not None}

    @property
    def weights(self) -> np.ndarray | None:
        """(B, T), 1 for the tokens that count in the loss and 0 for padding; None when all count."""
        if self.lengths is None or self.targets.ndim == 1:
            return None
        return (np.arange(self.tokens.shape[1]) < self.lengths[:, None]).astype(np.float32)


def flax_model(config: Config, weights: Mapping[str, np.ndarray] | None = None, *, dtype: str | None = None, seed: int = 0) -> nnx.Module:
    """A model in eval mode, of `weights` or of fresh ones, in the configuration's dtypes or in `dtype`."""
    config = config if dtype is None else dataclasses.replace(config, dtype=dtype, param_dtype=dtype)
    kind = MiniGPT if isinstance(config, GPTConfig) else TinyTransformer
    with jax.enable_x64(config.param_dtype == "float64"):
        if weights is None:
            model = kind(config, rngs=nnx.Rngs(seed))
        else:
            model = _blank(kind, config)
            tree.load_weights(model, _with_positions(config, weights))
    model.eval()
    return model


def _blank(kind: type, config: Config) -> nnx.Module:
    """A model of zeros: drawing weights only to replace them costs a compilation for every shape."""
    graph, state = nnx.split(nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0))))
    return nnx.merge(graph, jax.tree.map(lambda leaf: jnp.asarray(np.zeros(leaf.shape, leaf.dtype)), state))


def _with_positions(config: Config, weights: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """The weights, with the table of positions that a file may leave out."""
    name = "pos_encoding.pe" if isinstance(config, GPTConfig) else "pos.pe"
    return {name: sinusoidal_table(config.max_len, config.d_model)[None], **weights} if config.positions == "sinusoidal" else weights


def torch_model(
    config: Config, weights: Mapping[str, np.ndarray] | None = None, *, dtype: str | None = None, seed: int | None = None
) -> torch.nn.Module:
    """The same in torch; `seed` seeds torch's global generator, from which it draws."""
    if seed is not None:
        torch.manual_seed(seed)
    config = config if dtype is None else dataclasses.replace(config, dtype=dtype, param_dtype=dtype)
    kind = torch_ref.models.gpt.MiniGPT if isinstance(config, GPTConfig) else torch_ref.models.encoder.TinyTransformer
    model = kind(config)
    if weights is not None:
        torch_ref.weights.tree.load_weights(model, weights)
    return model.eval()


def in_float64(model: Any) -> Any:
    """A copy of the model that holds the same numbers, buffers included, and computes in float64."""
    if isinstance(model, torch.nn.Module):
        return torch_model(model.config, torch_ref.weights.tree.torch_weights(model), dtype="float64")
    return flax_model(model.config, tree.torch_weights(model), dtype="float64")


def flax_weights(model: nnx.Module, names: Mapping[str, str] | None = None) -> Values:
    return _renamed(tree.torch_weights(model), names)


def torch_weights(model: torch.nn.Module) -> Values:
    return torch_ref.weights.tree.torch_weights(model)


def _renamed(values: Values, names: Mapping[str, str] | None) -> Values:
    return {(names or {}).get(name, name): value for name, value in values.items()}


def torch_values(model: torch.nn.Module, batch: Batch) -> Values:
    """attention/LAYER, logits, loss, grad_norm and grads/NAME of one batch, in the order of computation."""
    loss, logits, maps = _torch_forward(model, batch)
    model.zero_grad(set_to_none=True)
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    found = {f"attention/{i}": m for i, m in enumerate(maps)} | {"logits": logits, "loss": loss}
    found["grad_norm"] = torch.nn.utils.get_total_norm(grads)
    named = torch_ref.weights.tree.gradients(model)
    return {name: as_numpy(value) for name, value in found.items()} | {f"grads/{name}": value for name, value in named.items()}


def _torch_forward(model: torch.nn.Module, batch: Batch) -> Any:
    prepare_torch(model, batch.dropout_key)
    options = {name: torch.from_numpy(value) for name, value in batch.options.items()}
    logits, maps = model(torch.from_numpy(batch.tokens), **options, return_attention=True)
    return torch_loss(logits, batch), logits, maps


def prepare_torch(model: torch.nn.Module, dropout_key: np.ndarray | None) -> None:
    """Sets the mode and the state of dropout that a pass begins with: (2,) uint32, or eval mode for None."""
    model.train(dropout_key is not None)
    if dropout_key is not None:
        model.dropout.seed_key, model.dropout.step = torch.from_numpy(dropout_key.astype(np.int64)), 0


def torch_loss(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    weights = None if batch.weights is None else torch.from_numpy(batch.weights)
    return torch_ref.training.loss.cross_entropy(logits, torch.from_numpy(batch.targets), weights)


def flax_values(model: nnx.Module, batch: Batch, names: Mapping[str, str] | None = None) -> Values:
    """The same from an NNX model, under strict dtype and rank promotion."""
    graph, params, rest = nnx.split(set_dropout(model, batch.dropout_key), nnx.Param, ...)
    loss, logits, maps, norm, grads = _flax_gradient(model, graph, params, rest, batch)
    found = {f"attention/{i}": m for i, m in enumerate(maps)} | {"logits": logits, "loss": loss, "grad_norm": norm}
    named = _renamed(tree.torch_weights(model, grads), names)
    return {name: np.asarray(value) for name, value in found.items()} | {f"grads/{name}": value for name, value in named.items()}


def set_dropout(model: nnx.Module, dropout_key: np.ndarray | None) -> nnx.Module:
    """The model itself, in the mode and with the state of dropout that a pass begins with."""
    if dropout_key is None:
        model.eval()
    else:
        model.train()
        model.dropout.seed_key[...], model.dropout.step[...] = jnp.asarray(dropout_key), jnp.uint32(0)
    return model


def _flax_gradient(model: nnx.Module, graph: Any, params: Any, rest: Any, batch: Batch) -> Any:
    compiled = _gradient_in_float64 if model.config.param_dtype == "float64" else _gradient
    with _flax_arithmetic(model):
        return compiled(graph, params, rest, batch.tokens, batch.targets, batch.options, batch.weights)


@functools.partial(jax.jit, static_argnums=0)
def _gradient(graph: Any, params: Any, rest: Any, tokens: Any, targets: Any, options: Any, weights: Any) -> Any:
    def loss_of(params: Any) -> Any:
        model = nnx.merge(graph, params, rest, copy=True)
        logits, maps = model(tokens, **options, return_attention=True)
        return cross_entropy(logits, targets, weights), (logits, maps)

    (loss, (logits, maps)), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
    return loss, logits, maps, global_norm(grads), grads


# The float64 run asks what the program means, not how fast its code is: compiled in half the time.
_QUICK = {"xla_backend_optimization_level": 0}
_gradient_in_float64 = jax.jit(_gradient.__wrapped__, static_argnums=0, compiler_options=_QUICK)


@contextlib.contextmanager
def _flax_arithmetic(model: nnx.Module, *, strict: bool = True) -> Iterator[None]:
    """Products in the precision asked for, float64 when the model has it, and `strict`: no silent promotion of ranks, nor of dtypes.

    NNX's LayerNorm promotes other dtypes against float32 by itself, so dtypes are held strictly in float32 models only.
    """
    wide, strict_dtypes = model.config.param_dtype == "float64", model.config.param_dtype == "float32"
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.default_matmul_precision(arithmetic.precision(model.config.param_dtype)))
        stack.enter_context(jax.enable_x64(wide))
        if strict:
            stack.enter_context(jax.numpy_rank_promotion("raise"))
            stack.enter_context(jax.numpy_dtype_promotion("strict" if strict_dtypes else "standard"))
        yield


def torch_steps(
    model: torch.nn.Module, batch: Batch, config: OptimizerConfig, steps: Sequence[int], powers: np.random.Generator | None = None
) -> Values:
    """losses, grad_norms (before the clip) of max(steps) updates on one batch, and stepN/{weights,exp_avg,exp_avg_sq}/NAME after each N of `steps`;
    momentum_buffer for SGD.

    `model` stays as it was; `powers` disturbs the powers of Adam's β.
    """
    model = copy.deepcopy(model)
    optimizer = torch_ref.training.optimizer.make_optimizer(model, config, max(steps))
    disturb_powers(optimizer, powers)
    losses, norms, found = [], [], {}
    for number in range(1, max(steps) + 1):
        loss = _torch_forward(model, batch)[0]
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.detach())
        norms.append(optimizer.step())
        if number in steps:
            groups = {"weights": dict(model.named_parameters())} | torch_moments(model, optimizer)
            found |= _flat(number, {group: torch_ref.weights.tree.torch_weights(model, values) for group, values in groups.items()})
    return {"losses": torch.stack(losses).numpy(), "grad_norms": torch.stack(norms).numpy()} | found


def disturb_powers(optimizer: torch_ref.training.optimizer.Optimizer, powers: np.random.Generator | None) -> None:
    """Has every power of Adam's β carry a random error from `powers`, if that is given."""
    for group in optimizer.optimizer.param_groups if powers is not None else ():
        if "betas" in group:
            group["betas"] = tuple(tolerances.RoundedPower.of(beta, powers) for beta in group["betas"])


def flax_steps(model: nnx.Module, batch: Batch, config: OptimizerConfig, steps: Sequence[int]) -> Values:
    """The same from an NNX model and `flax_gpt.training.optimizer`."""
    graph, params, rest = nnx.split(set_dropout(model, batch.dropout_key), nnx.Param, ...)
    optimizer = make_optimizer(config, max(steps))

    @functools.partial(jax.jit, compiler_options=_QUICK if model.config.param_dtype == "float64" else None)
    def update(grads: Any, state: Any, params: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    losses, norms, found = [], [], {}
    with _flax_arithmetic(model, strict=False):
        state = jax.jit(optimizer.init)(params)
        for number in range(1, max(steps) + 1):
            loss, _, _, norm, grads = _flax_gradient(model, graph, params, rest, batch)
            params, state = update(grads, state, params)
            losses.append(np.asarray(loss))
            norms.append(np.asarray(norm))
            if number in steps:
                groups = {"weights": params} | moments(state)
                found |= _flat(number, {group: tree.torch_weights(model, values) for group, values in groups.items()})
    return {"losses": np.stack(losses), "grad_norms": np.stack(norms)} | found


def moments(state: Any) -> dict[str, Any]:
    """What Adam and SGD keep of earlier gradients in the state of `make_optimizer`, by torch's names: trees like the parameters."""
    found = {}
    for part in state:
        if isinstance(part, optax.ScaleByAdamState):
            found |= {"exp_avg": part.mu, "exp_avg_sq": part.nu}
        elif isinstance(part, optax.TraceState):
            found |= {"momentum_buffer": part.trace}
    return found


def torch_moments(model: torch.nn.Module, optimizer: torch_ref.training.optimizer.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    """The same from torch: {exp_avg, exp_avg_sq or momentum_buffer: {parameter: tensor}}."""
    held = {name: optimizer.optimizer.state[parameter] for name, parameter in model.named_parameters()}
    kept = [key for key in ("exp_avg", "exp_avg_sq", "momentum_buffer") if all(state.get(key) is not None for state in held.values())]
    return {key: {name: state[key] for name, state in held.items()} for key in kept}


def _flat(number: int, groups: Mapping[str, Values]) -> Values:
    return {f"step{number}/{group}/{name}": value for group, values in groups.items() for name, value in values.items()}
