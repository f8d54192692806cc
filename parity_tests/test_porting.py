"""The guide, as it is printed: every block of it runs, in order; and the fixture that it ends with."""

import importlib.metadata
import pathlib
import re
import subprocess
import sys

GUIDE = pathlib.Path(__file__).parents[1] / "docs" / "porting.md"

PORT = """
import numpy as np
import pytest
import torch
from flax import nnx

class Ours(nnx.Module):
    def __init__(self, epsilon):
        self.linear, self.norm = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.LayerNorm(4, epsilon=epsilon, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.norm(self.linear(x))

@pytest.mark.parametrize("epsilon", [1e-5, 1e-3])
def test_port(parity, epsilon):
    torch.manual_seed(0)
    theirs = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    assert parity(Ours(epsilon), theirs, np.ones((2, 4), np.float32) * [[1.0], [2.0]], weights="copy").rows
"""


def test_every_block_of_the_guide_runs():
    text = GUIDE.read_text(encoding="utf-8")
    space = {"__name__": "guide"}
    blocks = list(re.finditer(r"```python\n(.*?)```", text, re.DOTALL))
    assert len(blocks) >= 10
    for block in blocks:
        line = text[: block.start()].count("\n") + 1
        exec(compile("\n" * line + block[1], str(GUIDE), "exec"), space)
    space["test_port"](space["check"])


def test_the_fixture_names_the_first_layer_that_differs(tmp_path):
    (tmp_path / "test_port.py").write_text(PORT, encoding="utf-8")
    installed = any(point.value == "parity_tests.pytest_plugin" for point in importlib.metadata.entry_points(group="pytest11"))
    options = [] if installed else ["-p", "parity_tests.pytest_plugin"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, "test_port.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    assert "first difference: taps/norm (float64)" in done.stdout
    assert "looks like: epsilon: ours is a layer norm with epsilon 0.001, theirs is a layer norm with epsilon 1e-05" in done.stdout
    assert "agree before it: linear" in done.stdout
