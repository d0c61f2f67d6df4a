"""C++ sources of the package, compiled on demand: once for a source, compiler and instruction set.

A library is built beside its final name and moved there, so a killed or a second process never
leaves, or loads, half a file. Nothing here needs Python headers: the sources have a C interface.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

log = logging.getLogger("attention_dynamics")

#: Flags of each instruction set that torch recognises at run time; others get the portable build.
INSTRUCTION_SETS = {
    "AVX512": ("-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mfma", "-mavx2"),
    "AVX2": ("-mavx2", "-mfma"),
}
# -ffast-math would delete the rounding tricks of exp; contraction and no errno are all it needs.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-shared",
    "-fPIC",
    "-pthread",
    "-ffp-contract=fast",
    "-fno-math-errno",
)


class Unavailable(RuntimeError):
    """Why no compiled library can be had here: one line, for the log and for the reader."""


def compiler() -> str | None:
    """The C++ compiler: ``CXX`` if set, else c++, g++ or clang++ on the path; None without one."""
    return _search(os.environ.get("CXX"), os.environ.get("PATH"))


@cache
def _search(chosen: str | None, path: str | None) -> str | None:
    """The same for these values of CXX and PATH: an engine that refuses is asked at every call."""
    names = (chosen,) if chosen else ("c++", "g++", "clang++")
    return next(filter(None, (shutil.which(name, path=path) for name in names)), None)


def cache_directory() -> Path:
    """``ATTENTION_DYNAMICS_CACHE``, or attention_dynamics in the user's cache directory."""
    given = os.environ.get("ATTENTION_DYNAMICS_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attention_dynamics"


def instruction_set() -> str:
    """The instruction set to build for: that of the processor, as torch names it."""
    return str(torch.backends.cpu.get_cpu_capability())


def library(source: str, folder: Path | None = None) -> ctypes.CDLL:
    """Load the library of ``source`` (beside this module, or in ``folder``), building it if needed.

    Raises Unavailable without a compiler, on a failed build, or where the cache can't be written
    or is not safe to load from. It is tried once a process and compiler.
    """
    path = (folder or Path(__file__).parent) / source
    found = compiler()
    if found is None:
        raise Unavailable("no C++ compiler was found (c++, g++ or clang++, or CXX)")
    outcome = _attempt(path, found, instruction_set())
    if isinstance(outcome, str):
        raise Unavailable(outcome)
    return outcome


@cache
def _attempt(path: Path, found: str, capability: str) -> ctypes.CDLL | str:
    """Return the library or the reason why there is none: a failed build is not repeated."""
    extra = INSTRUCTION_SETS.get(capability, ())
    key = hashlib.sha256()
    try:
        # A source may include any header beside it.
        for text in (path, *sorted(path.parent.glob("*.h"))):
            key.update(text.read_bytes())
        for part in (found.encode(), _version(found), platform.machine().encode()):
            key.update(part)
        key.update(" ".join((*FLAGS, *extra)).encode())
        name = f"{path.stem}-{capability.lower()}-{key.hexdigest()[:16]}.so"
        target = cache_directory() / name
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if target.parent.stat().st_mode & stat.S_IWOTH:
            return f"others can write to {target.parent}, so nothing is loaded from there"
        if not target.exists():
            _build(found, path, extra, target)
        return ctypes.CDLL(str(target))
    except Unavailable as reason:
        return str(reason)
    except OSError as error:
        return f"the library of {path.name} can't be kept or loaded: {error}"


def _version(found: str) -> bytes:
    return subprocess.run([found, "--version"], capture_output=True, check=False).stdout


def _build(found: str, path: Path, extra: tuple[str, ...], target: Path) -> None:
    log.info("building %s for this processor, once", target.name)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder) / target.name
        for openmp in (("-fopenmp",), ()):  # clang without libomp: the same kernel, one thread
            command = [found, *FLAGS, *extra, *openmp, str(path), "-o", str(built)]
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            if run.returncode == 0:
                os.replace(built, target)
                return
    reason = next(iter(run.stderr.splitlines()), f"exit status {run.returncode}")
    raise Unavailable(f"{found} can't build {path.name}: {reason}")
