"""A book of two pages, built by the real drivers with the real configuration and extension."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jupytext
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]

INDEX = """\
# A small book

It has a {doc}`chapter <chapter>` and one equation, {eq}`def-mean`.

$$ \\mu = \\frac{1}{T} \\sum_{t=1}^{T} x_t $$ (def-mean)
"""

HEADER = """\
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

"""

CHAPTER = f"""\
{HEADER}# A chapter

## A number

The library reads it from a file of its own.

```{{code-cell}} ipython3
import small_library

small_library.answer()
```

## A formula

Inline $x^2$ and a cell whose source is folded.

```{{code-cell}} ipython3
:tags: [hide-input]

import os

print("threads:", os.environ["OMP_NUM_THREADS"])
```
"""

#: Two more chapters, so that there are more of them than workers.
CLOCK = f"""\
{HEADER}# The {{name}} clock

```{{{{code-cell}}}} ipython3
import time

start = time.time()
time.sleep(0.5)
print("ran", start, time.time())
```
"""

#: What no builder warns about, for the browser and the reader of links.
FAULTY = r"""
An undefined macro, $\undefinedmacro{x}$.

An unbalanced brace:

$$ \frac{1}{2 $$

![](_static/favicon.svg)

<img src="https://example.org/picture.png" alt="a picture from another machine">

<a href="nowhere.html">nowhere</a> and <a href="chapter.html#no-such-place">no such place</a>

<div style="width: 700px; height: 1px"></div>

<script>console.warn("something is wrong"); undefinedFunction();</script>
"""

LIBRARY = """\
from pathlib import Path


def answer():
    return "answer " + Path(__file__).with_name("answer.txt").read_text()
"""

#: What a virtual environment inside the project may hold: pages and notebooks that are not ours.
FOREIGN_PAGE = f"""\
{HEADER}# A page of a package

```{{code-cell}} ipython3
from pathlib import Path

Path(MARKER).write_text("executed")
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

    @property
    def marker(self) -> Path:
        """Written by any page of the virtual environment that is executed."""
        return self.root / "foreign-page-was-executed"

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


class Changed(NamedTuple):
    """A book whose library and first page changed, and the build that was tried too early."""

    book: FixtureBook
    refused: subprocess.CompletedProcess[str]


def write_book(root: Path) -> FixtureBook:
    """Lay the sources of the small book; nothing is executed yet."""
    config = yaml.safe_load((REPOSITORY / "_config.yml").read_text("utf8"))
    # Long enough for a loaded machine, short enough to wait for in the test of the timeout.
    config["execute"]["timeout"] = 20
    (root / "_config.yml").write_text(yaml.safe_dump(config), "utf8")
    chapters = [{"file": f"book/{name}"} for name in ("chapter", "second", "third")]
    contents = {"format": "jb-book", "root": "book/index", "chapters": chapters}
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
    for name in ("second", "third"):
        (root / "book" / f"{name}.md").write_text(CLOCK.format(name=name), "utf8")
    library = root / "src" / "small_library"
    library.mkdir(parents=True)
    (library / "__init__.py").write_text(LIBRARY, "utf8")
    (library / "answer.txt").write_text("41", "utf8")
    book = FixtureBook(root)
    write_virtual_environment(book)
    return book


def write_virtual_environment(book: FixtureBook) -> None:
    """A ``.venv`` inside the project, with a page, a notebook and a script that leave a mark."""
    packages = book.root / ".venv" / "lib" / "package"
    packages.mkdir(parents=True)
    page = FOREIGN_PAGE.replace("MARKER", repr(str(book.marker)))
    (packages / "foreign.md").write_text(page, "utf8")
    jupytext.write(jupytext.reads(page, "md:myst"), packages / "foreign.ipynb")
    jupytext.write(jupytext.reads(page, "md:myst"), packages / "foreign.py", fmt="py:percent")
