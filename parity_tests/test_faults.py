"""The suite proved: each fault of the catalogue, planted in a copy of the packages, must make the test that it names fail by an assertion."""

import pytest

from parity_tests.faults import FAULTS, ROOT, SAMPLE, Fault, survives

ALL = {f"{part}: {name}": fault for part, faults in FAULTS.items() for name, fault in faults.items()}


@pytest.mark.parametrize("fault", [pytest.param(fault, id=name, marks=[] if name in SAMPLE else pytest.mark.slow) for name, fault in ALL.items()])
def test_a_fault_is_noticed(fault, tmp_path):
    survived = survives(fault, tmp_path)
    assert not survived, survived


def test_the_source_still_holds_what_is_changed():
    """All of the catalogue, most of which is planted on demand alone."""
    counts = {name: (ROOT / fault.file).read_text(encoding="utf-8").count(fault.right) for name, fault in ALL.items()}
    assert {name: count for name, count in counts.items() if count != 1} == {}
    assert all(fault.right != fault.wrong for fault in ALL.values())
    assert set(SAMPLE) <= set(ALL)


def test_a_fault_that_cannot_be_planted_is_no_proof(tmp_path):
    assert "0 times" in survives(Fault("flax_gpt/masks.py", "no such expression", "", "test_masks.py"), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("wrong", "told"), [("return (keys <= queries)", "passes"), ("return keys <= absent", "no failed assertion")])
def test_a_test_that_passes_or_breaks_is_no_proof(wrong, told, tmp_path):
    fault = Fault("flax_gpt/masks.py", "return keys <= queries", wrong, "test_masks.py::test_visible_counts_of_the_causal_mask")
    assert told in survives(fault, tmp_path)
