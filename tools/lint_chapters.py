"""Lint the code cells of the chapters, and check that a chapter survives the trip to a notebook.

``ruff`` reads no Markdown (it says all is well whatever is in it), so the chapters are converted to
notebooks under ``build/lint`` first; a finding then names the cell and the line. Their format is
held to ``ruff format``; to apply it: ``jupytext --pipe 'ruff format -' CHAPTER.md``.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import jupytext

from tools.sources import Book


def lint(book: Book) -> int:
    """Return 0 if every chapter is clean; findings go to the terminal."""
    folder = book.root / "build" / "lint"
    shutil.rmtree(folder, ignore_errors=True)
    notebooks = []
    for page in book.chapters:
        target = folder / f"{page}.ipynb"
        target.parent.mkdir(parents=True, exist_ok=True)
        jupytext.write(jupytext.read(book.source(page)), target)
        notebooks.append(str(target))
    if not notebooks:
        print("no chapter to lint")
        return 0
    settings = f"--config={book.root / 'pyproject.toml'}"
    tools = Path(sys.executable).parent
    sources = [str(book.source(page)) for page in book.chapters]
    commands = [
        [str(tools / "ruff"), "check", settings, *notebooks],
        [str(tools / "ruff"), "format", "--check", settings, *notebooks],
        [str(tools / "jupytext"), "--test", "--to", "ipynb", "--quiet", *sources],
    ]
    return max(subprocess.run(command, cwd=book.root).returncode for command in commands)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="folder with _config.yml")
    return lint(Book(parser.parse_args().root.resolve()))


if __name__ == "__main__":
    sys.exit(main())
