"""The numbers of an experiment, and their file."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from flax_gpt.errors import require


@dataclasses.dataclass(frozen=True)
class Result:
    """Base of the experiments' results: plain numbers, texts, and lists and mappings of them."""

    seed: int
    """Of every draw; the same seed gives the same numbers."""

    def __post_init__(self) -> None:
        check_seed(self.seed)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes JSON, a field a line, under a temporary name and renames it. Raises ValueError for a number that JSON does not have."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        fields = [f"  {json.dumps(name)}: {json.dumps(value, allow_nan=False, ensure_ascii=False)}" for name, value in self.to_dict().items()]
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            temporary.write_text("{\n" + ",\n".join(fields) + "\n}\n", encoding="utf-8")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        return path


def check_seed(seed: int) -> None:
    """Raises InputError for a seed that numpy's or NNX's generators refuse."""
    require(isinstance(seed, int) and 0 <= seed < 2**32, "seed", seed, "must be a whole number in [0, 2**32)")
