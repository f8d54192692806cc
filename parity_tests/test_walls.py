"""The walls between the packages: each imports whole while the other's framework is refused at the door."""

import subprocess
import sys

import pytest

JAX = ["jax", "jaxlib", "flax", "optax", "orbax"]
TORCH = ["torch"]

PREAMBLE = """
import importlib, pkgutil, sys

class Wall:
    def __init__(self, names):
        self.names = names
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.names:
            raise ImportError(f"{name} stands behind the wall")
"""

WHOLE_PACKAGE = """
sys.meta_path.insert(0, Wall({blocked}))
package = importlib.import_module({name!r})
modules = [module.name for module in pkgutil.walk_packages(package.__path__, {name!r} + ".")]
for module in modules:
    importlib.import_module(module)
assert len(modules) > 15, modules
reached = sorted(set({blocked}) & set(sys.modules))
assert not reached, reached
"""

UNTOUCHED = """
for module in {modules}:
    importlib.import_module(module)
reached = sorted({{name.split(".")[0] for name in sys.modules}} & set({frameworks}))
assert not reached, reached
"""


def run(code: str, **values: object) -> str:
    """Standard error of a fresh interpreter that must succeed on `code`."""
    done = subprocess.run([sys.executable, "-c", PREAMBLE + code.format(**values)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize(("name", "blocked"), [("flax_gpt", TORCH), ("torch_ref", JAX)])
def test_every_module_imports_without_the_other_framework(name: str, blocked: list[str]) -> None:
    run(WHOLE_PACKAGE, name=name, blocked=blocked)


def test_the_wall_stops_an_import() -> None:
    with pytest.raises(AssertionError, match="stands behind the wall"):
        run(WHOLE_PACKAGE, name="torch_ref", blocked=TORCH)


@pytest.mark.parametrize("module", ["flax_gpt", "flax_gpt.config", "flax_gpt.errors", "flax_gpt.weights.torch_names", "flax_gpt.__main__"])
def test_shared_facts_and_the_command_line_import_no_framework(module: str) -> None:
    run(UNTOUCHED, modules=[module], frameworks=JAX + TORCH)


def test_shared_facts_need_the_standard_library_alone() -> None:
    outside = ["numpy", "safetensors", "tyro", "rich", "grain", "ml_dtypes", "jaxtyping"]
    run(UNTOUCHED, modules=["flax_gpt.config", "flax_gpt.errors", "flax_gpt.weights.torch_names"], frameworks=outside)


def test_public_names_load_on_first_use() -> None:
    run("import flax_gpt; assert 'jax' not in sys.modules; assert flax_gpt.MiniGPT.__name__ == 'MiniGPT'; assert 'jax' in sys.modules")


COST = """
import time
import jax, flax.nnx
theirs, known = time.process_time(), set(sys.modules)
import {package}
from flax_gpt import MiniGPT, attend
ours, new = time.process_time() - theirs, sorted({{name.split(".")[0] for name in set(sys.modules) - known}})
assert new == ["flax_gpt"], new
assert ours < 0.1 * theirs, f"{{ours}} s of processor time, after {{theirs}} s for jax and flax"
"""


def test_the_models_cost_a_tenth_of_the_import_of_jax_and_flax_and_load_nothing_else() -> None:
    run("from flax_gpt import MiniGPT, attend")  # leaves bytecode, which the other libraries have since they were installed
    run(COST, package="flax_gpt")


def test_a_library_beside_them_is_noticed() -> None:
    with pytest.raises(AssertionError, match="safetensors"):
        run(COST, package="flax_gpt, safetensors")
