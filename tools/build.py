"""Turn the executed notebooks into pages; refuse outputs that are not those of today's sources.

The builder's own cache ignores the library, so a change in ``src/`` would leave old numbers on the
pages. Here the keys of ``tools.sources`` decide, and the cache is filled anew from the executed
notebooks, so that the pages show exactly the outputs that were tested.
"""

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tools.execute import kernel_environment
from tools.sources import PINS, Book, BookError, digest, files_under

#: Lines of the builder worth repeating; its own closing traceback ends in a bare "RuntimeError: ".
COMPLAINT = re.compile(r"\b(?:WARNING|ERROR|CRITICAL|SEVERE)\b|^\w*(?:Error|Exception): *\S")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def check_fresh(book: Book) -> None:
    """Raise BookError naming every chapter whose outputs are not those of the current sources."""
    executed = book.executed()
    stale = [
        f"{page} ({reason})"
        for page in book.chapters
        if (reason := book.staleness(page, executed)) is not None
    ]
    if stale:
        raise BookError(
            "stale outputs: " + "; ".join(stale) + ". Execute first: python -m tools.execute"
        )


def fill_cache(book: Book):
    """Load the executed notebooks into a fresh cache, where the builder looks for outputs."""
    # Imported here, so that a run with nothing to do stays instant.
    import nbformat
    from jupyter_cache import get_cache
    from jupyter_cache.base import CacheBundleIn

    shutil.rmtree(book.cache, ignore_errors=True)
    cache = get_cache(book.cache)
    for page in book.chapters:
        notebook = nbformat.read(book.notebook(page), as_version=4)
        for cell in notebook.cells:
            # Timestamps would enter the hash under which the builder looks the notebook up.
            cell.metadata.pop("execution", None)
        bundle = CacheBundleIn(notebook, str(book.source(page)))
        cache.cache_notebook_bundle(bundle, check_validity=True, overwrite=True)
    return cache


def pages_key(book: Book) -> str:
    """Digest of everything the pages are made from."""
    names = ("_config.yml", "_toc.yml", *PINS)
    paths = [path for name in names if (path := book.root / name).is_file()]
    for folder in ("book", "src", "tools", "results"):
        paths += files_under(book.root / folder)
    return digest(book.root, [*paths, *([book.record] if book.record.is_file() else [])])


def run_builder(command: list[str], environment: dict[str, str]) -> tuple[int, list[str]]:
    """Run the builder, pass its messages on, and return its status and what it complained of.

    The complaints are repeated at the end, where a reader looks: a long traceback of the builder
    itself follows them otherwise.
    """
    complaints = []
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            print(line, end="", file=sys.stderr, flush=True)
            if COMPLAINT.search(line):
                complaints.append(COLOUR.sub("", line).strip())
    return process.returncode, complaints


def build(book: Book, force: bool = False) -> bool:
    """Build the pages unless they are up to date; return whether they were built."""
    book.check_contents()
    check_fresh(book)
    key = pages_key(book)
    stamp = book.root / "build" / "pages.sha256"
    if not force and book.html.is_dir() and stamp.is_file() and stamp.read_text("utf8") == key:
        return False
    stamp.unlink(missing_ok=True)
    # No page of an earlier build may survive: neither a renamed one nor one of a build that failed.
    shutil.rmtree(book.html, ignore_errors=True)
    cache = fill_cache(book)
    loaded = len(cache.list_cache_records())
    command = [str(Path(sys.executable).parent / "jupyter-book"), "build", str(book.root)]
    command += ["-W", "-n", "--keep-going", "--all", "--quiet"]
    status, complaints = run_builder(command, kernel_environment(book.root))
    if status != 0:
        shutil.rmtree(book.html, ignore_errors=True)
        raise BookError(
            "\n  ".join(["the pages were not built; every warning counts:", *complaints])
        )
    if len(cache.list_cache_records()) != loaded:
        shutil.rmtree(book.html, ignore_errors=True)
        raise BookError("the pages step executed a chapter again: its outputs were not found")
    stamp.write_text(key, "utf8")
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="folder with _config.yml")
    parser.add_argument("--force", action="store_true", help="build even if nothing changed")
    arguments = parser.parse_args()
    book = Book(arguments.root.resolve())
    try:
        built = build(book, arguments.force)
    except BookError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{'pages built' if built else 'pages up to date'}: {book.html / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
