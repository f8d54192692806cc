"""Which of their weights fills each of ours: from a table of patterns, and where it says nothing from values, kinds of modules, shapes and order.

A table maps our names to theirs. In a key `*` stands for one part of a dotted name, or for some of it, and `**` for any number of them; the
k-th star of the other side takes what the k-th one matched. A compiled regular expression is a key too, with \\1 in the other side. A key names
a leaf ("head.kernel") or a module ("blocks.*.attention.query"), whose leaves are then spelled by its kind: kernel, scale and embedding are
torch's weight. Their name may end in `[i/n]`, the i-th of n equal parts of the first axis ("qkv.weight[0/3]"), and in `.T`; a tuple of names is
joined along the first axis.
"""

import dataclasses
import functools
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flax_gpt.errors import InputError
from parity_tests.adapters import Leaf

Table = Mapping[Any, str | tuple[str, ...]]
Values = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Part:
    """One of `count` equal parts, along the first axis, of one of their tensors."""

    name: str
    index: int = 0
    count: int = 1

    def __str__(self) -> str:
        return self.name if self.count == 1 else f"{self.name}[{self.index}/{self.count}]"

    def of(self, array: np.ndarray) -> np.ndarray:
        size = array.shape[0] // self.count if self.count > 1 else 0
        return array[self.index * size : (self.index + 1) * size] if self.count > 1 else array

    def shape(self, leaf: Leaf) -> tuple[int, ...]:
        return (leaf.shape[0] // self.count, *leaf.shape[1:]) if self.count > 1 else leaf.shape


@dataclasses.dataclass(frozen=True)
class Source:
    """What fills one of our leaves: parts of theirs, joined along the first axis, with the axes permuted, in our shape."""

    parts: tuple[Part, ...]
    axes: tuple[int, ...]
    shape: tuple[int, ...]

    def __str__(self) -> str:
        name = " + ".join(map(str, self.parts))
        return name if self.axes == tuple(range(len(self.axes))) else f"{name} with axes {list(self.axes)}"

    def of(self, values: Values) -> np.ndarray:
        """Our array, from theirs by name."""
        arrays = [part.of(values[part.name]) for part in self.parts]
        joined = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        return np.ascontiguousarray(joined.transpose(self.axes).reshape(self.shape))


def layouts(ours: Leaf, theirs: Leaf, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The permutations of the axes of a tensor of theirs, of this shape, that the kinds of both modules allow to fill ours; empty when none does.

    A matrix is turned by the kind of the module, never by the shape: a square one would hide a wrong orientation. Where a kind is not known and both
    orientations of a square fit, both are returned.
    """
    same = tuple(range(len(shape)))
    if math.prod(shape) != math.prod(ours.shape):
        return []
    kinds = (ours.kind, theirs.kind)
    if kinds == ("linear", "linear") or kinds in (("linear", "embed"), ("embed", "in_out")):
        turned = same[::-1]
    elif kinds in (("linear", "in_out"), ("embed", "linear"), ("embed", "embed"), ("norm", "norm")):
        turned = same
    elif "conv" in kinds and ours.kind in ("conv", "linear"):  # (out, in, height, width) → (height, width, in, out); a patch is read row by row
        turned = (*same[2:], 1, 0) if len(shape) > 2 else same[::-1]
    elif "raw" not in kinds and len(shape) > 1:
        return []
    else:
        fits = [axes for axes in {same, same[::-1]} if len(shape) <= 2 and _squeezed(tuple(shape[i] for i in axes)) == _squeezed(ours.shape)]
        return sorted(fits) or ([same] if shape == ours.shape else [])
    if len(shape) < 2:
        return [same]
    seen = tuple(shape[i] for i in turned)
    return [turned] if seen == ours.shape or _refines(seen, ours.shape) else []


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _refines(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Whether one shape becomes the other by splitting axes: (D, D) and (D, H, Dh)."""
    boundaries = [set(np.cumprod(shape).tolist()) for shape in (a, b)]
    return boundaries[0] <= boundaries[1] or boundaries[1] <= boundaries[0]


def match(
    ours: Mapping[str, Leaf], theirs: Mapping[str, Leaf], aliases: Mapping[str, str], table: Table | None, our_values: Values, their_values: Values
) -> dict[str, Source]:
    """{our leaf: its source}, each of our parameters filled and each of theirs used; buffers where something fills them.

    Raises one InputError that lists, by name, every entry of the table that matches nothing, every leaf of ours that is unfilled or ambiguous, and
    every parameter of theirs that is left over.
    """
    return _Matcher(ours, theirs, aliases, our_values, their_values).run(table or {})


def _shown(table: Table, most: int = 3) -> dict[str, Any]:
    """The table in a message: its first entries, and how many more there are."""
    entries = [(str(getattr(key, "pattern", key)), value) for key, value in table.items()]
    more = [("…", f"{len(entries) - most} more")] if len(entries) > most else []
    return dict(entries[:most] + more)


@dataclasses.dataclass
class _Matcher:
    ours: Mapping[str, Leaf]
    theirs: Mapping[str, Leaf]
    aliases: Mapping[str, str]
    our_values: Values
    their_values: Values
    found: dict[str, Source] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)

    def run(self, table: Table) -> dict[str, Source]:
        self._from_table(table)
        self._propose()
        used = {self._first(part.name) for source in self.found.values() for part in source.parts}
        left = {name: leaf for name, leaf in self.theirs.items() if leaf.trained and self._first(name) not in used and name not in self.aliases}
        for name, leaf in self.ours.items():
            if name not in self.found and leaf.trained and not any(problem.startswith(f"{name} ") for problem in self.problems):
                namesake = left.pop(self._spelled(name), None)
                other = f"does not fit {self._spelled(name)} {list(namesake.shape)} of theirs" if namesake else "is unfilled"
                self.problems.append(f"{name} {list(leaf.shape)} {other}")
        self.problems += [f"{name} {list(leaf.shape)} of theirs is left over" for name, leaf in left.items()]
        for name, count, parts in self._partly_used():
            self.problems.append(f"{name} of theirs is used in {len(parts)} of {count} parts")
        if self.problems:
            raise InputError("names", _shown(table), "; ".join(self.problems))
        return {name: self.found[name] for name in self.ours if name in self.found}

    def _first(self, name: str) -> str:
        return self.aliases.get(name, name)

    def _partly_used(self) -> list[tuple[str, int, set[int]]]:
        parts = defaultdict(set)
        for source in self.found.values():
            for part in source.parts:
                parts[part.name, part.count].add(part.index)
        return [(name, count, indices) for (name, count), indices in parts.items() if len(indices) < count and (name, 1) not in parts]

    def _from_table(self, table: Table) -> None:
        used = set()
        for name, leaf in self.ours.items():
            for key, value in table.items():
                target = _translated(name, leaf, key, value)
                if target is not None:
                    used.add(key)
                    self._assign(name, leaf, target)
                    break
        self.problems += [f"{getattr(key, 'pattern', key)!r} of the table matches nothing of ours" for key in table if key not in used]

    def _assign(self, name: str, leaf: Leaf, target: Sequence[str]) -> None:
        parts, turned = [], False
        for text in target:
            turned |= text.endswith(".T")
            read = re.fullmatch(r"(.+?)(?:\[(\d+)/(\d+)\])?", text.removesuffix(".T"))
            assert read is not None
            part = Part(read[1], int(read[2] or 0), int(read[3] or 1))
            theirs = self.theirs.get(part.name)
            if theirs is None:
                self.problems.append(f"{name} is to be {part.name}, which they do not have")
                return
            if not part.index < part.count or not theirs.shape or theirs.shape[0] % part.count:
                self.problems.append(f"{name} is to be {part}, which {list(theirs.shape)} has not")
                return
            parts.append(part)
        theirs = self.theirs[parts[0].name]
        shapes = [part.shape(self.theirs[part.name]) for part in parts]
        shape = (sum(s[0] for s in shapes), *shapes[0][1:]) if len(parts) > 1 else shapes[0]
        axes = layouts(leaf, theirs, shape)
        if turned and len(shape) == 2 and _refines(shape[::-1], leaf.shape):
            axes = [(1, 0)]
        if len(axes) > 1:
            axes = self._by_value(name, parts, axes)
        if not axes:
            self.problems.append(f"{name} {list(leaf.shape)} cannot be {' + '.join(map(str, parts))} {list(shape)}")
        else:
            self.found[name] = Source(tuple(parts), axes[0], leaf.shape)

    def _by_value(self, name: str, parts: Sequence[Part], axes: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """A square matrix of no known kind: the orientation in which it agrees, else as it is, which `.T` in the table changes."""
        equal = [
            turn for turn in axes if np.array_equal(Source(tuple(parts), turn, self.ours[name].shape).of(self.their_values), self.our_values[name])
        ]
        return equal[:1] or axes[:1]

    # Proposals, where the table says nothing.

    def _propose(self) -> None:
        ours = [name for name in self.ours if name not in self.found]
        taken = {part for source in self.found.values() for part in source.parts}
        theirs = [part for part in self._parts() if part not in taken]
        matrices = functools.partial(self._same_order, matrices=True)
        for step in (self._same_name, self._same_value, self._same_module, matrices, self._same_module, self._same_order):
            ours, theirs = step(ours, theirs)

    def _parts(self) -> list[Part]:
        """Their tensors, fused projections of attention in their three parts, each tensor once."""
        parts: list[Part] = []
        for name in self.theirs:
            if name.rpartition(".")[2] in ("in_proj_weight", "in_proj_bias"):
                parts += [Part(name, i, 3) for i in range(3)]
            elif name not in self.aliases:
                parts.append(Part(name))
        return parts

    def _fits(self, name: str, part: Part) -> list[tuple[int, ...]]:
        ours, theirs = self.ours[name], self.theirs[part.name]
        if ours.trained != theirs.trained or (ours.attribute != theirs.attribute and "raw" not in (ours.kind, theirs.kind)):
            return []
        return layouts(ours, theirs, part.shape(theirs))

    def _take(self, pairs: list[tuple[str, Part]], ours: list[str], theirs: list[Part]) -> tuple[list[str], list[Part]]:
        for name, part in pairs:
            axes = self._fits(name, part)
            self.found[name] = Source((part,), (self._by_value(name, [part], axes) if len(axes) > 1 else axes)[0], self.ours[name].shape)
        matched, used = {name for name, _ in pairs}, {part for _, part in pairs}
        return [name for name in ours if name not in matched], [part for part in theirs if part not in used]

    def _same_name(self, ours: list[str], theirs: list[Part]) -> tuple[list[str], list[Part]]:
        spelled = {self._spelled(name): name for name in ours}
        return self._take([(spelled[p.name], p) for p in theirs if p.name in spelled and self._fits(spelled[p.name], p)], ours, theirs)

    def _spelled(self, name: str) -> str:
        path = name.rpartition(".")[0]
        return f"{path}.{self.ours[name].attribute}" if path else self.ours[name].attribute

    def _same_value(self, ours: list[str], theirs: list[Part]) -> tuple[list[str], list[Part]]:
        """What holds the same numbers, bit for bit, and nothing else does; constants tell nothing."""
        equal = lambda name, part: any(
            np.array_equal(Source((part,), axes, self.ours[name].shape).of(self.their_values), self.our_values[name])
            for axes in self._fits(name, part)
            if _agree(name, part)
        )
        candidates = {name: [part for part in theirs if equal(name, part)] for name in ours if np.ptp(self.our_values[name]) > 0}
        counts = defaultdict(int)
        for parts in candidates.values():
            for part in parts:
                counts[part] += 1
        return self._take([(name, parts[0]) for name, parts in candidates.items() if len(parts) == 1 and counts[parts[0]] == 1], ours, theirs)

    def _same_module(self, ours: list[str], theirs: list[Part]) -> tuple[list[str], list[Part]]:
        """The bias beside a weight that has been found."""
        modules = {
            name.rpartition(".")[0]: (source.parts[0].name.rpartition(".")[0], source.parts[0].index)
            for name, source in self.found.items()
            if len(source.parts) == 1 and "." in name
        }
        place = lambda part: (part.name.rpartition(".")[0], part.index)
        pairs = [(n, p) for n in ours for p in theirs if modules.get(n.rpartition(".")[0]) == place(p) and self._fits(n, p)]
        names, parts = [n for n, _ in pairs], [p for _, p in pairs]
        return self._take([(n, p) for n, p in pairs if names.count(n) == 1 and parts.count(p) == 1], ours, theirs)

    def _same_order(self, ours: list[str], theirs: list[Part], matrices: bool = False) -> tuple[list[str], list[Part]]:
        """Leaves that the same tensors fit, as many as these, are taken in the order of definition, unless the names contradict it.

        Names contradict when one side says query and the other key, or when both count layers and the counts differ. Then roles and counts decide, if
        they do so for each; otherwise the group is ambiguous.
        """
        while True:
            groups: dict[tuple[Part, ...], list[str]] = defaultdict(list)
            for name in ours:
                parts = [part for part in theirs if self._fits(name, part)]
                alike = [part for part in parts if self.theirs[part.name].kind == self.ours[name].kind]
                if parts and not (matrices and self.ours[name].attribute == "bias"):
                    groups[tuple(alike or parts)].append(name)
            pairs = next(filter(None, (self._decided(names, parts) for parts, names in groups.items())), None)
            if pairs is None:
                break
            ours, theirs = self._take(pairs, ours, theirs)
        for parts, names in groups.items():
            candidates = ", ".join(map(str, parts))
            told = [f"{name} {list(self.ours[name].shape)} is ambiguous: {candidates}" for name in names if self.ours[name].trained]
            self.problems += [] if matrices else told
        return ours, theirs

    def _decided(self, names: list[str], parts: tuple[Part, ...]) -> list[tuple[str, Part]] | None:
        ordered = list(zip(names, parts, strict=False))
        if len(names) == len(parts) and all(_agree(name, part) for name, part in ordered):
            return ordered
        by_name = {name: [part for part in parts if _agree(name, part)] for name in names}
        told = [options[0] for options in by_name.values() if len(options) == 1]
        return list(zip(names, told, strict=True)) if len(told) == len(names) == len(set(told)) else None


_ROLES = {
    **dict.fromkeys("q query queries wq w_q q_proj q_lin to_q query_proj q_linear".split(), "query"),
    **dict.fromkeys("k key keys wk w_k k_proj k_lin to_k key_proj k_linear".split(), "key"),
    **dict.fromkeys("v value values wv w_v v_proj v_lin to_v value_proj v_linear".split(), "value"),
    **dict.fromkeys("o out output wo w_o o_proj out_proj out_lin to_out dense_out".split(), "output"),
}


def _agree(name: str, part: Part) -> bool:
    """Whether what the names say about role and layer, where both say something, is the same."""
    ours, theirs = name.lower().split("."), part.name.lower().split(".")
    role = lambda words: next((_ROLES[word] for word in reversed(words[:-1]) if word in _ROLES), None)
    roles = role(ours), ("query", "key", "value")[part.index] if part.count == 3 else role(theirs)
    numbers = [[int(word) for word in words if word.isdigit()] for words in (ours, theirs)]
    counts = tuple(found[0] for found in numbers if found)
    return (None in roles or roles[0] == roles[1]) and (len(counts) < 2 or counts[0] == counts[1])


def _translated(name: str, leaf: Leaf, key: Any, value: str | tuple[str, ...]) -> tuple[str, ...] | None:
    """Their names for a leaf of ours, by one entry of the table; None where it does not apply."""
    targets = (value,) if isinstance(value, str) else tuple(value)
    pattern = key if isinstance(key, re.Pattern) else _glob(key)
    whole = pattern.fullmatch(name)
    if whole:
        return tuple(_filled(target, whole, key) for target in targets)
    path = name.rpartition(".")[0]
    while path:
        if found := pattern.fullmatch(path):
            rest = name[len(path) + 1 :]
            spelled = f"{rest.rpartition('.')[0]}.{leaf.attribute}".lstrip(".")
            return tuple(_with_leaf(_filled(target, found, key), spelled) for target in targets)
        path = path.rpartition(".")[0]
    return None


def _with_leaf(module: str, leaf: str) -> str:
    read = re.fullmatch(r"(.*?)((?:\[\d+/\d+\])?(?:\.T)?)", module)
    assert read is not None
    return f"{read[1]}.{leaf}{read[2]}"


@functools.cache
def _glob(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*|\*)", pattern)
    return re.compile("".join({"*": r"([^.]+)", "**": r"(.+)"}.get(part, re.escape(part)) for part in parts))


def _filled(target: str, found: re.Match[str], key: Any) -> str:
    if isinstance(key, re.Pattern):
        return found.expand(target)
    groups = iter(found.groups())
    return re.sub(r"\*\*|\*", lambda star: next(groups, star[0]), target)
