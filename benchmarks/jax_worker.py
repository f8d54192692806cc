"""JAX's side: `python -m benchmarks.jax_worker FOLDER PASS`. Never imports torch.

Everything is jitted once outside the loop; the training state is donated; the model, its step and attention are `flax_gpt`'s own.
"""

import itertools
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from benchmarks import inputs, worker
from benchmarks.cases import KINDS, OPTIMIZER, SIZES, Attention, Beam, Checkpoint, Copy, Data, Forward, Generate, Matmul, Piece, Start, Train
from benchmarks.children import Place
from benchmarks.worker import Program
from flax_gpt.config import GPTConfig, TrainConfig
from flax_gpt.generation import sampling
from flax_gpt.generation.beam import beam_search
from flax_gpt.kernels import attend, explain
from flax_gpt.models.gpt import MiniGPT
from flax_gpt.nn.dropout import Draw, dropout
from flax_gpt.nn.feed_forward import gelu
from flax_gpt.training import checkpoint as checkpoints
from flax_gpt.training import sharding
from flax_gpt.training.allocation import keep_memory
from flax_gpt.training.compilation import use_compilation_cache
from flax_gpt.training.data import Batch, Windows
from flax_gpt.training.loss import cross_entropy
from flax_gpt.training.optimizer import leaf_name, make_optimizer
from flax_gpt.training.state import make_step, new_state, split_model, to_arrays
from flax_gpt.weights import tree


def setup(threads: int) -> dict[str, Any]:
    jax.config.update("jax_default_matmul_precision", "highest")
    return {
        "versions": {"jax": jax.__version__},
        "device": str(jax.devices()[0].device_kind),
        "platform": jax.default_backend(),
        "threads": threads,  # XLA's pool has a thread for each processor that this process may use
        "precision": "highest",
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
    }


def device_peak() -> int | None:
    stats = jax.devices()[0].memory_stats()
    return stats.get("peak_bytes_in_use") if stats else None


def wait(result: Any) -> None:
    jax.block_until_ready(result)


def program(function: Any, arguments: tuple[Any, ...], names: tuple[str, ...], **facts: Any) -> Program:
    """A jitted function of arrays on the device, whose results are compared under `names`."""

    def outputs() -> dict[str, np.ndarray]:
        found = function(*arguments)
        found = found if isinstance(found, tuple) else (found,)
        return {name: inputs.thin(np.asarray(value.astype(jnp.float32))) for name, value in zip(names, found, strict=True)}

    return Program(lambda: function(*arguments), outputs, wait, facts=facts)


def matmul(case: Matmul, variant: str) -> Program:
    a, b = (jnp.asarray(inputs.rounded(inputs.normal((case.size, case.size), n), case.dtype), case.dtype) for n in range(2))
    function = jax.jit(jnp.matmul)

    def outputs() -> dict[str, np.ndarray]:
        return {"product": inputs.thin(np.asarray(function(a, b)[: inputs.PRODUCT_ROWS].astype(jnp.float32)))}

    return Program(lambda: function(a, b), outputs, wait)


def copy(case: Copy, variant: str) -> Program:
    x = jnp.asarray(inputs.normal((case.size,), 0))
    function = jax.jit(lambda old, x: jnp.copy(x), donate_argnums=0, keep_unused=True)
    holder = [jnp.zeros_like(x)]

    def run() -> jax.Array:
        holder[0] = function(holder[0], x)
        return holder[0]

    return Program(run, lambda: {"copy": inputs.thin(np.asarray(run()))}, wait, chained=True)


def attention(case: Attention, variant: str) -> Program:
    arrays = [jnp.asarray(x, case.dtype) for x in inputs.attention(case)]

    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attend(q, k, v, causal=case.causal, assume_finite=True)

    def both(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array) -> tuple[jax.Array, ...]:
        out, pull = jax.vjp(forward, q, k, v)
        return out, *pull(d_out)

    function, arguments = jax.jit(both if case.backward else forward), arrays if case.backward else arrays[:3]

    def outputs() -> dict[str, np.ndarray]:
        found = function(*arguments)
        found = found if case.backward else (found,)
        return {name: np.asarray(x.astype(jnp.float32)) for name, x in zip(("out", "dq", "dk", "dv"), found, strict=False)}

    return Program(lambda: function(*arguments), outputs, wait, facts={"kernel": explain(*arrays[:3], causal=case.causal, assume_finite=True).chosen})


def piece(case: Piece, variant: str) -> Program:
    x, d_out = (jnp.asarray(inputs.normal((case.rows, case.width), n)) for n in range(2))
    if case.layer == "cross_entropy":
        targets = jnp.asarray(inputs.classes(case.rows, case.width))
        return program(jax.jit(jax.value_and_grad(cross_entropy)), (x, targets), ("loss", "dx"))
    if case.layer == "layer_norm":
        graph, state = nnx.split(nnx.LayerNorm(case.width, epsilon=1e-5, use_fast_variance=False, rngs=nnx.Rngs(0)))

        def norm(x: jax.Array, state: Any, d_out: jax.Array) -> tuple[jax.Array, ...]:
            out, pull = jax.vjp(lambda x, state: nnx.merge(graph, state)(x), x, state)
            d_x, d_state = pull(d_out)
            return out, d_x, d_state["scale"][...], d_state["bias"][...]

        return program(jax.jit(norm), (x, state, d_out), ("out", "dx", "dweight", "dbias"))
    layers = {
        "gelu": lambda x, key: gelu(x),
        "dropout": lambda x, key: dropout(x, 0.1, Draw(key, jnp.uint32(0)), "benchmark"),
    }

    def both(x: jax.Array, key: jax.Array, d_out: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, pull = jax.vjp(lambda x: layers[case.layer](x, key), x)
        return out, pull(d_out)[0]

    return program(jax.jit(both), (x, jnp.asarray(inputs.DROPOUT_KEY), d_out), ("out", "dx"))


def model(config: GPTConfig, weights: dict[str, np.ndarray]) -> MiniGPT:
    made = MiniGPT(config, rngs=nnx.Rngs(0))
    tree.load_weights(made, weights)
    made.dropout.seed_key[...] = jnp.asarray(inputs.DROPOUT_KEY)
    return made


def forward(case: Forward, variant: str) -> Program:
    size = case.model
    made = model(size.config, inputs.model_weights(case))
    made.eval()
    graph, weights = nnx.split(made)
    batch = jnp.asarray(inputs.tokens(case)[0])
    function = jax.jit(lambda weights, tokens: nnx.merge(graph, weights)(tokens)[0])
    rows = inputs.counted_rows(size.batch, size.length)

    def outputs() -> dict[str, np.ndarray]:
        return {"logits": inputs.thin(np.asarray(function(weights, batch))[:rows])}

    return Program(lambda: function(weights, batch), outputs, wait, facts=kernel_of(size.config, size.batch, size.length))


def kernel_of(config: GPTConfig, batch: int, length: int) -> dict[str, Any]:
    """Which kernel serves the model's attention on such a batch."""
    q, k = (jnp.zeros((batch, length, heads, config.head_dim), config.dtype) for heads in (config.num_heads, config.kv_heads))
    return {"kernel": explain(q, k, k, causal=True, assume_finite=True).chosen}


def train(case: Train, variant: str) -> Program:
    size, config = case.model, case.config
    made = model(config, inputs.model_weights(case))
    graph, params, rest = split_model(made)
    optimizer = make_optimizer(OPTIMIZER, 1)
    mesh = sharding.data_mesh(case.devices, TrainConfig(batch_size=size.batch))
    step = make_step(graph, optimizer, lambda completed: completed % 10 == 0, mesh=mesh)
    start = lambda: new_state(params, rest, optimizer, mesh)
    holder = [start()]
    batches = [one_batch(case, number, mesh=mesh) for number in range(4)]

    def run() -> Any:
        holder[0] = step(holder[0], batches[0])
        batches.append(batches.pop(0))
        return holder[0].loss

    def outputs() -> dict[str, np.ndarray]:
        rows = inputs.counted_rows(size.batch, size.length)
        after = step(start(), one_batch(case, 0, rows, mesh))
        adam = next(part for part in after.optimizer if isinstance(part, optax.ScaleByAdamState))
        found = {"losses": np.asarray(after.loss)[None], "grad_norms": np.asarray(after.grad_norm)[None]}
        for group, values in (("weights", after.params), ("exp_avg", adam.mu)):
            found |= {f"step1/{group}/{name}": inputs.thin(array) for name, array in tree.torch_weights(made, values).items()}
        return found

    return Program(run, outputs, wait, chained=True, facts=kernel_of(config, size.batch, size.length))


def one_batch(case: Train, number: int, rows: int | None = None, mesh: Mesh | None = None) -> Batch:
    """A batch on the device, or cut over those of `mesh`, of which the first `rows` count; None: all."""
    size = case.model
    tokens, targets = inputs.tokens(case, number)
    weights = np.ones(tokens.shape, np.float32)
    weights[size.batch if rows is None else rows :] = 0
    return jax.device_put(Batch(tokens, targets, weights), None if mesh is None else sharding.by_rows(mesh))


def devices() -> int:
    return len(os.sched_getaffinity(0)) if jax.default_backend() == "cpu" else jax.local_device_count()


def environments(count: int) -> list[dict[str, str]]:
    """One process has all devices; of a processor it must be told to make so many."""
    return [{"JAX_NUM_CPU_DEVICES": str(count)} if jax.default_backend() == "cpu" else {}]


def share(case: Train, variant: str, place: Place) -> Program:
    return train(case, variant)


def generate(case: Generate, variant: str) -> Program:
    made = model(case.config, inputs.model_weights(case))
    prompts = inputs.prompts(case)
    run = lambda: sampling.generate(made, prompts, case.new, temperature=0.0)
    return Program(run, lambda: {"tokens": run()})


def beam(case: Beam, variant: str) -> Program:
    made = model(case.config, inputs.model_weights(case))
    prompts = inputs.prompts(case)
    run = lambda: beam_search(made, prompts, case.new, beams=case.beams)

    def outputs() -> dict[str, np.ndarray]:
        found = run()
        return {"tokens": found.tokens[:, 0], "log_probs": found.log_probs[:, 0]}

    return Program(run, outputs)


def start(case: Start, variant: str) -> Program:
    """A new interpreter that runs `first_step`, its compilation cache empty ('cold') or left by one before it ('warm')."""
    folder = tempfile.TemporaryDirectory(prefix="flax-gpt-bench-")
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": folder.name}
    losses: dict[str, np.ndarray] = {}

    def run() -> dict[str, np.ndarray]:
        if variant == "cold":
            shutil.rmtree(folder.name, ignore_errors=True)
        losses["losses"] = worker.first_step("benchmarks.jax_worker", case, variant, environment)
        return losses

    if variant == "warm":
        run()
    return Program(run, lambda: losses, once=True, keep=folder)


def first_step(case: Start, variant: str) -> float:
    """One training step of a new process, as `flax-gpt train` begins."""
    use_compilation_cache()
    program = train(Train(size=case.size, dropout=0.0), "jit")
    return float(program.run())


def checkpoint(case: Checkpoint, variant: str) -> Program:
    made = model(SIZES[case.size].config, inputs.weights(SIZES[case.size].config))
    _, params, rest = split_model(made)
    arrays = to_arrays(new_state(params, rest, make_optimizer(OPTIMIZER, 1)))
    folder = tempfile.TemporaryDirectory(prefix="flax-gpt-bench-")
    place = Path(folder.name)
    save = lambda: checkpoints.save(place, 0, arrays, {})
    load = lambda: checkpoints.restore(checkpoints.verify(place / "checkpoints" / "0"), arrays)

    def outputs() -> dict[str, np.ndarray]:
        save()
        found = load()
        names = {leaf_name(("params", *path)): file for path, (file, _) in tree.leaf_names(made).items()}
        transposed = {file for file, turned in tree.leaf_names(made).values() if turned}
        kept = {names[name]: array for name, array in found.items() if name in names}
        return {file: inputs.thin(array.T if file in transposed else array) for file, array in kept.items()}

    save()
    return Program(load if case.load else save, outputs, wait, keep=folder)


def data(case: Data, variant: str) -> Program:
    size = SIZES[case.size]
    windows = Windows(np.arange(case.tokens, dtype=np.int32), window=size.length, batch_size=size.batch, seed=0)
    steps = itertools.count()
    return Program(lambda: windows[next(steps)], lambda: worker.epoch(windows[step][:2] for step in range(windows.steps_per_epoch)))


BUILDERS: dict[str, worker.Builder] = {kind: globals()[kind] for kind in KINDS}
SIDE = worker.Side("jax", BUILDERS, setup, device_peak, first_step, keep_memory, devices, environments, share)

if __name__ == "__main__":
    worker.main(SIDE, sys.argv[1:])
