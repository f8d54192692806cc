"""Runs the encoder-decoders of both packages on one batch and names what they compute, as `oracle` does for the other models."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from flax import nnx

import torch_ref.models.encoder_decoder
import torch_ref.training.loss
import torch_ref.training.optimizer
import torch_ref.weights.tree
from flax_gpt.config import EncoderDecoderConfig, OptimizerConfig
from flax_gpt.models.encoder_decoder import EncoderDecoder
from flax_gpt.training.loss import cross_entropy
from flax_gpt.training.optimizer import global_norm, make_optimizer
from flax_gpt.training.pairs import PairBatch
from flax_gpt.weights import tree
from parity_tests import adapters, arithmetic, compare, oracle, ports, tolerances
from parity_tests import names as naming
from parity_tests.adapters import as_numpy
from parity_tests.judgement import judge
from parity_tests.report import Report

Values = dict[str, np.ndarray]
KINDS = ("encoder", "decoder", "cross")


@dataclasses.dataclass(frozen=True)
class Case:
    """A configuration, weights of its float32 model, and what is asked of it."""

    config: EncoderDecoderConfig
    weights: Mapping[str, np.ndarray]
    batch: PairBatch
    label_smoothing: float = 0.0
    dropout_key: np.ndarray | None = None
    """(2,) uint32; None runs in eval mode."""
    optimizer: OptimizerConfig = dataclasses.field(default_factory=lambda: OptimizerConfig(warmup_steps=0))


def new_weights(config: EncoderDecoderConfig, seed: int = 0) -> Values:
    torch.manual_seed(seed)
    return torch_ref.weights.tree.torch_weights(torch_ref.models.encoder_decoder.EncoderDecoder(config))


def flax_model(case: Case, dtype: str = "float32") -> EncoderDecoder:
    config = dataclasses.replace(case.config, dtype=dtype, param_dtype=dtype)
    with jax.enable_x64(dtype == "float64"):
        model = EncoderDecoder(config, rngs=nnx.Rngs(0))
        tree.load_weights(model, case.weights)
        oracle.set_dropout(model, case.dropout_key)
    return model


def torch_model(case: Case, dtype: str = "float32") -> Any:
    model: Any = torch_ref.models.encoder_decoder.EncoderDecoder(dataclasses.replace(case.config, dtype=dtype, param_dtype=dtype))
    torch_ref.weights.tree.load_weights(model, case.weights)
    oracle.prepare_torch(model, case.dropout_key)
    return model


def flax_values(case: Case, dtype: str) -> Values:
    """KIND/LAYER maps, logits, loss, grad_norm, grads/NAME, and weights/NAME after one optimizer step."""
    graph, params, rest = nnx.split(flax_model(case, dtype), nnx.Param, ...)
    batch = case.batch

    def loss_of(params: Any) -> Any:
        model = nnx.merge(graph, params, rest, copy=True)
        lengths = dict(source_lengths=batch.source_lengths, target_lengths=batch.target_lengths)
        logits, maps = model(jnp.asarray(batch.source), jnp.asarray(batch.target), **lengths, return_attention=True)
        return cross_entropy(logits, batch.labels, jnp.asarray(batch.weights), label_smoothing=case.label_smoothing), (logits, maps)

    optimizer = make_optimizer(case.optimizer, 1)

    @jax.jit
    def run(params: Any) -> Any:
        (loss, (logits, maps)), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        return loss, logits, maps, grads, global_norm(grads), optax.apply_updates(params, updates)

    with jax.enable_x64(dtype == "float64"), jax.default_matmul_precision(arithmetic.precision(dtype)):
        loss, logits, maps, grads, norm, stepped = run(params)
        model = nnx.merge(graph, params, rest)
        groups = {"grads": tree.torch_weights(model, grads), "weights": tree.torch_weights(model, stepped)}
    found = {f"{kind}/{i}": m for kind in KINDS for i, m in enumerate(maps[kind])} | {"logits": logits, "loss": loss, "grad_norm": norm}
    return {name: np.asarray(value) for name, value in found.items()} | _flat(groups)


def torch_values(case: Case, dtype: str, powers: np.random.Generator | None = None) -> Values:
    """The same in torch; `powers` disturbs those of Adam's β."""
    model = torch_model(case, dtype)
    optimizer = torch_ref.training.optimizer.make_optimizer(model, case.optimizer, 1)
    oracle.disturb_powers(optimizer, powers)
    batch = PairBatch(*map(torch.from_numpy, case.batch))
    logits, maps = model(batch.source, batch.target, source_lengths=batch.source_lengths, target_lengths=batch.target_lengths, return_attention=True)
    loss = torch_ref.training.loss.cross_entropy(logits, batch.labels, batch.weights, label_smoothing=case.label_smoothing)
    loss.backward()
    found = {f"{kind}/{i}": m for kind in KINDS for i, m in enumerate(maps[kind])} | {"logits": logits, "loss": loss}
    groups = {"grads": torch_ref.weights.tree.gradients(model)}
    found["grad_norm"] = optimizer.step()
    groups["weights"] = torch_ref.weights.tree.torch_weights(model, dict(model.named_parameters()))
    return {name: as_numpy(value) for name, value in found.items()} | _flat(groups)


def check(case: Case, report: Report | None = None, *, dtypes: Sequence[str] = ("float32",), tapped: bool | None = None) -> Report:
    """Whether both packages compute the same for a case, in float64 and in each of `dtypes`: some of "float32", "bfloat16" and "float16".

    Half precision is compared up to the gradients. The report takes the maps of the narrowest of the dtypes. tapped: with the values inside, forward
    and backward, in float64 and float32; None: only where something differs.
    """
    report = Report() if report is None else report
    start = len(report.rows)
    kept: dict[str, Values] = {}

    def own_values(dtype: str) -> Values:
        kept["flax"] = flax_values(case, dtype)
        return kept["flax"]

    def their_values(dtype: str, powers: np.random.Generator | None = None) -> Values:
        found = torch_values(case, dtype, powers)
        if powers is None:
            kept["torch"] = found
        return found

    compare.check_programs(own_values, their_values, has_powers=True, narrow="float32" in dtypes, report=report)
    for dtype in (dtype for dtype in dtypes if dtype != "float32"):
        rounded = dataclasses.replace(case, weights={name: x.astype(dtype).astype(np.float32) for name, x in case.weights.items()})
        truth = lambda rounded=rounded: _before_the_step(torch_values(rounded, "float64"))
        kept = {p: _before_the_step(values(rounded, dtype)) for p, values in (("flax", flax_values), ("torch", torch_values))}
        judge(report, dtype, kept, truth(), tolerances.scatter(truth, dtype=dtype))
    report.maps = {name: {p: values[name] for p, values in kept.items()} for name in kept["flax"] if name.split("/")[0] in KINDS}
    compare.look_inside(report, start, dtypes, tapped, lambda dtype: _pair(case, dtype))
    return report


def _pair(case: Case, dtype: str) -> ports.Case:
    """Both models as `ports` sees them, for their taps."""
    batch = case.batch
    mine, other = adapters.NNX(flax_model(case, dtype), train=None), adapters.Torch(torch_model(case, dtype), train=None)
    sources = naming.match(mine.leaves, other.leaves, other.aliases, None, mine.values(), other.values())
    lengths = dict(source_lengths=batch.source_lengths, target_lengths=batch.target_lengths)
    inputs = adapters.Inputs(batch.source, batch.target, **lengths, return_attention=True)
    options = dict(label_smoothing=case.label_smoothing)
    loss = (
        lambda out: cross_entropy(out[0], jnp.asarray(batch.labels), jnp.asarray(batch.weights), **options),
        lambda out: torch_ref.training.loss.cross_entropy(out[0], torch.from_numpy(batch.labels), torch.from_numpy(batch.weights), **options),
    )
    return ports.Case(mine, other, sources, inputs, inputs, loss=loss, own=True, prepare=lambda model: oracle.prepare_torch(model, case.dropout_key))


def _before_the_step(values: Values) -> Values:
    return {name: value for name, value in values.items() if not name.startswith("weights/")}


def _flat(groups: Mapping[str, Values]) -> Values:
    return {f"{group}/{name}": value for group, values in groups.items() for name, value in values.items()}
