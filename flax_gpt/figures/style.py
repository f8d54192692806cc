"""Fonts, visible characters and saving, shared by every picture. No pyplot: nothing here opens a window or keeps a figure alive."""

import contextlib
import functools
import logging
import os
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.font_manager import FontEntry, findSystemFonts, fontManager
from matplotlib.ft2font import FT2Font

BASE_FONT = "DejaVu Sans"  # comes with matplotlib, so the others only fill in what it lacks

CJK_FONTS = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",  # the first face of Noto's collection
    "Noto Sans SC",
    "Source Han Sans SC",
    "Source Han Sans CN",
    "WenQuanYi Zen Hei",
    "WenQuanYi Micro Hei",
    "PingFang SC",
    "Hiragino Sans GB",
    "Heiti SC",
    "STHeiti",
    "Microsoft YaHei",
    "SimHei",
    "SimSun",
    "Droid Sans Fallback",
    "Arial Unicode MS",
)
"""Families that hold Chinese, in order of preference."""

UNDRAWABLE = ("LastResort", "Last Resort", "Emoji")
"""Fonts whose glyphs are boxes, or bitmaps that Agg cannot draw."""

VISIBLE = {" ": "␣", "\n": "⏎", "\t": "⇥"}


def escape(character: str) -> str:
    """The character as \\uXXXX (\\UXXXXXXXX beyond the first plane)."""
    code = ord(character)
    return f"\\u{code:04X}" if code <= 0xFFFF else f"\\U{code:08X}"


def visible(text: str) -> str:
    """Spaces, line ends and tabs as signs, other control characters escaped, marks that combine on a dotted circle."""

    def one(character: str) -> str:
        if character in VISIBLE:
            return VISIBLE[character]
        category = unicodedata.category(character)
        if category[0] in "CZ" and category != "Co":
            return escape(character)
        return "◌" + character if category[0] == "M" else character

    return "".join(map(one, text))


@functools.cache
def _characters(path: str) -> frozenset[int]:
    return frozenset(FT2Font(path).get_charmap())


@functools.cache
def installed() -> tuple[FontEntry, ...]:
    """The fonts that matplotlib knows, together with those installed after it last wrote its list."""
    known = {entry.fname for entry in fontManager.ttflist}
    for path in sorted(set(findSystemFonts()) - known):
        with contextlib.suppress(OSError, RuntimeError, UnicodeError):  # a file that FreeType cannot read is no font for us
            fontManager.addfont(path)
    return tuple(fontManager.ttflist)


def choose_fonts(text: str, entries: Iterable[FontEntry] | None = None) -> tuple[list[str], set[str]]:
    """Families that together hold the characters of `text`, the base font first, and the characters that none holds.

    `entries` are the fonts to choose from; None means the installed ones, which are listed only when the base font lacks something.
    """
    base = matplotlib.font_manager.findfont(BASE_FONT)
    families, missing = [BASE_FONT], {c for c in text if ord(c) not in _characters(base)}
    if not missing:
        return families, missing
    order = {name: rank for rank, name in enumerate(CJK_FONTS)}
    usable = [e for e in (installed() if entries is None else entries) if not any(word in e.name for word in UNDRAWABLE)]
    for entry in sorted(usable, key=lambda e: (order.get(e.name, len(order)), e.style != "normal", e.name, e.fname)):
        if entry.name in families:
            continue
        try:
            found = {c for c in missing if ord(c) in _characters(entry.fname)}
        except (OSError, RuntimeError):
            continue
        if found:
            families.append(entry.name)
            missing -= found
        if not missing:
            break
    return families, missing


@contextlib.contextmanager
def _quiet_fonts() -> Iterator[None]:
    """matplotlib logs a line a text when a family, as most Chinese ones, has no face of weight 400."""
    logger = logging.getLogger("matplotlib.font_manager")
    keep = lambda record: not record.getMessage().startswith("findfont: Failed to find font weight")
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


@contextlib.contextmanager
def labels(text: str, entries: Iterable[FontEntry] | None = None) -> Iterator[Callable[[str], str]]:
    """The settings under which a figure with the characters of `text` is made and saved; yields the function from a token to its label.

    Characters without a glyph are escaped, with one warning for all of them.
    """
    families, missing = choose_fonts(visible(text), entries)
    if missing:
        shown = " ".join(escape(c) for c in sorted(missing)[:8]) + (" …" if len(missing) > 8 else "")
        warnings.warn(
            f"no installed font has {len(missing)} of the characters to draw ({shown}); they are written as escapes. "
            "A font such as Noto Sans CJK or WenQuanYi Zen Hei holds Chinese.",
            stacklevel=3,
        )
    settings: Any = {
        "font.family": families,
        "axes.unicode_minus": False,
        "text.parse_math": False,  # a token may be a dollar sign
        "axes.titlesize": "medium",
    }
    with matplotlib.rc_context(settings), _quiet_fonts():
        yield lambda token: "".join(escape(c) if c in missing else c for c in visible(token))


def save(figure: Figure, path: str | os.PathLike[str], *, dpi: int = 120) -> Path:
    """Writes a PNG under a temporary name and renames it, so that a reader never sees half a picture. Makes the folder."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        figure.savefig(temporary, format="png", dpi=dpi, metadata={"Software": None})
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path
