"""The errors that a caller can cause. Standard library only."""


class InputError(ValueError):
    """A refused argument, option or file. The command line prints it and exits with status 2."""

    def __init__(self, argument: str, value: object, limit: str):
        self.argument, self.value, self.limit = argument, value, limit
        super().__init__(f"{argument} = {value!r}: {limit}")


class RunError(RuntimeError):
    """A check or a run that failed after it had started. The command line exits with status 1."""


def require(condition: bool, argument: str, value: object, limit: str) -> None:
    """Raises InputError naming the argument, its value and the limit unless `condition` holds."""
    if not condition:
        raise InputError(argument, value, limit)
