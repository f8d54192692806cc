"""Groups of options that are configurations, and where their defaults come from."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Fixed, Suppress, arg

from flax_gpt.config import PRESETS, TRAIN_PRESETS, EncoderConfig, EncoderDecoderConfig, GPTConfig, RopeConfig, TrainConfig
from flax_gpt.errors import require

RopeOptions = dataclasses.make_dataclass(
    "RopeOptions",
    [(field.name, Annotated[field.type, arg(name=f"rope-{field.name}")], field.default) for field in dataclasses.fields(RopeConfig)],
    bases=(RopeConfig,),
    frozen=True,
)
"""RopeConfig, whose fields need its name before theirs: --rope-base."""


@dataclasses.dataclass(frozen=True)
class ModelOptions(GPTConfig):
    """Sizes, rates, initial weights and parts of the model."""

    vocab_size: Suppress[Fixed[int]] = 1
    """Known once the text has been read."""
    rope: RopeOptions = RopeOptions()  # type: ignore[valid-type]  # noqa: RUF009 (frozen)
    """Used by the rope positions alone."""

    def to_dict(self) -> dict[str, Any]:
        """The fields of GPTConfig but for vocab_size."""
        return {name: value for name, value in super().to_dict().items() if name != "vocab_size"}


@dataclasses.dataclass(frozen=True)
class TranslatorOptions(EncoderDecoderConfig):
    """Sizes, rates, initial weights and parts of the model."""

    vocab_size: Suppress[Fixed[int]] = 3
    source_vocab_size: Suppress[Fixed[int | None]] = None
    bos: Suppress[Fixed[int]] = EncoderDecoderConfig.bos
    eos: Suppress[Fixed[int]] = EncoderDecoderConfig.eos
    pad: Suppress[Fixed[int]] = EncoderDecoderConfig.pad
    rope: RopeOptions = RopeOptions()  # type: ignore[valid-type]  # noqa: RUF009 (frozen)
    """Used by the rope positions alone."""

    def to_dict(self) -> dict[str, Any]:
        """The fields of EncoderDecoderConfig but for those that the pairs set."""
        hidden = ("vocab_size", "source_vocab_size", "bos", "eos", "pad")
        return {name: value for name, value in super().to_dict().items() if name not in hidden}


@dataclasses.dataclass(frozen=True)
class ClassifierOptions(EncoderConfig):
    """Sizes, rates, initial weights and parts of the model."""

    vocab_size: Suppress[Fixed[int]] = 2
    num_classes: Suppress[Fixed[int]] = 2
    rope: RopeOptions = RopeOptions()  # type: ignore[valid-type]  # noqa: RUF009 (frozen)
    """Used by the rope positions alone."""

    def to_dict(self) -> dict[str, Any]:
        """The fields of EncoderConfig but for those that the texts set."""
        return {name: value for name, value in super().to_dict().items() if name not in ("vocab_size", "num_classes")}


OPTIONS: dict[str, Any] = {"gpt": ModelOptions, "encoder-decoder": TranslatorOptions, "classifier": ClassifierOptions}
"""By the kind of model."""


def train_defaults(arguments: Sequence[str]) -> dict[str, Any]:
    """The defaults of `train`'s options: those of the run that `arguments` resume, else those of their kind of model and preset.

    Raises InputError for an unknown kind or preset.
    """
    record = Path(_value(arguments, "--out") or "") / "run.json"
    if "--resume" in arguments and record.is_file():
        values = _read(record)
    else:
        kind = _value(arguments, "--model") or "gpt"
        require(kind in PRESETS, "model", kind, f"must be one of {', '.join(PRESETS)}")
        preset = _value(arguments, "--preset") or next(iter(PRESETS[kind]))
        require(preset in PRESETS[kind], "preset", preset, f"must be one of {', '.join(PRESETS[kind])}")
        values = {"model": PRESETS[kind][preset], "train": dict(TRAIN_PRESETS.get(preset, {})), "kind": kind, "preset": preset}
    if not values:
        return {}
    # The length is one option of two: the one that is given takes the place of the preset's.
    for given, other in (("--steps", "epochs"), ("--epochs", "steps")):
        if _value(arguments, given) is not None:
            values["train"][other] = None
    options = OPTIONS[values["kind"]]
    model = {name: value for name, value in values["model"].items() if name in options().to_dict()}
    named = {name: values[name] for name in ("kind", "preset") if name in values}
    return named | {"model": options.from_dict(model), "training": TrainConfig.from_dict(values["train"])}


def _read(record: Path) -> dict[str, Any]:
    """What a run says of itself; nothing when it cannot be read, which `train` then refuses with the reason."""
    try:
        values = json.loads(record.read_text(encoding="utf-8"))
        return {"kind": values["kind"] if values["kind"] in OPTIONS else "gpt"} | {name: dict(values[name]) for name in ("model", "train")}
    except (OSError, ValueError, LookupError, TypeError):
        return {}


def _value(arguments: Sequence[str], option: str) -> str | None:
    """What follows the last `option`, as `--option value` or `--option=value`."""
    found = None
    for place, argument in enumerate(arguments):
        if argument == option and place + 1 < len(arguments):
            found = arguments[place + 1]
        elif argument.startswith(f"{option}="):
            found = argument.partition("=")[2]
    return found
