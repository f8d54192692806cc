"""What is measured: each case is one frozen dataclass that the workers of both frameworks read. Standard library and `flax_gpt.config` alone.

FLOPs are the model's: multiplications and additions that the definition asks for, the causal half where attention is causal, and two times the
forward pass for the backward pass; what a program computes a second time does not count. Bytes are the arrays that must be read and written once.
"""

import dataclasses
import fnmatch
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from flax_gpt.config import GPTConfig, OptimizerConfig
from flax_gpt.errors import require

BYTES = {"float32": 4, "bfloat16": 2}
OPTIMIZER = OptimizerConfig(schedule="constant")
"""AdamW behind a clip at 1.0, at a constant rate: what every training case runs."""


@dataclasses.dataclass(frozen=True)
class Size:
    """A model and the batch that trains it."""

    config: GPTConfig
    batch: int
    length: int


SIZES = {
    "S": Size(GPTConfig(vocab_size=250, d_model=64, num_heads=4, num_layers=3, max_len=30), 16, 30),
    "M": Size(GPTConfig(vocab_size=250, d_model=128, num_heads=4, num_layers=4, max_len=128), 32, 128),
    "L": Size(GPTConfig(vocab_size=1000, d_model=384, num_heads=6, num_layers=6, max_len=256), 16, 256),
    "124M": Size(
        GPTConfig(
            vocab_size=50257,
            d_model=768,
            num_heads=12,
            num_layers=12,
            max_len=1024,
            positions="learned",
            activation="gelu_tanh",
            attention_bias=True,
            scale_embeddings=False,
        ),
        4,
        1024,
    ),
}
"""S is the original's size, 124M that of GPT-2 (Radford et al. 2019)."""


def parameters(config: GPTConfig) -> int:
    """How many numbers training moves; a tied head counts once."""
    return config.vocab_size * config.d_model + _block_parameters(config) * config.num_layers + _other_parameters(config)


def _block_parameters(config: GPTConfig) -> int:
    D, F, kv = config.d_model, config.ff_width, config.kv_heads * config.head_dim
    biases = (2 * D + 2 * kv) * config.attention_bias + (F + D) * config.feed_forward_bias
    return 2 * D * D + 2 * D * kv + 2 * D * F + biases + 4 * D


def _other_parameters(config: GPTConfig) -> int:
    return 2 * config.d_model + (config.max_len * config.d_model if config.positions == "learned" else 0)


def forward_flops(config: GPTConfig, batch: int, length: int) -> float:
    """Of `batch` sequences of `length` tokens: every matrix product, the causal half of attention, the head."""
    D, F, kv = config.d_model, config.ff_width, config.kv_heads * config.head_dim
    token = config.num_layers * 2 * (2 * D * D + 2 * D * kv + 2 * D * F) + 2 * D * config.vocab_size
    return batch * length * (token + config.num_layers * 4 * D * (length + 1) / 2)


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the report. `name` identifies it; both sides know nothing of it but its fields."""

    kind: ClassVar[str]
    variants: ClassVar[Mapping[str, tuple[str, ...]]] = {"jax": ("jit",), "torch": ("eager",)}
    """How each side runs it; the ratio is taken against the fastest of torch's."""
    devices: ClassVar[int] = 1
    """How many share it."""
    dtype: str = "float32"

    @property
    def name(self) -> str:
        raise NotImplementedError

    @property
    def flops(self) -> float | None:
        return None

    @property
    def bytes(self) -> float | None:
        return None

    @property
    def unit(self) -> tuple[str, float]:
        """What a run is counted in beside its time, and how many of it there are."""
        return "runs", 1

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind} | dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Matmul(Case):
    """A square product: the ceiling of arithmetic."""

    kind = "matmul"
    size: int = 2048

    @property
    def name(self) -> str:
        return f"matmul-{self.size}-{self.dtype}"

    @property
    def flops(self) -> float:
        return 2.0 * self.size**3

    @property
    def bytes(self) -> float:
        return 3.0 * self.size**2 * BYTES[self.dtype]


@dataclasses.dataclass(frozen=True)
class Copy(Case):
    """An array read and another written: the ceiling of memory."""

    kind = "copy"
    size: int = 1 << 26

    @property
    def name(self) -> str:
        return f"copy-{self.size * BYTES[self.dtype] >> 20}MiB"

    @property
    def bytes(self) -> float:
        return 2.0 * self.size * BYTES[self.dtype]


@dataclasses.dataclass(frozen=True)
class Attention(Case):
    """softmax(Q Kᵀ / √Dh) V alone, (B, T, H, Dh) with K key/value heads; backward: the gradients of q, k and v too."""

    kind = "attention"
    length: int = 512
    backward: bool = False
    causal: bool = True
    batch: int = 2
    heads: int = 8
    kv_heads: int = 8
    width: int = 64

    @property
    def name(self) -> str:
        parts = ["attention", f"T{self.length}", f"Dh{self.width}", self.dtype, "backward" if self.backward else "forward"]
        return "-".join(parts + ["full"] * (not self.causal) + [f"K{self.kv_heads}"] * (self.kv_heads != self.heads))

    @property
    def flops(self) -> float:
        pairs = self.length * (self.length + 1) / 2 if self.causal else self.length**2
        return 4.0 * self.batch * self.heads * pairs * self.width * (3 if self.backward else 1)

    @property
    def bytes(self) -> float:
        queries, keys = (self.batch * self.length * n * self.width * BYTES[self.dtype] for n in (self.heads, self.kv_heads))
        return 2 * queries + 2 * keys + (2 * queries + 2 * keys if self.backward else 0)

    @property
    def unit(self) -> tuple[str, float]:
        return "tokens", self.batch * self.length


CACHES = {"jax": ("cold", "warm"), "torch": ("eager", "compile")}
FILES = {"jax": ("orbax",), "torch": ("torch.save", "safetensors")}
COMPILED = {"jax": ("jit",), "torch": ("eager", "compile")}


@dataclasses.dataclass(frozen=True)
class Piece(Case):
    """One layer that is no product, forward and backward, over (rows, width)."""

    kind = "piece"
    variants = COMPILED
    layer: str = "layer_norm"
    """layer_norm, gelu, dropout or cross_entropy."""
    rows: int = 4096
    width: int = 1536

    @property
    def name(self) -> str:
        return f"{self.layer.replace('_', '-')}-{self.rows}x{self.width}"

    @property
    def bytes(self) -> float:
        # x and the result's gradient in, the result and x's gradient out; a loss has no result of that size.
        return (2.0 if self.layer == "cross_entropy" else 4.0) * self.rows * self.width * BYTES[self.dtype]


@dataclasses.dataclass(frozen=True)
class ModelCase(Case):
    """A case of a model: a size's, of weights drawn at random, or a trained one."""

    size: str = "S"
    trained: str = ""
    """A folder with model.json, weights.safetensors and tokens.npy, as `benchmarks.trained` leaves them; `size` is then a name and no more."""

    @property
    def model(self) -> Size:
        if not self.trained:
            return SIZES[self.size]
        values = json.loads((Path(self.trained) / "model.json").read_text(encoding="utf-8"))
        return Size(GPTConfig.from_dict(values["config"]), values["batch"], values["length"])

    @property
    def unit(self) -> tuple[str, float]:
        return "tokens", self.model.batch * self.model.length


@dataclasses.dataclass(frozen=True)
class Forward(ModelCase):
    """Logits of a whole batch, nothing dropped."""

    kind = "forward"
    variants = COMPILED

    @property
    def name(self) -> str:
        return f"forward-{self.size}"

    @property
    def flops(self) -> float:
        return forward_flops(self.model.config, self.model.batch, self.model.length)


@dataclasses.dataclass(frozen=True)
class Train(ModelCase):
    """A training step: forward, backward, clip, AdamW; on several devices each takes its rows of the batch."""

    kind = "train"
    dropout: float = 0.1
    devices: int = 1  # type: ignore[misc]

    @property
    def variants(self) -> Mapping[str, tuple[str, ...]]:  # type: ignore[override]
        return COMPILED if self.devices == 1 else {"jax": ("jit",), "torch": ("eager",)}

    @property
    def name(self) -> str:
        return f"train-{self.size}-dropout{self.dropout:g}" + f"-devices{self.devices}" * (self.devices > 1)

    @property
    def config(self) -> GPTConfig:
        return dataclasses.replace(self.model.config, dropout=self.dropout)

    @property
    def flops(self) -> float:
        return 3 * forward_flops(self.model.config, self.model.batch, self.model.length)


@dataclasses.dataclass(frozen=True)
class Generate(ModelCase):
    """Greedy tokens after a prompt, over a static key/value cache; one new token times the prompt's own pass."""

    kind = "generate"
    variants = COMPILED
    batch: int = 1
    prompt: int = 16
    new: int = 112
    max_len: int = 128
    """Of the model; the caches hold as many positions."""
    recompute: bool = False
    """torch computes the whole window anew for each token, as the original does; JAX keeps its cache."""

    @property
    def name(self) -> str:
        if self.new == 1:
            return f"prefill-{self.size}-batch{self.batch}-T{self.prompt}"
        return f"decode-{self.size}-batch{self.batch}-from{self.prompt}" + "-against-recomputing" * self.recompute

    @property
    def config(self) -> GPTConfig:
        return dataclasses.replace(self.model.config, max_len=self.max_len, dropout=0.0)

    @property
    def unit(self) -> tuple[str, float]:
        return "tokens", self.batch * (self.prompt if self.new == 1 else self.new)


@dataclasses.dataclass(frozen=True)
class Beam(ModelCase):
    """Beam search of a GPT, no token of which ends a hypothesis."""

    kind = "beam"
    batch: int = 4
    prompt: int = 16
    new: int = 48
    beams: int = 4
    max_len: int = 64

    @property
    def name(self) -> str:
        return f"beam-{self.size}-batch{self.batch}-beams{self.beams}"

    @property
    def config(self) -> GPTConfig:
        return dataclasses.replace(self.model.config, max_len=self.max_len, dropout=0.0)

    @property
    def unit(self) -> tuple[str, float]:
        return "tokens", self.batch * self.new


@dataclasses.dataclass(frozen=True)
class Start(Case):
    """From the start of an interpreter to the end of the first training step; JAX with an empty and with a filled compilation cache."""

    kind = "start"
    variants = CACHES
    size: str = "S"

    @property
    def name(self) -> str:
        return f"start-to-first-step-{self.size}"


@dataclasses.dataclass(frozen=True)
class Checkpoint(Case):
    """A training state to the disk, flushed and renamed, or back; JAX's also writes and verifies the SHA-256 of every file."""

    kind = "checkpoint"
    variants = FILES
    size: str = "M"
    load: bool = False

    @property
    def name(self) -> str:
        return f"checkpoint-{'load' if self.load else 'save'}-{self.size}"

    @property
    def bytes(self) -> float:
        return 3.0 * 4 * parameters(SIZES[self.size].config)

    @property
    def unit(self) -> tuple[str, float]:
        return "bytes", self.bytes


@dataclasses.dataclass(frozen=True)
class Data(Case):
    """A batch of windows in an order that visits each once an epoch."""

    kind = "data"
    size: str = "M"
    tokens: int = 1 << 17

    @property
    def name(self) -> str:
        return f"data-{self.size}"

    @property
    def unit(self) -> tuple[str, float]:
        return "tokens", SIZES[self.size].batch * SIZES[self.size].length


KINDS: dict[str, type[Case]] = {kind.kind: kind for kind in (Matmul, Copy, Attention, Piece, Forward, Train, Generate, Beam, Start, Checkpoint, Data)}


def read(values: Mapping[str, Any]) -> Case:
    """The case of `to_dict`."""
    return KINDS[values["kind"]](**{name: value for name, value in values.items() if name != "kind"})


LEVELS = ("quick", "standard", "full")


def grid(level: str) -> list[Case]:
    """The cases of a level, in the order in which they are run."""
    return {"quick": _quick, "standard": _standard, "full": _full}[level]()


def _quick() -> list[Case]:
    return [Matmul(), Attention(length=512, backward=True), Train(size="S")]


def _standard() -> list[Case]:
    attention = [
        Attention(length=length, dtype=dtype, backward=backward)
        for dtype in ("float32", "bfloat16")
        for backward in (False, True)
        for length in (128, 512, 1024, 2048)
    ]
    return [
        Matmul(),
        Matmul(dtype="bfloat16", size=1024),
        Copy(),
        *attention,
        Attention(length=1024, backward=True, width=128),
        Attention(length=1024, backward=True, causal=False),
        Attention(length=1024, backward=True, kv_heads=2),
        Piece(layer="layer_norm", width=384),
        Piece(layer="gelu"),
        Piece(layer="dropout"),
        Piece(layer="cross_entropy", width=1000),
        *(Forward(size=size) for size in ("S", "M")),
        *(Train(size=size, dropout=dropout) for size in ("S", "M", "L") for dropout in (0.1, 0.0)),
        *(Generate(batch=batch) for batch in (1, 8, 32)),
        Generate(recompute=True),
        *(Generate(size="M", prompt=prompt, new=96, max_len=512) for prompt in (16, 400)),
        Generate(batch=8, prompt=112, new=1),
        Generate(size="M", batch=8, prompt=400, new=1, max_len=512),
        Beam(),
        Start(),
        Checkpoint(),
        Checkpoint(load=True),
        Data(),
    ]


def _full() -> list[Case]:
    attention = [
        Attention(length=length, dtype=dtype, backward=backward, width=width, causal=causal, kv_heads=kv_heads)
        for length in (128, 512, 1024, 2048, 4096, 8192)
        for width in (64, 128)
        for dtype in ("float32", "bfloat16")
        for causal in (True, False)
        for kv_heads in (8, 2)
        for backward in (False, True)
    ]
    generation = [
        *(Generate(size=size, batch=batch, new=96, max_len=512) for size in ("M", "L") for batch in (1, 8, 32)),
        *(Generate(size="124M", batch=batch, prompt=512, new=64, max_len=1024) for batch in (1, 8)),
        Generate(size="124M", batch=1, prompt=1000, new=1, max_len=1024),
        Beam(size="M"),
    ]
    large = [Forward(size="124M"), *(Train(size="124M", dropout=dropout) for dropout in (0.1, 0.0))]
    shared = [Train(size="M", dropout=0.0, devices=devices) for devices in (2, 4) if devices == 2 or devices <= (os.cpu_count() or 1)]
    return list(dict.fromkeys([*_standard(), *attention, *generation, *large, *shared]))


def select(level: str, pattern: str | None) -> list[Case]:
    """The cases of a level whose names match one of the patterns, which commas separate; a pattern makes quick choose from the standard cases.

    Raises InputError when a pattern matches none.
    """
    cases = grid("standard" if pattern and level == "quick" else level)
    patterns = (pattern or "*").split(",")
    for one in patterns:
        require(any(fnmatch.fnmatchcase(case.name, one) for case in cases), "cases", one, f"must match one of {', '.join(c.name for c in cases)}")
    return [case for case in cases if any(fnmatch.fnmatchcase(case.name, one) for one in patterns)]
