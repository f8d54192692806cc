"""Data-parallel training: what `parity_tests.sharded` finds on four devices made of the processor, and what is refused on one."""

import json
import os
import subprocess
import sys

import pytest

from flax_gpt.__main__ import main
from flax_gpt.config import TrainConfig
from flax_gpt.errors import InputError
from flax_gpt.training.loop import train
from parity_tests.sharded import CHECKS, SMALL


@pytest.fixture(scope="module")
def found():
    """{check: its failures}; both halves at once, in processes of their own, since jax makes its devices when it starts."""
    # The devices wait for each other, on a busy machine for long; what is compiled runs for a moment only.
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_collective_call_terminate_timeout_seconds=200"
    command = [sys.executable, "-m", "parity_tests.sharded"]
    started = [subprocess.Popen([*command, part], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for part in CHECKS]
    said = [process.communicate() for process in started]
    told = {}
    for process, (out, err) in zip(started, said, strict=True):
        assert process.returncode == 0, err[-3000:]
        told |= json.loads(out.splitlines()[-1])
    return told


@pytest.mark.parametrize("check", [name for part in CHECKS.values() for name in part])
def test_several_devices_are_as_one(check, found):
    assert found[check] == []


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (0, "devices = 0: must be an integer of at least 1"),
        (True, "devices = True: must be an integer"),
        (1.0, "devices = 1.0: must be an integer"),
        (64, r"devices = 64: must be at most \d, the devices that jax sees"),
    ],
)
def test_devices_that_are_none_are_refused_before_anything_is_written(devices, message, tmp_path):
    with pytest.raises(InputError, match=message):
        train(SMALL, TrainConfig(batch_size=64, steps=1), None, tmp_path / "run", devices=devices, progress=False, picture=False)
    assert not (tmp_path / "run").exists()


def test_the_command_refuses_them_too(tmp_path, capsys):
    assert main(["train", "--out", str(tmp_path / "run"), "--devices", "64"]) == 2
    assert "devices = 64: must be at most" in capsys.readouterr().err
