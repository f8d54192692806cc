"""Where both frameworks meet: the instruments that hold them equal, the golden arrays, and the suite.

`check` holds any JAX model against any torch module; docs/porting.md walks through a port.
"""

import importlib
from typing import Any

_PUBLIC = {
    "check": "parity_tests.compare",
    "Function": "parity_tests.adapters",
    "Inputs": "parity_tests.adapters",
    "Linen": "parity_tests.adapters",
    "mark": "parity_tests.taps",
    "Report": "parity_tests.report",
    "Row": "parity_tests.report",
}

__all__ = ["Function", "Inputs", "Linen", "Report", "Row", "check", "mark"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
