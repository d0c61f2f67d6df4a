"""The pages of a book, and the key that says whether a chapter's outputs are still its own."""

import hashlib
import json
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import yaml

#: Files whose text decides which packages a chapter was executed with.
PINS = ("requirements.txt", "constraints.txt", "pyproject.toml")


class BookError(Exception):
    """The build must stop; the message says why and what to do."""


def digest(root: Path, paths: Iterable[Path]) -> str:
    """SHA-256 over names (relative to ``root``) and contents, in a fixed order."""
    total = hashlib.sha256()
    for path in sorted(paths):
        total.update(path.relative_to(root).as_posix().encode() + b"\0")
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def files_under(folder: Path) -> list[Path]:
    """Every file below ``folder`` that a person wrote: no bytecode, nothing hidden."""

    def written(path: Path) -> bool:
        parts = path.relative_to(folder).parts
        return path.is_file() and not any(
            part.startswith(".") or part == "__pycache__" or part.endswith(".egg-info")
            for part in parts
        )

    return [path for path in folder.rglob("*") if written(path)] if folder.is_dir() else []


@dataclass(frozen=True)
class Book:
    """A book by its root folder: the one that holds ``_config.yml`` and ``_toc.yml``."""

    root: Path

    @cached_property
    def config(self) -> dict:
        return yaml.safe_load((self.root / "_config.yml").read_text("utf8"))

    @property
    def cell_timeout(self) -> int:
        """Seconds one cell may take; one number for execution and pages alike."""
        return int(self.config["execute"]["timeout"])

    @property
    def record(self) -> Path:
        """What was executed: by chapter, its key, the digest of its outputs and its seconds."""
        return self.root / "build" / "executed.json"

    @property
    def html(self) -> Path:
        return self.root / "_build" / "html"

    @property
    def cache(self) -> Path:
        return self.root / "_build" / ".jupyter_cache"

    @cached_property
    def pages(self) -> tuple[str, ...]:
        """Names of all pages in reading order, as in ``_toc.yml``."""
        found: list[str] = []

        def walk(entry: dict) -> None:
            if "root" in entry:
                found.append(entry["root"])
            if "file" in entry:
                found.append(entry["file"])
            for group in ("parts", "chapters", "sections"):
                for child in entry.get(group) or ():
                    walk(child)

        walk(yaml.safe_load((self.root / "_toc.yml").read_text("utf8")))
        return tuple(found)

    @cached_property
    def chapters(self) -> tuple[str, ...]:
        """The pages that carry code, told by the kernel in their front matter."""
        return tuple(page for page in self.pages if is_notebook(self.source(page)))

    def source(self, page: str) -> Path:
        return self.root / f"{page}.md"

    def notebook(self, page: str) -> Path:
        """Where the executed notebook of a chapter lies."""
        return self.root / "build" / "nb" / f"{page}.ipynb"

    def check_contents(self) -> None:
        """Every page of ``_toc.yml`` exists, and every page of ``book/`` is in ``_toc.yml``."""
        missing = [page for page in self.pages if not self.source(page).is_file()]
        if missing:
            raise BookError(f"_toc.yml names pages that do not exist: {', '.join(missing)}")
        written = {
            path.relative_to(self.root).with_suffix("").as_posix()
            for path in files_under(self.root / "book")
            if path.suffix == ".md"
        }
        forgotten = sorted(written - set(self.pages))
        if forgotten:
            raise BookError(f"pages missing from _toc.yml: {', '.join(forgotten)}")

    @cached_property
    def shared_key(self) -> dict[str, str]:
        """The part of the key that all chapters share: library, pins, stored results, Python."""
        results = [path for path in files_under(self.root / "results") if "cells" not in path.parts]
        return {
            "library (src/)": digest(self.root, files_under(self.root / "src")),
            "stored results (results/)": digest(self.root, results),
            "pinned packages": digest(
                self.root, (path for name in PINS if (path := self.root / name).is_file())
            ),
            "Python version": platform.python_version(),
        }

    def key(self, page: str) -> dict[str, str]:
        """What the outputs of a chapter depend on; any difference makes them stale."""
        return {"chapter text": digest(self.root, [self.source(page)]), **self.shared_key}

    def executed(self) -> dict[str, dict]:
        return json.loads(self.record.read_text("utf8")) if self.record.is_file() else {}

    def staleness(self, page: str, executed: dict[str, dict]) -> str | None:
        """Why the outputs of a chapter may not be used, or None where they may."""
        entry = executed.get(page)
        notebook = self.notebook(page)
        if entry is None or not notebook.is_file():
            return "never executed"
        if digest(self.root, [notebook]) != entry["outputs"]:
            return "its executed notebook was changed by hand"
        changed = [
            name for name, value in self.key(page).items() if entry["key"].get(name) != value
        ]
        return f"{', '.join(changed)} changed since it was executed" if changed else None


def is_notebook(source: Path) -> bool:
    """Whether a Markdown page opens with a front matter that names a kernel."""
    if not source.is_file():
        return False
    lines = source.read_text("utf8").split("\n")
    if lines[0].strip() != "---":
        return False
    header = []
    for line in lines[1:]:
        if line.strip() == "---":
            return "kernelspec" in (yaml.safe_load("\n".join(header)) or {})
        header.append(line)
    return False
