"""Arguments of a command, read by tyro from the signature of its function. A refusal comes out as one line."""

import contextlib
import dataclasses
import functools
import inspect
import io
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tyro

Command = Callable[..., None]


class UsageError(Exception):
    """Arguments that do not fit the command; the text is one line."""


WORDING = (
    # tyro's words, and the form of ours: argument = value: limit
    (r"Error parsing (\S+): invalid literal for int\(\) with base 10: (.+)", r"\1 = \2: must be a whole number"),
    (r"Error parsing (\S+): could not convert string to float: (.+)", r"\1 = \2: must be a number"),
    (r"Error parsing (\S+): no type matching \S*INT could be instantiated from \[(.+?)\]\..*", r"\1 = \2: must be a whole number or None"),
    (r"Error parsing (\S+): no type matching \S*FLOAT could be instantiated from \[(.+?)\]\..*", r"\1 = \2: must be a number or None"),
    (r"invalid choice (.+) for argument '(.+)'\. Expected one of \((.+)\)\.", r"\2 = \1: must be one of \3"),
    (r"Missing value for argument '(.+)'\. Expected (\d+) values?\.", r"\1: needs a value"),
    (r"Missing from .+?: (\S+) .*", r"\1: is required"),
    (r"Unrecognized options: (.+)", r"\1: is not an option of this command"),
    (r"Error parsing [\w.-]+: (\w+ = .+)", r"\1"),  # InputError, raised by a configuration
)


def _line(report: str) -> str:
    """The first paragraph of one of tyro's boxes, as one line in our words."""
    rows = [row.strip("│| ") for row in re.sub(r"\x1b\[[0-9;]*m", "", report).splitlines()]
    paragraph = []
    for row in rows[1:]:
        if re.match(r"[─╰+-]{3}", row):
            break
        paragraph.append(row)
    text = " ".join(" ".join(paragraph).split())
    for pattern, ours in WORDING:
        if re.fullmatch(pattern, text):
            return re.sub(pattern, ours, text)
    return text


@contextlib.contextmanager
def _columns(width: str) -> Iterator[None]:
    """The terminal's width as tyro sees it."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = width
    try:
        yield
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before


def bind(command: Command, name: str, arguments: Sequence[str], defaults: Mapping[str, Any]) -> Callable[[], None]:
    """The call that `arguments` ask for, not yet made; `defaults` stand in for those of the command's signature.

    Raises UsageError; prints the help and raises SystemExit(0) when they ask for it.
    """

    @functools.wraps(command)
    def bound(*values: object, **named: object) -> Callable[[], None]:
        return functools.partial(command, *values, **named)

    signature = inspect.signature(command)
    # A group of options has the fields of its default, which may be those of another configuration than the command names.
    groups = {key: type(value) for key, value in defaults.items() if dataclasses.is_dataclass(value)}
    parameters = [
        parameter.replace(default=defaults.get(key, parameter.default), annotation=groups.get(key, parameter.annotation))
        for key, parameter in signature.parameters.items()
    ]
    bound.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    bound.__annotations__ = command.__annotations__ | groups
    del bound.__wrapped__  # or tyro would read the command's own annotations

    wants_help = any(argument in ("-h", "--help") for argument in arguments)
    report = io.StringIO()
    # A box as wide as its text, so that no line of a refusal is broken.
    width = contextlib.nullcontext() if wants_help else _columns("100000")
    try:
        with contextlib.redirect_stderr(report), width:
            return tyro.cli(bound, prog=f"flax-gpt {name}", args=list(arguments), config=(tyro.conf.OmitArgPrefixes,))
    except SystemExit as stop:
        if stop.code == 0:
            raise
    raise UsageError(_line(report.getvalue()))
