"""The `parity` fixture, for the tests of other packages: pytest finds it by the entry point of this one."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def parity() -> Callable[..., Any]:
    """parity(ours, theirs, inputs, **options) → Report, as `parity_tests.check`; the test fails where they differ, by the first value that does."""

    def run(ours: Any, theirs: Any, inputs: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        from parity_tests import check

        report = check(ours, theirs, inputs, **options)
        if not report.ok:
            pytest.fail(report.explanation(), pytrace=False)
        return report

    return run
