"""What the repository promises as a whole: its README runs, its modules stay short."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from small_book import REPOSITORY

MODULES = sorted((REPOSITORY / "src").rglob("*.py"))


def pinned(name: str) -> dict[str, str]:
    """Package -> version of a file of pins."""
    lines = (REPOSITORY / name).read_text("utf8").splitlines()
    pins = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {normal(package): version for package, version in pins}


def normal(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def test_the_python_of_the_readme_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text("utf8"), re.S)
    assert len(blocks) == 1
    code = [line for line in blocks[0].splitlines() if line and not line.startswith("import")]
    assert len(code) <= 10, "the README promises ten lines"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, "-c", blocks[0]],
        cwd=tmp_path,
        env=environment,
        text=True,
        capture_output=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"\bloss\b", done.stdout)


def test_the_commands_of_the_readme_exist() -> None:
    named = re.findall(
        r"(?:^|`)make ([a-z]+)\b", (REPOSITORY / "README.md").read_text("utf8"), re.M
    )
    makefile = (REPOSITORY / "Makefile").read_text("utf8")
    assert {"book", "test", "lab"} <= set(named)
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.M), f"make {target} has no rule"


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_modules_stay_short(module: Path) -> None:
    lines = len(module.read_text("utf8").splitlines())
    assert lines <= 300, f"{module.relative_to(REPOSITORY)} has {lines} lines: split it by concept"


def test_every_requirement_is_pinned_and_frozen() -> None:
    required, frozen = pinned("requirements.txt"), pinned("constraints.txt")
    assert required.items() <= frozen.items()
    assert not [version for version in frozen.values() if re.search(r"[+/@ ]", version)]


def test_the_core_needs_none_of_the_book() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf8"))["project"]
    core = {normal(re.split(r"[<>=!~ ]", entry)[0]) for entry in project["dependencies"]}
    allowed = {"torch", "numpy", "scipy", "pandas", "pyarrow", "sympy", "matplotlib"}
    assert core <= allowed | {"tqdm", "jaxtyping"}


def test_citation_and_binder_are_readable() -> None:
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text("utf8"))
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf8"))["project"]["version"]
    assert citation["version"] == version
    assert citation["license"] == "MIT"
    lines = (REPOSITORY / ".binder" / "requirements.txt").read_text("utf8").split()
    for flag, name in zip(lines[::2], lines[1::2], strict=True):
        assert flag in {"-r", "-c"}
        assert (REPOSITORY / ".binder" / name).resolve().is_file()
