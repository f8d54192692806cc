"""torch's side: `python -m benchmarks.torch_worker FOLDER PASS`. Never imports jax.

Eager and torch.compile, SDPA, AdamW in its fused in-place form, gradients set to None, inference_mode where nothing is trained.
"""

import itertools
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks import inputs, worker
from benchmarks.cases import KINDS, OPTIMIZER, SIZES, Attention, Beam, Checkpoint, Copy, Data, Forward, Generate, Matmul, Piece, Start, Train
from benchmarks.children import Place
from benchmarks.torch_fast import FastGPT
from benchmarks.worker import Program
from flax_gpt.config import GPTConfig
from flax_gpt.training.allocation import keep_heap
from torch_ref.training.optimizer import decays

CLIP = OPTIMIZER.clip or math.inf
DEVICE = "cuda" if torch.cuda.is_available() and os.environ.get("JAX_PLATFORMS", "") != "cpu" else "cpu"


def setup(threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    return {
        "versions": {"torch": torch.__version__},
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu",
        "platform": DEVICE,
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "precision": torch.get_float32_matmul_precision(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "compiler": shutil.which(os.environ.get("CXX", "g++")),
    }


def device_peak() -> int | None:
    if DEVICE == "cpu":
        return None
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak


def wait(result: Any) -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def compiled(function: Callable[..., Any], variant: str) -> Callable[..., Any]:
    """The function as the variant runs it. Raises RuntimeError where torch.compile has no C++ compiler."""
    if variant == "eager":
        return function
    if DEVICE == "cpu" and shutil.which(os.environ.get("CXX", "g++")) is None:
        raise RuntimeError("torch.compile needs a C++ compiler, and there is no g++")
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, mode=None if variant == "compile" else variant)


def tensor(array: np.ndarray, dtype: str | None = None) -> torch.Tensor:
    made = torch.from_numpy(array).to(DEVICE)
    return made if dtype is None else made.to(getattr(torch, dtype))


def program(function: Callable[..., Any], arguments: tuple[Any, ...], names: tuple[str, ...], **facts: Any) -> Program:
    """A function whose results, a tensor or a tuple, are compared under `names`."""

    def outputs() -> dict[str, np.ndarray]:
        found = function(*arguments)
        found = found if isinstance(found, tuple) else (found,)
        return {name: inputs.thin(to_numpy(value)) for name, value in zip(names, found, strict=True)}

    return Program(lambda: function(*arguments), outputs, wait, facts=facts)


def to_numpy(x: torch.Tensor) -> np.ndarray:
    return x.detach().float().cpu().numpy()


def matmul(case: Matmul, variant: str) -> Program:
    a, b = (tensor(inputs.normal((case.size, case.size), n), case.dtype) for n in range(2))
    function = torch.inference_mode()(torch.matmul)
    return Program(lambda: function(a, b), lambda: {"product": inputs.thin(to_numpy(function(a, b)[: inputs.PRODUCT_ROWS]))}, wait)


def copy(case: Copy, variant: str) -> Program:
    x = tensor(inputs.normal((case.size,), 0))
    return program(torch.zeros_like(x).copy_, (x,), ("copy",))


def attention(case: Attention, variant: str) -> Program:
    q, k, v, d_out = (tensor(x, case.dtype).transpose(1, 2).contiguous() for x in inputs.attention(case))
    for x in (q, k, v):
        x.requires_grad_(case.backward)

    def run() -> tuple[torch.Tensor, ...]:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=case.kv_heads != case.heads)
        return (out, *torch.autograd.grad(out, (q, k, v), d_out)) if case.backward else (out,)

    def outputs() -> dict[str, np.ndarray]:
        return {name: to_numpy(x.transpose(1, 2)) for name, x in zip(("out", "dq", "dk", "dv"), run(), strict=False)}

    return Program(run, outputs, wait, facts={"kernel": sdpa_backend(q, k, v, case)})


def sdpa_backend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Attention) -> str:
    """Which of SDPA's back ends torch chooses for the call. Raises RuntimeError for the one that is no kernel, on a GPU."""
    number = torch._fused_sdp_choice(q, k, v, None, 0.0, case.causal, enable_gqa=case.kv_heads != case.heads)
    backend = torch.nn.attention.SDPBackend(number)
    if DEVICE == "cuda" and backend == torch.nn.attention.SDPBackend.MATH:
        raise RuntimeError("scaled_dot_product_attention falls back to its math back end for this case")
    return f"sdpa {backend.name.removesuffix('_ATTENTION').lower()}"


def piece(case: Piece, variant: str) -> Program:
    x, d_out = (tensor(inputs.normal((case.rows, case.width), n)) for n in range(2))
    x.requires_grad_(True)
    if case.layer == "cross_entropy":
        targets = tensor(inputs.classes(case.rows, case.width)).long()
        loss = compiled(F.cross_entropy, variant)

        def both() -> tuple[torch.Tensor, ...]:
            out = loss(x, targets)
            return out, *torch.autograd.grad(out, (x,))

        return program(both, (), ("loss", "dx"))
    layers: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"gelu": F.gelu, "dropout": lambda x: F.dropout(x, 0.1, True)}
    wanted, names = [x], ["out", "dx"]
    if case.layer == "layer_norm":
        weight, bias = (value(case.width, device=DEVICE, requires_grad=True) for value in (torch.ones, torch.zeros))
        layers["layer_norm"] = lambda x: F.layer_norm(x, (case.width,), weight, bias, 1e-5)
        wanted, names = [x, weight, bias], ["out", "dx", "dweight", "dbias"]
    layer = compiled(layers[case.layer], variant)

    def run() -> tuple[torch.Tensor, ...]:
        out = layer(x)
        return out, *torch.autograd.grad(out, wanted, d_out)

    return program(run, (), tuple(names))


def model(config: GPTConfig, weights: dict[str, np.ndarray]) -> FastGPT:
    return FastGPT(config, weights).to(DEVICE)


def forward(case: Forward, variant: str) -> Program:
    size = case.model
    made = compiled(model(size.config, inputs.model_weights(case)).eval(), variant)
    batch = tensor(inputs.tokens(case)[0])
    rows = inputs.counted_rows(size.batch, size.length)
    function = torch.inference_mode()(made) if variant == "eager" else torch.no_grad()(made)
    return Program(lambda: function(batch), lambda: {"logits": inputs.thin(to_numpy(function(batch)[:rows]))}, wait)


def optimizer_of(made: FastGPT) -> torch.optim.Optimizer:
    shrunk = [p for p in made.parameters() if decays(p, OPTIMIZER)]
    rest = [p for p in made.parameters() if not decays(p, OPTIMIZER)]
    groups = [{"params": shrunk, "weight_decay": OPTIMIZER.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=OPTIMIZER.lr, betas=(OPTIMIZER.beta1, OPTIMIZER.beta2), eps=OPTIMIZER.eps, fused=True)


def train(case: Train, variant: str) -> Program:
    made = model(case.config, inputs.model_weights(case)).train()
    return training(case, made, compiled(made.loss, variant), lambda tokens, targets: (tokens, targets), lambda loss: loss)


def training(
    case: Train,
    made: FastGPT,
    loss_of: Callable[[Any, Any], torch.Tensor],
    cut: Callable[[torch.Tensor, torch.Tensor], tuple[Any, Any]],
    whole: Callable[[torch.Tensor], torch.Tensor],
) -> Program:
    """Steps of `made`. `cut` makes of a batch what `loss_of` takes, and `whole` of its result the loss of that batch, where it is compared."""
    size = case.model
    optimizer = optimizer_of(made)
    batches = [cut(*one_batch(case, number)) for number in range(4)]

    def step(tokens: Any, targets: Any) -> tuple[torch.Tensor, torch.Tensor]:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(tokens, targets)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(made.parameters(), CLIP)
        optimizer.step()
        return loss, norm

    def run() -> torch.Tensor:
        batches.append(batches.pop(0))
        return step(*batches[-1])[0]

    def outputs() -> dict[str, np.ndarray]:
        nonlocal optimizer
        made.load(inputs.model_weights(case))
        optimizer = optimizer_of(made)
        made.train(case.dropout == 0)  # torch draws dropout's numbers from a generator of its own
        tokens, targets = one_batch(case, 0)
        targets[inputs.counted_rows(size.batch, size.length) :] = -100
        loss, norm = step(*cut(tokens, targets))
        made.train()
        named = dict(made.named_parameters())
        found = {"losses": to_numpy(whole(loss))[None], "grad_norms": to_numpy(norm)[None]}
        for group, values in (("weights", named), ("exp_avg", {name: optimizer.state[p]["exp_avg"] for name, p in named.items()})):
            found |= {f"step1/{group}/{name}": inputs.thin(array) for name, array in made.named(values).items()}
        return found

    return Program(run, outputs, wait, chained=True)


def devices() -> int:
    return torch.cuda.device_count() if DEVICE == "cuda" else len(os.sched_getaffinity(0))


def environments(count: int) -> list[dict[str, str]]:
    """A process a device; gloo would look for the host's name on a network."""
    return [{"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"} if DEVICE == "cpu" else {}] * count


def share(case: Train, variant: str, place: Place) -> Program:
    """One process of DistributedDataParallel, which takes its rows of each batch and averages the gradients of all processes as they are found."""
    if DEVICE == "cuda":
        torch.cuda.set_device(place.number)
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{place.folder}/store", rank=place.number, world_size=place.count)
    made = model(case.config, inputs.model_weights(case)).train()
    parallel = DistributedDataParallel(made, forward_sync_buffers=False, gradient_as_bucket_view=True)

    def cut(tokens: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, float]]:
        """This process's rows, and what makes of the sum of their losses a number whose mean over the processes is that of all counted tokens."""
        factor = place.count / int((targets != -100).sum())
        return tokens.chunk(place.count)[place.number], (targets.chunk(place.count)[place.number].flatten(), factor)

    def loss_of(tokens: torch.Tensor, aim: tuple[torch.Tensor, float]) -> torch.Tensor:
        targets, factor = aim
        return F.cross_entropy(parallel(tokens).flatten(0, 1), targets, reduction="sum") * factor

    def whole(loss: torch.Tensor) -> torch.Tensor:
        mean = loss.detach() / place.count
        dist.all_reduce(mean)
        return mean

    found = training(case, made, loss_of, cut, whole)
    found.facts = {"backend": backend, "threads": torch.get_num_threads()}
    return found


def one_batch(case: Train, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, targets = inputs.tokens(case, number)
    return tensor(tokens), tensor(targets).long()


def generate(case: Generate, variant: str) -> Program:
    """Eager steps look at the filled part of the cache; compiled ones, whose shapes must not change, at all of it behind a mask."""
    made = model(case.config, inputs.model_weights(case)).eval()
    prompts = tensor(inputs.prompts(case)).long()
    cache = made.cache(case.batch, case.max_len)
    places = torch.arange(case.max_len, device=DEVICE)

    def masked(tokens: torch.Tensor, cache: Any, position: torch.Tensor) -> torch.Tensor:
        return made.step(tokens, cache, position, (places <= position)[None, None, None])

    step = made.step if variant == "eager" else compiled(masked, variant)
    positions = range(case.max_len) if variant == "eager" else places.split(1)
    whole = made if variant == "eager" else torch.compile(made, fullgraph=True, dynamic=True)
    prefill = compiled(made.prefill, variant) if case.new == 1 else made.prefill

    def cached() -> torch.Tensor:
        found = [prompts, prefill(prompts, cache).argmax(-1, keepdim=True)]
        for position in positions[case.prompt : case.prompt + case.new - 1]:
            found.append(step(found[-1], cache, position).argmax(-1, keepdim=True))
        return torch.cat(found, dim=1)

    def recomputed() -> torch.Tensor:
        found = prompts
        for _ in range(case.new):
            found = torch.cat([found, whole(found)[:, -1].argmax(-1, keepdim=True)], dim=1)
        return found

    # A compiled program cannot be entered with tensors of inference mode that it shall change.
    mode = torch.inference_mode if variant == "eager" else torch.no_grad
    run = mode()(recomputed if case.recompute else cached)
    return Program(run, lambda: {"tokens": run().cpu().numpy()}, wait)


def beam(case: Beam, variant: str) -> Program:
    made = model(case.config, inputs.model_weights(case)).eval()
    B, K, V = case.batch, case.beams, case.config.vocab_size
    prompts = tensor(inputs.prompts(case)).long()
    rows = torch.arange(B, device=DEVICE)[:, None]

    @torch.inference_mode()
    def run() -> tuple[torch.Tensor, torch.Tensor]:
        cache = made.cache(B, case.max_len)
        log_probs, tokens = torch.log_softmax(made.prefill(prompts, cache), dim=-1).topk(K)
        cache = [(k.repeat_interleave(K, 0), v.repeat_interleave(K, 0)) for k, v in cache]
        found = tokens[..., None]
        for position in range(case.prompt, case.prompt + case.new - 1):
            logits = made.step(found[..., -1].reshape(B * K, 1), cache, position)
            total = log_probs[..., None] + torch.log_softmax(logits, dim=-1).reshape(B, K, V)
            log_probs, index = total.flatten(1).topk(K)
            parent = index // V
            found = torch.cat([found[rows, parent], (index % V)[..., None]], dim=-1)
            flat = (rows * K + parent).flatten()
            cache = [(k.index_select(0, flat), v.index_select(0, flat)) for k, v in cache]
        return found[:, 0], log_probs[:, 0]

    return Program(run, lambda: {name: x.cpu().numpy() for name, x in zip(("tokens", "log_probs"), run(), strict=True)}, wait)


def start(case: Start, variant: str) -> Program:
    """A new interpreter that runs `first_step`."""
    losses: dict[str, np.ndarray] = {}

    def run() -> dict[str, np.ndarray]:
        losses["losses"] = worker.first_step("benchmarks.torch_worker", case, variant, os.environ)
        return losses

    return Program(run, lambda: losses, once=True)


def first_step(case: Start, variant: str) -> float:
    return float(train(Train(size=case.size, dropout=0.0), variant).run())


def checkpoint(case: Checkpoint, variant: str) -> Program:
    made = model(SIZES[case.size].config, inputs.weights(SIZES[case.size].config))
    optimizer = optimizer_of(made)
    for parameter in made.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    made.load(inputs.weights(made.config))
    folder = tempfile.TemporaryDirectory(prefix="flax-gpt-bench-")
    path = Path(folder.name) / "state"

    def flat() -> dict[str, torch.Tensor]:
        moments = {f"{n}.{key}": x for n, state in optimizer.state_dict()["state"].items() for key, x in state.items()}
        return {name: x.contiguous() for name, x in (dict(made.state_dict()) | moments).items()}

    def save() -> None:
        temporary = path.with_suffix(".tmp")
        if variant == "safetensors":
            safetensors.torch.save_file(flat(), temporary)
        else:
            torch.save({"model": made.state_dict(), "optimizer": optimizer.state_dict()}, temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)

    def load() -> Any:
        return safetensors.torch.load_file(path) if variant == "safetensors" else torch.load(path, weights_only=True)

    def outputs() -> dict[str, np.ndarray]:
        save()
        found = load()
        found = found if variant == "safetensors" else found["model"]
        named = {name: found[name] for name, _ in made.named_parameters()}
        return {file: inputs.thin(array) for file, array in made.named(named).items()}

    save()
    return Program(load if case.load else save, outputs, wait, keep=folder)


def data(case: Data, variant: str) -> Program:
    size = SIZES[case.size]
    windows = torch.arange(case.tokens, dtype=torch.int32).unfold(0, size.length + 1, 1)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))
    steps = -(-len(windows) // size.batch)
    counter = itertools.count()

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = windows[order[step * size.batch : (step + 1) * size.batch]].long()
        return rows[:, :-1], rows[:, 1:]

    return Program(lambda: batch(next(counter) % steps), lambda: worker.epoch(batch(step) for step in range(steps)))


BUILDERS: dict[str, worker.Builder] = {kind: globals()[kind] for kind in KINDS}
SIDE = worker.Side("torch", BUILDERS, setup, device_peak, first_step, keep_heap, devices, environments, share)

if __name__ == "__main__":
    worker.main(SIDE, sys.argv[1:])
