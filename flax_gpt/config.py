"""Every default of the project, as frozen dataclasses. Standard library only, so that both frameworks read the same facts."""

import dataclasses
import json
import math
import numbers
import types
from collections.abc import Mapping
from typing import Any, Literal, Self, Union, get_args, get_origin, get_type_hints

from flax_gpt.errors import InputError, require

FloatDtype = Literal["float32", "float64", "bfloat16", "float16"]

Init = Literal["scaled", "torch"]
Positions = Literal["sinusoidal", "learned", "rope_half", "rope_interleaved", "none"]
Norm = Literal["layer_norm", "rms_norm"]
Placement = Literal["pre", "post"]
Activation = Literal["gelu_exact", "gelu_tanh", "relu", "silu"]
Scaling = Literal["none", "linear", "dynamic_linear", "ntk", "dynamic_ntk", "yarn", "llama3"]

INIT_STD = 0.02
"""Std of the scaled initialisation (Radford et al. 2019)."""


def _one_of(name: str, value: object, choices: Any) -> None:
    allowed = choices if isinstance(choices, tuple) else get_args(choices)
    require(value in allowed, name, value, f"must be one of {', '.join(allowed)}")


def _at_least_one(config: object, *names: str) -> None:
    for name in names:
        require(getattr(config, name) >= 1, name, getattr(config, name), "must be at least 1")


def _rate(name: str, value: float) -> None:
    require(0.0 <= value < 1.0, name, value, "must lie in [0, 1)")


def _fits(value: Any, kind: Any) -> bool:
    if kind in (int, float):
        number = isinstance(value, numbers.Integral if kind is int else numbers.Real) and not isinstance(value, bool)
        return number and abs(value) < (2**63 if kind is int else math.inf)
    return value in get_args(kind) if get_origin(kind) is Literal else isinstance(value, kind)


def _kind_name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    return {int: "an integer", float: "a finite number", bool: "True or False", str: "a string", type(None): "None"}.get(
        kind, getattr(kind, "__name__", str(kind))
    )


class _Config:
    """Shared by the configurations: fields of their declared types, JSON in and out, refusing names that it does not know."""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            value, kinds = getattr(self, name), get_args(hint) if isinstance(hint, types.UnionType) or get_origin(hint) is Union else (hint,)
            require(any(_fits(value, kind) for kind in kinds), name, value, f"must be {' or '.join(map(_kind_name, kinds))}")
            if isinstance(value, int) and name != "seed":
                require(value < 2**31, name, value, "must be below 2**31")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)  # type: ignore[call-overload]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Raises InputError for a name that the configuration does not have. Nested configurations may be mappings."""
        defaults: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        for name in values:
            require(name in defaults, name, values[name], f"is not a field of {cls.__name__}: {', '.join(defaults)}")
        nested = {
            name: defaults[name].from_dict(value) if isinstance(value, Mapping) and isinstance(defaults[name], _Config) else value
            for name, value in values.items()
        }
        return cls(**nested)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises InputError for what is no JSON object, too."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise InputError("text", text[:40], f"is no JSON: {error}") from error
        require(isinstance(values, dict), "text", text[:40], "must be a JSON object")
        return cls.from_dict(values)


@dataclasses.dataclass(frozen=True)
class RopeConfig(_Config):
    """Rotary positions (Su et al. 2021) and the ways to stretch them beyond the trained length."""

    base: float = 10000.0
    """θ of the slowest pair is base^(-(Dh - 2) / Dh)."""
    scaling: Scaling = "none"
    """'linear': positions / factor (Chen et al. 2023); 'dynamic_linear': positions × min(1, trained_len / length);
    'ntk': base × factor^(Dh / (Dh - 2)); 'dynamic_ntk': the same with the length's own factor beyond trained_len;
    'yarn': Peng et al. 2023; 'llama3': as Llama 3.1 was published."""
    factor: float = 1.0
    """How many times the trained length; above 0."""
    trained_len: int | None = None
    """Longest sequence in training; None means max_len / factor, or max_len where the length itself sets the factor."""
    beta_fast: float = 32.0
    """yarn: pairs that turn more often than this within trained_len are left alone."""
    beta_slow: float = 1.0
    """yarn: pairs that turn less often than this are interpolated in full."""
    attention_factor: float | None = None
    """yarn: multiplies the rotated queries and keys; None means 0.1 ln(factor) + 1."""
    low_freq_factor: float = 1.0
    """llama3: pairs with wavelengths above trained_len / low_freq_factor are interpolated in full."""
    high_freq_factor: float = 4.0
    """llama3: pairs with wavelengths below trained_len / high_freq_factor are left alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(1 < self.base <= 1e15, "base", self.base, "must lie in (1, 1e15]")
        require(self.factor > 0, "factor", self.factor, "must be above 0")
        # Beyond these, powers and quotients of them leave the range of float64.
        for name in ("factor", "beta_fast", "beta_slow", "attention_factor", "low_freq_factor", "high_freq_factor"):
            value = getattr(self, name)
            require(value is None or value <= 0 or 1e-9 <= value <= 1e9, name, value, "must lie in [1e-9, 1e9]")
        require(self.trained_len is None or self.trained_len >= 1, "trained_len", self.trained_len, "must be at least 1")
        require(self.beta_fast > self.beta_slow > 0, "beta_fast", self.beta_fast, f"must be above beta_slow = {self.beta_slow}, both above 0")
        require(self.attention_factor is None or self.attention_factor > 0, "attention_factor", self.attention_factor, "must be above 0")
        above = self.high_freq_factor > self.low_freq_factor > 0
        require(above, "high_freq_factor", self.high_freq_factor, f"must be above low_freq_factor = {self.low_freq_factor}, both above 0")


@dataclasses.dataclass(frozen=True)
class TransformerConfig(_Config):
    """What every model here is made of (Vaswani et al. 2017)."""

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
    """Added to the variance in every norm."""
    init: Init = "scaled"
    """'scaled': std 0.02, residual projections 0.02 / sqrt(2N); 'torch': the distributions of torch's own layers."""
    dtype: FloatDtype = "float32"
    """Compute dtype; softmax, norm statistics and losses stay in float32 or better."""
    param_dtype: FloatDtype = "float32"
    """Dtype in which parameters are stored."""
    positions: Positions = "sinusoidal"
    """'sinusoidal' and 'learned' are added to the embedding; 'rope_half' and 'rope_interleaved' rotate queries and keys."""
    rope: RopeConfig = RopeConfig()
    """Used by the rope positions alone."""
    norm: Norm = "layer_norm"
    """'rms_norm' has no mean and no bias (Zhang & Sennrich 2019)."""
    norm_placement: Placement = "pre"
    """'pre': x + f(norm(x)), with a final norm; 'post': norm(x + f(x))."""
    activation: Activation = "gelu_exact"
    """Of the feed-forward; 'gelu_exact' uses erf, 'gelu_tanh' its approximation."""
    gated: bool = False
    """Feed-forward W2 (act(W1 x) · W3 x) (Shazeer 2020); with 'silu' it is SwiGLU."""
    attention_bias: bool = False
    """Biases in the attention's four projections."""
    feed_forward_bias: bool = True
    """Biases in the feed-forward."""
    scale_embeddings: bool = True
    """Multiply the token embedding by √D."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least_one(self, "vocab_size", "d_model", "num_heads", "num_layers", "max_len", "ff_width")
        require(self.d_model % self.num_heads == 0, "d_model", self.d_model, f"must be divisible by num_heads = {self.num_heads}")
        kv = self.kv_heads
        require(kv >= 1 and self.num_heads % kv == 0, "num_kv_heads", kv, f"must divide num_heads = {self.num_heads}")
        for name in ("dropout", "attention_dropout"):
            _rate(name, getattr(self, name))
        require(self.norm_eps >= 1e-30, "norm_eps", self.norm_eps, "must be at least 1e-30, which float32 still holds")
        for name in ("dtype", "param_dtype"):
            _one_of(name, getattr(self, name), get_args(FloatDtype))
        if self.positions == "sinusoidal":
            require(self.d_model % 2 == 0, "d_model", self.d_model, "must be even: sinusoidal positions fill pairs of columns")
        if self.positions.startswith("rope"):
            require(self.head_dim % 2 == 0, "d_model", self.d_model, f"must give an even d_model / num_heads, not {self.head_dim}: RoPE turns pairs")
            wide = self.head_dim > 2 or self.rope.scaling not in ("ntk", "dynamic_ntk")
            require(wide, "d_model", self.d_model, f"must give a d_model / num_heads above 2: {self.rope.scaling} needs a second pair")

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


@dataclasses.dataclass(frozen=True)
class GPTConfig(TransformerConfig):
    """A decoder-only Transformer with tied embeddings (pre-LN: Xiong et al. 2020)."""

    @classmethod
    def preset(cls, name: str, *, vocab_size: int, **overrides: Any) -> Self:
        """A named size; `overrides` replace single fields. Raises InputError for an unknown name."""
        _one_of("preset", name, tuple(GPT_PRESETS))
        return cls.from_dict({"vocab_size": vocab_size} | GPT_PRESETS[name] | overrides)


GPT_PRESETS: dict[str, dict[str, Any]] = {
    "minigpt": {},
    "original": dict(d_model=64, num_heads=4, num_layers=3, d_ff=256, double_attention_dropout=True, init="torch"),
    "demo": dict(d_model=128, num_heads=4, num_layers=2, d_ff=512, max_len=48, dropout=0.05),
    "llama": dict(
        positions="rope_half", norm="rms_norm", activation="silu", gated=True, feed_forward_bias=False, scale_embeddings=False, norm_eps=1e-6
    ),
}


@dataclasses.dataclass(frozen=True)
class EncoderConfig(TransformerConfig):
    """An encoder with a mean-pooled classification head; the defaults are the original TinyTransformer's (post-LN, ReLU, no dropout)."""

    vocab_size: int = 2
    d_model: int = 32
    num_layers: int = 2
    max_len: int = 16
    d_ff: int | None = None
    """Hidden width of the feed-forward, F; None means 2 * d_model."""
    dropout: float = 0.0
    norm_placement: Placement = "post"
    activation: Activation = "relu"
    attention_bias: bool = True
    scale_embeddings: bool = False
    num_classes: int = 2
    """Width of the head."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least_one(self, "num_classes")

    @property
    def ff_width(self) -> int:
        return 2 * self.d_model if self.d_ff is None else self.d_ff


@dataclasses.dataclass(frozen=True)
class EncoderDecoderConfig(TransformerConfig):
    """An encoder and a decoder of num_layers blocks each (Vaswani et al. 2017, figure 1), here with pre-LN by default."""

    source_vocab_size: int | None = None
    """Number of source ids; None means vocab_size, which counts the target's."""
    bos: int = 1
    """Id that begins a target."""
    eos: int = 2
    """Id that ends a target."""
    pad: int = 0
    """Id that fills a batch; what counts is excluded by length, never by this id."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.source_vocab >= 1, "source_vocab_size", self.source_vocab_size, "must be at least 1")
        for name in ("bos", "eos", "pad"):
            require(0 <= getattr(self, name) < self.vocab_size, name, getattr(self, name), f"must lie in [0, vocab_size = {self.vocab_size})")
        require(self.bos != self.eos, "eos", self.eos, "must differ from bos")

    @property
    def source_vocab(self) -> int:
        return self.vocab_size if self.source_vocab_size is None else self.source_vocab_size


ENCODER_PRESETS: dict[str, dict[str, Any]] = {"majority": dict(init="torch")}
ENCODER_DECODER_PRESETS: dict[str, dict[str, Any]] = {"dates": dict(d_model=64, num_layers=2, max_len=32, dropout=0.0)}
PRESETS = {"gpt": GPT_PRESETS, "encoder-decoder": ENCODER_DECODER_PRESETS, "classifier": ENCODER_PRESETS}
"""By the kind of model; the first of each is its default."""


Schedule = Literal["constant", "warmup_cosine"]
Optimizer = Literal["adamw", "adam", "sgd"]
Decay = Literal["matrices", "all"]


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(_Config):
    """AdamW (Loshchilov & Hutter 2019), Adam or SGD behind torch's global-norm clip, with a schedule counted in optimizer steps."""

    optimizer: Optimizer = "adamw"
    """'adam' takes no weight decay; 'sgd' is torch's, with momentum."""
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
    momentum: float = 0.9
    """sgd: the velocity is this times the last one plus the gradient; 0 keeps none."""
    nesterov: bool = False
    """sgd: go along the gradient plus momentum times the new velocity (Sutskever et al. 2013)."""
    weight_decay: float = 0.01
    """'adamw': decoupled decay, times the learning rate; 'sgd': this times the weight is added to its gradient after the clip."""
    decay: Decay = "matrices"
    """'matrices' leaves biases and norms alone; 'all' decays every parameter, as the original does."""
    clip: float | None = 1.0
    """Largest global gradient norm; None does not clip. torch's formula: max_norm / (norm + 1e-6), at most 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.lr > 0, "lr", self.lr, "must be positive")
        require(self.warmup_steps >= 0, "warmup_steps", self.warmup_steps, "must be at least 0")
        require(0 <= self.min_lr_ratio <= 1, "min_lr_ratio", self.min_lr_ratio, "must lie in [0, 1]")
        for name in ("beta1", "beta2", "momentum"):
            _rate(name, getattr(self, name))
        require(not self.nesterov or self.momentum > 0, "nesterov", self.nesterov, "needs a momentum above 0")
        require(self.eps >= 1e-30, "eps", self.eps, "must be at least 1e-30, which float32 still holds")
        require(self.weight_decay >= 0, "weight_decay", self.weight_decay, "must be at least 0")
        require(self.clip is None or self.clip > 0, "clip", self.clip, "must be positive, or None")


@dataclasses.dataclass(frozen=True)
class TrainConfig(_Config):
    """How a model is trained: what is drawn, for how long, and what is kept."""

    seed: int = 0
    """Of the initial weights, of the order of the windows and of dropout."""
    window: int | None = None
    """Tokens a training window; None means the model's max_len."""
    batch_size: int = 32
    """Windows a step, or rows of a table."""
    accumulate: int = 1
    """Equal parts that a step's batch is cut into, one after the other, their gradients added up: the same update with the memory of one part."""
    steps: int | None = None
    """Optimizer steps; give this or epochs. Neither: 1000 steps."""
    epochs: int | None = None
    """Passes over all windows of the training part."""
    stride: int | None = None
    """Tokens between the starts of windows; None means 1, so that every window trains."""
    held_out: float = 0.1
    """Share that is evaluated and never trained on: the end of a text, or rows of a table that share no text with the others; 0 holds nothing out."""
    log_interval: int = 10
    """Steps between lines in metrics.jsonl; the only times when the host waits for an accelerator."""
    eval_interval: int = 200
    """Steps between evaluations of the held-out part."""
    checkpoint_interval: int = 200
    """Steps between checkpoints; the last step is always kept."""
    keep_last: int = 2
    """Newest checkpoints kept, beside the one with the lowest held-out loss."""
    label_smoothing: float = 0.0
    """Share ε of a target's probability that is spread over all ids in the training loss (Szegedy et al. 2016)."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer, schedule and clip."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.seed < 2**63, "seed", self.seed, "must lie in [0, 2**63)")
        for name in ("window", "steps", "epochs", "stride"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, value, "must be at least 1")
        require(self.steps is None or self.epochs is None, "epochs", self.epochs, f"cannot be given beside steps = {self.steps}")
        _at_least_one(self, "batch_size", "accumulate", "log_interval", "eval_interval", "checkpoint_interval", "keep_last")
        require(self.batch_size % self.accumulate == 0, "accumulate", self.accumulate, f"must divide batch_size = {self.batch_size}")
        require(0 <= self.held_out < 1, "held_out", self.held_out, "must lie in [0, 1)")
        _rate("label_smoothing", self.label_smoothing)

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> Self:
        """The training half of a preset of GPTConfig. Raises InputError for an unknown name."""
        _one_of("preset", name, tuple(TRAIN_PRESETS))
        return cls.from_dict(TRAIN_PRESETS[name] | overrides)


TRAIN_PRESETS: dict[str, dict[str, Any]] = {
    "minigpt": {},
    "dates": dict(batch_size=48, steps=800, optimizer=dict(lr=4e-3)),
    "majority": dict(
        batch_size=64,
        epochs=12,
        held_out=0.2,
        log_interval=32,
        eval_interval=32,
        optimizer=dict(optimizer="adam", schedule="constant", clip=None),
    ),
    "llama": {},
    "original": dict(
        window=30,
        batch_size=16,
        epochs=80,
        held_out=0.0,
        optimizer=dict(lr=3e-3, schedule="constant", weight_decay=0.01, decay="all", clip=1.0),
    ),
    "demo": dict(batch_size=12, steps=2000, checkpoint_interval=500, optimizer=dict(lr=2e-3, warmup_steps=60, beta2=0.99)),
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
        super().__post_init__()
        # A smaller one overflows float32 when it divides a logit.
        require(self.temperature == 0 or self.temperature >= 1e-6, "temperature", self.temperature, "must be 0 (greedy) or at least 1e-6")
        require(self.top_k is None or self.top_k >= 0, "top_k", self.top_k, "must be at least 0")
        require(self.top_p is None or 0 < self.top_p <= 1, "top_p", self.top_p, "must lie in (0, 1]")


@dataclasses.dataclass(frozen=True)
class BeamConfig(_Config):
    """How a beam search is carried out (Graves 2012; Sutskever et al. 2014, section 3.2). A hypothesis scores log P / length ** length_exponent, its
    length counted in new tokens, the end included."""

    beams: int = 4
    """Unfinished hypotheses kept at each step; 1 is greedy search, which ends at the first end."""
    n_best: int = 1
    """Finished hypotheses returned, best first; at most beams."""
    length_exponent: float = 1.0
    """The length penalty as log P / length ** this: 0 is log P, which favours the short, 1 the mean over tokens, more favours the long."""
    early_stopping: bool | Literal["never"] = False
    """When `beams` hypotheses are finished: True stops; False stops unless an unfinished one, ended now, would beat the worst of them; 'never' stops
    when no unfinished one can beat it whatever follows."""
    no_repeat_ngram: int = 0
    """No sequence of this many tokens occurs twice in a hypothesis, prompt included; 0 bans nothing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least_one(self, "beams", "n_best")
        require(self.no_repeat_ngram >= 0, "no_repeat_ngram", self.no_repeat_ngram, "must be at least 0")
        require(self.n_best <= self.beams, "n_best", self.n_best, f"must be at most beams = {self.beams}")
        require(abs(self.length_exponent) <= 8, "length_exponent", self.length_exponent, "must lie in [-8, 8]")


__all__ = [
    "BeamConfig",
    "EncoderConfig",
    "EncoderDecoderConfig",
    "GPTConfig",
    "InputError",
    "OptimizerConfig",
    "RopeConfig",
    "SampleConfig",
    "TrainConfig",
    "TransformerConfig",
]
