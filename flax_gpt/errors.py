"""The errors that a caller can cause. Standard library only."""

import numbers


class InputError(ValueError):
    """A refused argument, option or file. The command line prints it and exits with status 2."""

    def __init__(self, argument: str, value: object, limit: str):
        self.argument, self.value, self.limit = argument, value, limit
        super().__init__(f"{argument} = {value!r}: {limit}")


class RunError(RuntimeError):
    """A check or a run that failed after it had started. The command line exits with status 1."""


def describe(value: object) -> str:
    """Dtype and shape of an array of either framework, or the name of any other type: how an error shows what it cannot show whole."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__


def is_integer(value: object) -> bool:
    """An integer of Python or numpy; True and False are none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """A real number of Python or numpy; True and False are none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def require(condition: bool, argument: str, value: object, limit: str) -> None:
    """Raises InputError naming the argument, its value and the limit unless `condition` holds."""
    if not condition:
        raise InputError(argument, value, limit)
