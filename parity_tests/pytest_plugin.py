"""The `parity` fixture, for the tests of other packages: pytest finds it by the entry point of this one."""

import json
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def parity(record_property: Callable[[str, object], None]) -> Callable[..., Any]:
    """parity(ours, theirs, inputs, **options) → Report, as `parity_tests.check`; the test fails where they differ, by the first value that does.

    `pytest --junitxml` gets the rows as properties of the test: parity, the summary, and parity/DTYPE/NAME, JSON with ok, reason, errors and grades.
    """

    def run(ours: Any, theirs: Any, inputs: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        from parity_tests import check

        report = check(ours, theirs, inputs, **options)
        record_property("parity", report.summary())
        for row in report.rows:
            fields = row.to_dict()
            record_property(
                f"parity/{row.dtype}/{row.name}", json.dumps({key: fields[key] for key in ("ok", "reason", "errors", "grades", "limits")})
            )
        if not report.ok:
            pytest.fail(report.explanation(), pytrace=False)
        return report

    return run
