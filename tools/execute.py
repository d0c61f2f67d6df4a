"""Execute the chapters whose sources changed, in parallel, each once.

A chapter is converted to ``build/nb/<page>.ipynb`` and run there by nbmake, with the library on the
path. What passed is noted in ``build/executed.json`` under the key of its sources; a chapter that
fails or runs out of time ends the command with status 1 and its traceback.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tools.sources import Book, BookError, digest

#: Above this a chapter is marked in the table: nobody waits a minute for a page.
LONG_SECONDS = 60.0

#: What a chapter may say of itself and of its cells. Everything else, such as ``raises-exception``,
#: ``skip-execution``, ``remove-output`` or ``allow_errors``, could let a check fail or vanish
#: while the page looks as if it had passed.
NOTEBOOK_KEYS = {"kernelspec", "jupytext"}
CELL_KEYS = {"tags", "mystnb"}
CELL_TAGS = {"hide-input"}
CELL_SETTINGS = {"image", "figure"}
#: Records come from checks alone.
FORGED = re.compile(r"\bCheckRecord\b|\bMIME_TYPE\b|vnd\.attention-dynamics")


def kernel_environment(root: Path) -> dict[str, str]:
    """One thread a kernel, the book's own library and kernel, the same hashes in every run."""
    environment = dict(os.environ)
    environment.pop("JUPYTER_PATH", None)
    environment.update(
        OMP_NUM_THREADS="1",
        PYTHONHASHSEED="0",
        PYTHONPATH=str(root / "src"),
        JUPYTER_PREFER_ENV_PATH="1",
    )
    return environment


def write_notebook(book: Book, page: str) -> Path:
    """Convert a chapter to an unexecuted notebook; the folder mirrors the book's.

    Raises BookError naming every tag or setting that a chapter may not have.
    """
    import jupytext  # here, so that a run with nothing to do stays instant

    notebook = jupytext.read(book.source(page))
    if found := unwanted_settings(notebook):
        raise BookError(
            f"{page}: {', '.join(found)} could hide a failure; cells may have only the "
            f"tags {sorted(CELL_TAGS)} and the mystnb settings {sorted(CELL_SETTINGS)}"
        )
    target = book.notebook(page)
    target.parent.mkdir(parents=True, exist_ok=True)
    jupytext.write(notebook, target)
    return target


def unwanted_settings(notebook: Mapping[str, Any]) -> list[str]:
    """Tags and settings outside the lists above, each once, in the order of the text."""
    found = [key for key in notebook["metadata"] if key not in NOTEBOOK_KEYS]
    for cell in notebook["cells"]:
        settings = cell["metadata"]
        found += ["a record made by hand"] if FORGED.search(cell["source"]) else []
        found += [key for key in settings if key not in CELL_KEYS]
        found += [f"tag {tag}" for tag in settings.get("tags", []) if tag not in CELL_TAGS]
        found += [f"mystnb {k}" for k in settings.get("mystnb", {}) if k not in CELL_SETTINGS]
    return list(dict.fromkeys(found))


def remove_orphans(book: Book) -> None:
    """Drop executed notebooks whose chapter has left the book."""
    kept = {book.notebook(page) for page in book.chapters}
    for path in (book.root / "build" / "nb").rglob("*.ipynb"):
        if path not in kept:
            path.unlink()


def run_notebooks(book: Book, pages: list[str], workers: int) -> dict[str, float]:
    """Run the notebooks; return the seconds of those that passed."""
    folder = book.root / "build" / "nb"
    settings, report = folder / "pytest.ini", folder / "report.xml"
    notebooks = [str(write_notebook(book, page)) for page in pages]
    # A file of its own: the settings of the library's tests are not those of the chapters.
    settings.write_text("[pytest]\njunit_family = xunit1\n", "utf8")
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-c", str(settings), "-p", "no:cacheprovider", "-q"]
    command += ["--nbmake", "--overwrite", f"--nbmake-timeout={book.cell_timeout}"]
    command += [f"--junitxml={report}"]
    if min(workers, len(pages)) > 1:
        command += ["-n", str(min(workers, len(pages)))]
    subprocess.run(
        [*command, *notebooks], cwd=folder, env=kernel_environment(book.root), check=False
    )
    if not report.is_file():
        raise BookError("the chapters could not be executed: pytest stopped before running them")
    passed = {}
    for case in ElementTree.parse(report).iter("testcase"):
        if not any(case.find(mark) is not None for mark in ("failure", "error", "skipped")):
            page = case.attrib["file"].removesuffix(".ipynb")
            passed[page] = float(case.attrib["time"])
    return passed


def execute(book: Book, workers: int = 2, force: bool = False) -> list[str]:
    """Execute what is stale; return the pages executed now. Raises BookError if one fails."""
    book.check_contents()
    executed = {page: entry for page, entry in book.executed().items() if page in book.chapters}
    stale = [page for page in book.chapters if force or book.staleness(page, executed)]
    remove_orphans(book)
    if stale:
        # Keys are taken before the run: a source edited meanwhile leaves its chapter stale.
        keys = {page: book.key(page) for page in stale}
        seconds = run_notebooks(book, stale, workers)
        for page in stale:
            executed.pop(page, None)
            if page in seconds:
                outputs = digest(book.root, [book.notebook(page)])
                executed[page] = {"key": keys[page], "outputs": outputs, "seconds": seconds[page]}
    book.record.parent.mkdir(parents=True, exist_ok=True)
    book.record.write_text(json.dumps(executed, indent=2, sort_keys=True) + "\n", "utf8")
    print(table(book, executed, stale))
    failed = [page for page in stale if page not in executed]
    if failed:
        raise BookError(f"chapters that failed: {', '.join(failed)}")
    return stale


def table(book: Book, executed: dict[str, dict], now: list[str]) -> str:
    """One line a chapter: seconds of its execution, and whether it ran now."""
    width = max((len(page) for page in book.chapters), default=0)
    lines = []
    for page in book.chapters:
        if page not in executed:
            lines.append(f"{page:<{width}}   failed")
            continue
        seconds = executed[page]["seconds"]
        state = "executed" if page in now else "unchanged, outputs kept"
        mark = f"  (over {LONG_SECONDS:.0f} s: shorten it)" if seconds > LONG_SECONDS else ""
        lines.append(f"{page:<{width}}  {seconds:6.1f} s  {state}{mark}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="folder with _config.yml")
    parser.add_argument("--workers", type=int, default=2, help="kernels at a time")
    parser.add_argument("--force", action="store_true", help="execute every chapter again")
    arguments = parser.parse_args()
    try:
        execute(Book(arguments.root.resolve()), arguments.workers, arguments.force)
    except BookError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
