"""A book of two pages, built by the real drivers with the real configuration and extension."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]

INDEX = """\
# A small book

It has one {doc}`chapter <chapter>` and one equation, {eq}`def-mean`.

$$ \\mu = \\frac{1}{T} \\sum_{t=1}^{T} x_t $$ (def-mean)
"""

CHAPTER = """\
---
jupytext:
  formats: ipynb,md:myst
  text_representation:
    extension: .md
    format_name: myst
kernelspec:
  display_name: Python 3
  language: python
  name: python3
---

# A chapter

The library says how much.

```{code-cell} ipython3
import small_library

small_library.answer()
```

## A formula

Inline $x^2$ and a figure.

```{code-cell} ipython3
:tags: [hide-input]

import os

print("threads", os.environ["OMP_NUM_THREADS"])
```
"""


@dataclass(frozen=True)
class FixtureBook:
    """A book in a folder of its own, and the two commands of the build."""

    root: Path

    @property
    def chapter(self) -> Path:
        return self.root / "book" / "chapter.md"

    @property
    def index(self) -> Path:
        return self.root / "book" / "index.md"

    @property
    def library(self) -> Path:
        return self.root / "src" / "small_library" / "__init__.py"

    def edit(self, path: Path, old: str, new: str) -> None:
        text = path.read_text("utf8")
        assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in {path.name}"
        path.write_text(text.replace(old, new), "utf8")

    def append(self, path: Path, text: str) -> None:
        path.write_text(path.read_text("utf8") + text, "utf8")

    def page(self, name: str) -> str:
        return (self.root / "_build" / "html" / "book" / f"{name}.html").read_text("utf8")

    def run(self, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", module, "--root", str(self.root), *arguments]
        environment = {**os.environ, "COLUMNS": "200", "PY_COLORS": "0"}
        return subprocess.run(
            command, cwd=REPOSITORY, env=environment, text=True, capture_output=True, timeout=240
        )

    def execute(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run("tools.execute", *arguments)

    def build(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run("tools.build", *arguments)


def write_book(root: Path) -> FixtureBook:
    """Lay the sources of the small book; nothing is executed yet."""
    config = yaml.safe_load((REPOSITORY / "_config.yml").read_text("utf8"))
    # Long enough for a loaded machine, short enough to wait for in the test of the timeout.
    config["execute"]["timeout"] = 20
    (root / "_config.yml").write_text(yaml.safe_dump(config), "utf8")
    contents = {"format": "jb-book", "root": "book/index", "chapters": [{"file": "book/chapter"}]}
    (root / "_toc.yml").write_text(yaml.safe_dump(contents), "utf8")
    for folder in ("_ext", "_static"):
        shutil.copytree(
            REPOSITORY / "book" / folder,
            root / "book" / folder,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    (root / "book" / "references.bib").write_text("", "utf8")
    (root / "book" / "index.md").write_text(INDEX, "utf8")
    (root / "book" / "chapter.md").write_text(CHAPTER, "utf8")
    library = root / "src" / "small_library"
    library.mkdir(parents=True)
    (library / "__init__.py").write_text("def answer():\n    return 'answer 41'\n", "utf8")
    return FixtureBook(root)


@pytest.fixture(scope="session")
def built_book(tmp_path_factory: pytest.TempPathFactory) -> FixtureBook:
    """The unbroken book, executed and built once; tests copy it and never change it."""
    book = write_book(tmp_path_factory.mktemp("unbroken"))
    executed = book.execute()
    assert executed.returncode == 0, executed.stdout + executed.stderr
    built = book.build()
    assert built.returncode == 0, built.stdout + built.stderr
    return book


@pytest.fixture
def book(built_book: FixtureBook, tmp_path: Path) -> FixtureBook:
    """A copy of the built book, to be broken."""
    return FixtureBook(shutil.copytree(built_book.root, tmp_path / "copy"))
