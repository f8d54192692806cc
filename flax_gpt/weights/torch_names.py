"""Names of weights: the attributes of both packages ↔ the original programs' state dicts. Standard library only."""

import dataclasses
from collections.abc import Iterable

from flax_gpt.errors import InputError


@dataclasses.dataclass(frozen=True)
class NameTable:
    """How one model's names are spelled in files. Each pair of parts is (ours, theirs); a part stands between dots."""

    parts: tuple[tuple[str, str], ...]
    aliases: tuple[tuple[str, str], ...] = ()
    """(alias, file name it shares its leaf with)."""
    buffers: tuple[str, ...] = ()
    """File names that may be absent: they can be computed."""

    def to_file(self, name: str) -> str:
        """'blocks.0.attention.query.weight' → 'blocks.0.self_attn.W_Q.weight'."""
        return _replace(name, self.parts)

    def from_file(self, name: str) -> str:
        """The inverse of to_file."""
        return _replace(name, tuple((theirs, ours) for ours, theirs in self.parts))


def _replace(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    name = f".{name}."
    for old, new in pairs:
        name = name.replace(f".{old}.", f".{new}.")
    return name[1:-1]


MINIGPT = NameTable(
    parts=(
        ("attention.query", "self_attn.W_Q"),
        ("attention.key", "self_attn.W_K"),
        ("attention.value", "self_attn.W_V"),
        ("attention.output", "self_attn.W_O"),
        ("feed_forward", "ffn"),
        ("positions.table", "pos_encoding.pe"),
        ("positions.embedding", "pos_encoding"),
    ),
    aliases=(("lm_head.weight", "token_embed.weight"),),
    buffers=("pos_encoding.pe", "causal_mask"),
)

TINY_TRANSFORMER = NameTable(
    parts=(
        ("blocks", "layers"),
        ("attention.query", "attn.W_q"),
        ("attention.key", "attn.W_k"),
        ("attention.value", "attn.W_v"),
        ("attention.output", "attn.W_o"),
        ("feed_forward.linear1", "ffn.0"),
        ("feed_forward.linear2", "ffn.2"),
        ("feed_forward.gate", "ffn.gate"),
        ("token_embed", "embed"),
        ("positions.table", "pos.pe"),
        ("positions.embedding", "pos"),
    ),
    buffers=("pos.pe",),
)

ENCODER_DECODER = NameTable(
    parts=(),
    aliases=(("lm_head.weight", "target_embed.weight"),),
    buffers=("source_positions.table", "target_positions.table"),
)

TABLES = {"MiniGPT": MINIGPT, "TinyTransformer": TINY_TRANSFORMER, "EncoderDecoder": ENCODER_DECODER}
"""By the name of the model's class, which both packages share."""


def check_names(found: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]], optional: Iterable[str], problems: Iterable[str] = ()) -> None:
    """Compares {file name: shape} of a file with those of a model.

    Raises one InputError that lists every missing, unexpected and mis-shaped name, and the `problems` given.
    """
    optional = set(optional)
    lines = [f"missing {name} {list(wanted[name])}" for name in wanted if name not in found and name not in optional]
    lines += [f"unexpected {name} {list(found[name])}" for name in found if name not in wanted]
    lines += [
        f"{name} has the shape {list(found[name])}, the model has {list(wanted[name])}"
        for name in wanted
        if name in found and found[name] != wanted[name]
    ]
    lines += problems
    if lines:
        raise InputError("weights", f"{len(found)} arrays", "; ".join(lines))
