"""The library's arrows point down, and the core needs none of the book's packages."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import attention_dynamics

PACKAGE = Path(attention_dynamics.__file__).parent

#: What each subpackage may import of the others.
ALLOWED = {
    "validation": set(),
    "models": {"validation"},
    "data": {"validation", "models"},
    # The bounds speak of the projection set, which lies in training; training knows no theory.
    "theory": {"validation", "models", "data", "training"},
    "training": {"validation", "models", "data"},
    "experiments": {"validation", "models", "data", "theory", "training"},
    "running": {"experiments", "validation"},
    "verification": set(),
    "plotting": set(),
    "commands": {"models", "data", "theory", "training", "experiments", "running", "plotting"},
    "cli": {"commands", "running"},
}
BOOK_ONLY = (
    "IPython", "beartype", "docutils", "flint", "hypothesis", "ipykernel", "jupyter_book",
    "jupyter_cache", "jupytext", "myst_nb", "myst_parser", "nbclient", "nbformat", "nbmake",
    "networkx", "playwright", "sphinx", "sphinx_proof", "yaml",
)  # fmt: skip


def imported(path: Path) -> set[str]:
    """The subpackages of the library that a module imports, wherever in the module."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the direction of an arrow"
            names = [node.module or ""]
            if node.module == "attention_dynamics":
                names = [f"attention_dynamics.{alias.name}" for alias in node.names]
        parts = (name.split(".") for name in names)
        found |= {part[1] for part in parts if part[0] == "attention_dynamics" and len(part) > 1}
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.stem)
def test_imports_point_down(path):
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if own == "__init__":
        assert not imported(path)
        return
    assert own in ALLOWED, f"{own}: say in this test what it may import"
    assert imported(path) - {own} <= ALLOWED[own]


def test_running_knows_experiments_by_their_shape_only():
    for path in (PACKAGE / "running").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf8"))):
            if isinstance(node, ast.ImportFrom) and "experiments" in (node.module or ""):
                # intervals over seeds are no experiment
                assert node.module.rpartition(".")[2] in {"shape", "estimates"}


def test_the_core_runs_without_the_packages_of_the_book():
    script = f"""
import importlib, importlib.abc, pkgutil, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BOOK_ONLY!r}:
            raise ModuleNotFoundError("No module named " + name, name=name)

sys.meta_path.insert(0, Absent())
import attention_dynamics
for module in pkgutil.walk_packages(attention_dynamics.__path__, "attention_dynamics."):
    if module.name != "attention_dynamics.verification.myst":  # a plugin of the page builder
        importlib.import_module(module.name)

import sympy as sp
import torch
from attention_dynamics.data.streams import generator
from attention_dynamics.data.tokens import query_vector, unit_ball_tokens
from attention_dynamics.models.shallow import ShallowTransformer
from attention_dynamics.training.descent import DescentConfig, projected_gradient_descent
from attention_dynamics.verification import check

tokens = unit_ball_tokens(8, 4, 3, generator=generator(0, "tokens"))
query = query_vector(3, generator=generator(0, "query"))
model = ShallowTransformer.symmetric(4, 3, query=query, seed=0)
result = projected_gradient_descent(model, tokens, torch.ones(8), DescentConfig(steps=5))
assert result.history["loss"].iloc[-1] < result.history["loss"].iloc[0]
x = sp.Symbol("x")
check.identity("eq-square", (x + 1) ** 2, x**2 + 2 * x + 1, wrong=x**2 - 2 * x + 1)
print("the core runs")
"""
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240
    )
    assert run.returncode == 0, run.stderr
    assert "the core runs" in run.stdout


def test_every_test_module_has_a_name_of_its_own():
    # pytest imports test modules by their bare name and refuses the second of two
    names = [path.name for path in Path(__file__).parents[1].rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names)
