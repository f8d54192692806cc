"""Every default of the project, as frozen dataclasses. Standard library only, so that both frameworks read the same facts."""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any, Literal, Self

from flax_gpt.errors import InputError, require

FLOAT_DTYPES = ("float32", "float64", "bfloat16", "float16")

Init = Literal["scaled", "torch"]


def _check_attention(config: Any) -> None:
    for name in ("vocab_size", "d_model", "num_heads", "num_layers", "max_len"):
        require(getattr(config, name) >= 1, name, getattr(config, name), "must be at least 1")
    require(config.d_model % config.num_heads == 0, "d_model", config.d_model, f"must be divisible by num_heads = {config.num_heads}")
    require(config.d_model % 2 == 0, "d_model", config.d_model, "must be even: sinusoidal positions fill pairs of columns")
    require(config.d_ff is None or config.d_ff >= 1, "d_ff", config.d_ff, "must be at least 1")
    require(config.norm_eps > 0, "norm_eps", config.norm_eps, "must be positive")
    require(config.init in ("scaled", "torch"), "init", config.init, "must be 'scaled' or 'torch'")
    for name in ("dtype", "param_dtype"):
        require(getattr(config, name) in FLOAT_DTYPES, name, getattr(config, name), f"must be one of {', '.join(FLOAT_DTYPES)}")


def _rate(name: str, value: float) -> None:
    require(0.0 <= value < 1.0, name, value, "must lie in [0, 1)")


class _Config:
    """Shared by the configurations: JSON in and out, refusing names that it does not know."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)  # type: ignore[call-overload]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Raises InputError for a name that the configuration does not have."""
        known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        for name in values:
            require(name in known, name, values[name], f"is not a field of {cls.__name__}: {', '.join(known)}")
        return cls(**values)

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls.from_dict(json.loads(text))


@dataclasses.dataclass(frozen=True)
class GPTConfig(_Config):
    """A decoder-only Transformer with tied embeddings (Vaswani et al. 2017, section 3; pre-LN: Xiong et al. 2020)."""

    vocab_size: int
    """Number of token ids, V."""
    d_model: int = 128
    """Width of the residual stream, D."""
    num_heads: int = 4
    """Query heads, H; the width of a head is d_model / num_heads."""
    num_kv_heads: int | None = None
    """Key/value heads, K; None means num_heads. Query head h reads key/value head h // (H / K)."""
    num_layers: int = 4
    """Blocks, N."""
    d_ff: int | None = None
    """Hidden width of the feed-forward, F; None means 4 * d_model."""
    max_len: int = 128
    """Longest sequence, in tokens."""
    dropout: float = 0.1
    """Rate of embedding, residual and feed-forward dropout."""
    attention_dropout: float = 0.0
    """Rate of dropout on the attention weights."""
    double_attention_dropout: bool = False
    """Drop the attention's output a second time, inside the attention module, as the original MiniGPT does."""
    norm_eps: float = 1e-5
    """Added to the variance in every LayerNorm."""
    init: Init = "scaled"
    """'scaled': std 0.02, residual projections 0.02 / sqrt(2N); 'torch': the distributions of torch's own layers."""
    dtype: str = "float32"
    """Compute dtype; softmax, norm statistics and losses stay in float32 or better."""
    param_dtype: str = "float32"
    """Dtype in which parameters are stored."""

    def __post_init__(self) -> None:
        _check_attention(self)
        _rate("dropout", self.dropout)
        _rate("attention_dropout", self.attention_dropout)
        kv = self.kv_heads
        require(kv >= 1 and self.num_heads % kv == 0, "num_kv_heads", kv, f"must divide num_heads = {self.num_heads}")

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def ff_width(self) -> int:
        return 4 * self.d_model if self.d_ff is None else self.d_ff

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads

    @property
    def residual_std(self) -> float:
        """Initial std of the projections that write to the residual stream (Radford et al. 2019, section 2.3)."""
        return INIT_STD / math.sqrt(2 * self.num_layers)

    @classmethod
    def preset(cls, name: str, *, vocab_size: int, **overrides: Any) -> Self:
        """A named size; `overrides` replace single fields. Raises InputError for an unknown name."""
        require(name in GPT_PRESETS, "preset", name, f"must be one of {', '.join(GPT_PRESETS)}")
        return cls.from_dict({"vocab_size": vocab_size} | GPT_PRESETS[name] | overrides)


INIT_STD = 0.02
"""Std of the scaled initialisation (Radford et al. 2019)."""

GPT_PRESETS: dict[str, dict[str, Any]] = {
    "minigpt": {},
    "original": dict(d_model=64, num_heads=4, num_layers=3, d_ff=256, double_attention_dropout=True, init="torch"),
    "demo": dict(d_model=128, num_heads=4, num_layers=3, d_ff=512, max_len=64),
}


@dataclasses.dataclass(frozen=True)
class EncoderConfig(_Config):
    """A post-LN encoder with a mean-pooled classification head (Vaswani et al. 2017, section 3.1)."""

    vocab_size: int = 2
    """Number of token ids, V."""
    d_model: int = 32
    """Width of the residual stream, D."""
    num_heads: int = 4
    """Attention heads, H."""
    num_layers: int = 2
    """Blocks, N."""
    d_ff: int | None = None
    """Hidden width of the feed-forward, F; None means 2 * d_model."""
    max_len: int = 16
    """Longest sequence, in tokens."""
    num_classes: int = 2
    """Width of the head."""
    norm_eps: float = 1e-5
    """Added to the variance in every LayerNorm."""
    init: Init = "scaled"
    """As in GPTConfig."""
    dtype: str = "float32"
    """As in GPTConfig."""
    param_dtype: str = "float32"
    """As in GPTConfig."""

    def __post_init__(self) -> None:
        _check_attention(self)
        require(self.num_classes >= 1, "num_classes", self.num_classes, "must be at least 1")

    @property
    def kv_heads(self) -> int:
        return self.num_heads

    @property
    def ff_width(self) -> int:
        return 2 * self.d_model if self.d_ff is None else self.d_ff

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads

    @property
    def residual_std(self) -> float:
        return INIT_STD / math.sqrt(2 * self.num_layers)


Schedule = Literal["constant", "warmup_cosine"]
Optimizer = Literal["adamw", "adam"]
Decay = Literal["matrices", "all"]


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(_Config):
    """AdamW (Loshchilov & Hutter 2019) behind torch's global-norm clip, with a schedule counted in optimizer steps."""

    optimizer: Optimizer = "adamw"
    """'adam' takes no weight decay."""
    lr: float = 1e-3
    """Peak learning rate."""
    schedule: Schedule = "warmup_cosine"
    """'constant' ignores warmup_steps and min_lr_ratio."""
    warmup_steps: int = 100
    """Steps of linear warm-up; step 1 already moves."""
    min_lr_ratio: float = 0.1
    """Learning rate at the last step, as a share of the peak."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.999
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.01
    """Decoupled decay, times the learning rate."""
    decay: Decay = "matrices"
    """'matrices' leaves biases and norms alone; 'all' decays every parameter, as the original does."""
    clip: float | None = 1.0
    """Largest global gradient norm; None does not clip. torch's formula: max_norm / (norm + 1e-6), at most 1."""

    def __post_init__(self) -> None:
        require(self.optimizer in ("adamw", "adam"), "optimizer", self.optimizer, "must be 'adamw' or 'adam'")
        require(self.schedule in ("constant", "warmup_cosine"), "schedule", self.schedule, "must be 'constant' or 'warmup_cosine'")
        require(self.decay in ("matrices", "all"), "decay", self.decay, "must be 'matrices' or 'all'")
        require(self.lr > 0 and math.isfinite(self.lr), "lr", self.lr, "must be positive and finite")
        require(self.warmup_steps >= 0, "warmup_steps", self.warmup_steps, "must be at least 0")
        require(0 <= self.min_lr_ratio <= 1, "min_lr_ratio", self.min_lr_ratio, "must lie in [0, 1]")
        for name in ("beta1", "beta2"):
            _rate(name, getattr(self, name))
        require(self.eps > 0, "eps", self.eps, "must be positive")
        require(self.weight_decay >= 0, "weight_decay", self.weight_decay, "must be at least 0")
        require(self.clip is None or self.clip > 0, "clip", self.clip, "must be positive, or None")


@dataclasses.dataclass(frozen=True)
class TrainConfig(_Config):
    """How a language model is trained: what is drawn, for how long, and what is kept."""

    seed: int = 0
    """Of the initial weights, of the order of the windows and of dropout."""
    window: int | None = None
    """Tokens a training window; None means the model's max_len."""
    batch_size: int = 32
    """Windows a step."""
    steps: int | None = None
    """Optimizer steps; give this or epochs. Neither: 1000 steps."""
    epochs: int | None = None
    """Passes over all windows of the training part."""
    stride: int | None = None
    """Tokens between the starts of windows; None means 1, so that every window trains."""
    held_out: float = 0.1
    """Share of the tokens, at the end of the text, that is evaluated and never trained on; 0 holds nothing out."""
    log_interval: int = 10
    """Steps between lines in metrics.jsonl; the only times when the host waits for the device."""
    eval_interval: int = 200
    """Steps between evaluations of the held-out part."""
    checkpoint_interval: int = 200
    """Steps between checkpoints; the last step is always kept."""
    keep_last: int = 2
    """Newest checkpoints kept, beside the one with the lowest held-out loss."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer, schedule and clip."""

    def __post_init__(self) -> None:
        require(0 <= self.seed < 2**63, "seed", self.seed, "must lie in [0, 2**63)")
        for name in ("window", "steps", "epochs", "stride"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, value, "must be at least 1")
        require(self.steps is None or self.epochs is None, "epochs", self.epochs, f"cannot be given beside steps = {self.steps}")
        for name in ("batch_size", "log_interval", "eval_interval", "checkpoint_interval", "keep_last"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "must be at least 1")
        require(0 <= self.held_out < 1, "held_out", self.held_out, "must lie in [0, 1)")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        optimizer = values.get("optimizer", OptimizerConfig())
        if isinstance(optimizer, Mapping):
            optimizer = OptimizerConfig.from_dict(optimizer)
        return super().from_dict(dict(values) | {"optimizer": optimizer})

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> Self:
        """The training half of a preset of GPTConfig. Raises InputError for an unknown name."""
        require(name in TRAIN_PRESETS, "preset", name, f"must be one of {', '.join(TRAIN_PRESETS)}")
        return cls.from_dict(TRAIN_PRESETS[name] | overrides)


TRAIN_PRESETS: dict[str, dict[str, Any]] = {
    "minigpt": {},
    "original": dict(
        window=30,
        batch_size=16,
        epochs=80,
        held_out=0.0,
        optimizer=dict(lr=3e-3, schedule="constant", weight_decay=0.01, decay="all", clip=1.0),
    ),
    "demo": dict(batch_size=32, steps=400, eval_interval=100, checkpoint_interval=200, optimizer=dict(lr=3e-3, warmup_steps=40)),
}


@dataclasses.dataclass(frozen=True)
class SampleConfig(_Config):
    """How a token is drawn from logits. Filters apply in this order: temperature, top_k, top_p."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the largest (the lowest id among equals)."""
    top_k: int | None = None
    """Keep the k largest logits; None or 0 keeps all."""
    top_p: float | None = None
    """Keep the smallest set of tokens whose probability reaches p (Holtzman et al. 2020); None keeps all."""

    def __post_init__(self) -> None:
        require(self.temperature >= 0 and math.isfinite(self.temperature), "temperature", self.temperature, "must be finite and at least 0")
        require(self.top_k is None or self.top_k >= 0, "top_k", self.top_k, "must be at least 0")
        require(self.top_p is None or 0 < self.top_p <= 1, "top_p", self.top_p, "must lie in (0, 1]")


__all__ = ["EncoderConfig", "GPTConfig", "InputError", "OptimizerConfig", "SampleConfig", "TrainConfig"]
