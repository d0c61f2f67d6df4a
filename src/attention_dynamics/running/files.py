r"""Files that are whole or absent, whatever happens to the process that writes them.

A file is written beside its place under a name of its own, flushed to the disk, given its name in
one step, and the directory is flushed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows has no such locks, and sweeps there share none
    fcntl = None  # type: ignore[assignment]

_STALE_SECONDS = 3600.0


def write_atomically(path: Path, content: bytes) -> None:
    """Put ``content`` at ``path``, in place of what is there."""
    with _written_beside(path, content) as part:
        os.replace(part, path)
    flush_directory(path.parent)


def create_atomically(path: Path, content: bytes) -> bool:
    """Put ``content`` at ``path`` unless a file is there; whether it was put there.

    Of several processes that create one path, exactly one is told True.
    """
    with _written_beside(path, content) as part:
        try:
            os.link(part, path)
        except FileExistsError:
            return False
        except OSError:  # a file system without hard links
            os.replace(part, path)
    flush_directory(path.parent)
    return True


@contextlib.contextmanager
def exclusively(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory, which the system takes back when its holder dies."""
    directory.mkdir(parents=True, exist_ok=True)
    if fcntl is None:  # pragma: no cover
        yield
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def remove_stale(directory: Path, pattern: str) -> None:
    """Remove what killed writers left behind; young files may still be being written."""
    for leftover in directory.glob(pattern):
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            if time.time() - leftover.stat().st_mtime > _STALE_SECONDS:
                leftover.unlink()


def flush_directory(directory: Path) -> None:
    """Make the names in a directory outlast a loss of power."""
    if os.name == "posix":
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextlib.contextmanager
def _written_beside(path: Path, content: bytes) -> Iterator[Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.parent / f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.part"
    try:
        with open(part, "xb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        yield part
    finally:
        part.unlink(missing_ok=True)
