"""Groups of options that are configurations, and where their defaults come from."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Fixed, Suppress, arg

from flax_gpt.config import GPT_PRESETS, TRAIN_PRESETS, GPTConfig, RopeConfig, TrainConfig
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


def train_defaults(arguments: Sequence[str]) -> dict[str, Any]:
    """The defaults of `train`'s options: those of the run that `arguments` resume, else those of their preset.

    Raises InputError for an unknown preset.
    """
    record = Path(_value(arguments, "--out") or "") / "run.json"
    if "--resume" in arguments and record.is_file():
        values = _read(record)
    else:
        preset = _value(arguments, "--preset") or "minigpt"
        require(preset in GPT_PRESETS, "preset", preset, f"must be one of {', '.join(GPT_PRESETS)}")
        values = {"model": GPT_PRESETS[preset], "train": dict(TRAIN_PRESETS.get(preset, {}))}
    if not values:
        return {}
    # The length is one option of two: the one that is given takes the place of the preset's.
    for given, other in (("--steps", "epochs"), ("--epochs", "steps")):
        if _value(arguments, given) is not None:
            values["train"][other] = None
    return {"model": ModelOptions.from_dict(values["model"] | {"vocab_size": 1}), "training": TrainConfig.from_dict(values["train"])}


def _read(record: Path) -> dict[str, Any]:
    """What a run says of itself; nothing when it cannot be read, which `train` then refuses with the reason."""
    try:
        return {name: dict(json.loads(record.read_text(encoding="utf-8"))[name]) for name in ("model", "train")}
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
