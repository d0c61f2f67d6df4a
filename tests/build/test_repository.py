"""What the repository promises as a whole: its README runs, its modules stay short."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet
from small_book import REPOSITORY

MODULES = sorted((REPOSITORY / "src").rglob("*.py"))


def pinned(name: str) -> dict[str, str]:
    """Package -> version of a file of pins; a marker says on which machines, not which version."""
    lines = (REPOSITORY / name).read_text("utf8").splitlines()
    entries = (line.partition(";")[0].rstrip() for line in lines if line[:1] not in ("", "#"))
    pins = (entry.split("==") for entry in entries)
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


def test_every_pin_installs_on_the_oldest_python_of_the_readme() -> None:
    [oldest] = re.findall(
        r"Python (\d\.\d+) or newer", (REPOSITORY / "README.md").read_text("utf8")
    )
    for package, version in pinned("constraints.txt").items():
        try:
            found = metadata.metadata(package)
        except metadata.PackageNotFoundError:  # for another machine, says its marker
            continue
        # where importlib_metadata has been imported, [] of a missing key raises
        needs = found.get("Requires-Python")
        if found["Version"].partition("+")[0] == version and needs:
            supported = SpecifierSet(needs)
            assert supported.contains(f"{oldest}.0"), f"{package} {version} needs {supported}"


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


STUB = """\
#!{bash}
echo "{name} $*" >> {log}
exit {status}
"""


def run_ci(folder: Path, *stubs: str, user: int = 0) -> tuple[int, str, list[str]]:
    """``.ci/run`` on a machine with nothing but ``stubs``; its status, messages and commands."""
    log, programs = folder / "log", folder / "bin"
    programs.mkdir()
    for name in ("bash", "dirname"):
        (programs / name).symlink_to(shutil.which(name) or "")
    for name in ("id", *stubs):
        # Python is there, but its module for virtual environments is not.
        text = STUB.format(
            bash=programs / "bash", name=name, log=log, status=int(name == "python3")
        )
        (programs / name).write_text(text if name != "id" else f"#!{programs}/bash\necho {user}\n")
        (programs / name).chmod(0o755)
    done = subprocess.run(
        [str(programs / "bash"), str(REPOSITORY / ".ci" / "run")],
        env={"PATH": str(programs)},
        text=True,
        capture_output=True,
        timeout=60,
    )
    commands = log.read_text("utf8").splitlines() if log.is_file() else []
    return done.returncode, done.stdout + done.stderr, commands


def test_ci_installs_what_a_bare_machine_lacks(tmp_path: Path) -> None:
    status, _, commands = run_ci(tmp_path, "apt-get", "python3", "git", "make")
    assert status == 0
    packages = "g++ python3 python3-venv chromium fonts-dejavu-core"
    assert commands == [
        "python3 -c import ensurepip",
        "apt-get update -qq",
        f"apt-get install -y -qq --no-install-recommends {packages}",
        "make lint",
        "make book",
        "make test",
    ]


def test_ci_says_what_it_cannot_install(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    status, message, commands = run_ci(tmp_path / "a", "make", "git")
    assert status == 1
    assert "missing here: g++ python3 python3-venv chromium" in message
    assert "No apt-get on this machine" in message
    (tmp_path / "b").mkdir()
    status, message, commands = run_ci(tmp_path / "b", "apt-get", "git", user=1000)
    assert status == 1
    assert "Neither root nor sudo" in message
    assert commands == []
