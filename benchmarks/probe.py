r"""Peak memory of a computation, in a process of its own that has done nothing else.

The peak is what the computation adds to the memory of a process in which its inputs exist and a
small instance of it ran before, so that libraries and kernels do not count.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_megabytes(prepare: Callable[..., Callable[[], object]], *arguments: Any) -> float:
    """The peak of ``prepare(*arguments)()`` above what was there before that last call, in MB.

    ``prepare`` is a module-level function that builds the inputs, warms up on small ones and
    returns the computation. Raises RuntimeError when the process dies, for want of memory say.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([prepare.__module__])
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(send, prepare, arguments))
    process.start()
    send.close()
    try:
        result = receive.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"the process ended with status {process.exitcode}") from None
    process.join()
    if isinstance(result, str):
        raise RuntimeError(result)
    return float(result)


def give_back() -> None:
    """Return freed memory to the system, so that no computation can hide in what is left of it."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc; others have none
    if trim is not None:
        trim(0)


def memory_now() -> float:
    """The resident memory of this process in MB, after its peak was forgotten where that works."""
    if not _STATUS.exists():
        return _largest()
    try:
        _RESET.write_text("5")
    except OSError:
        return _largest()
    return _status("VmRSS")


def memory_peak() -> float:
    """The largest resident memory in MB since :func:`memory_now`."""
    return _status("VmHWM") if _STATUS.exists() else _largest()


def _measure(send: Any, prepare: Callable[..., Callable[[], object]], arguments: Any) -> None:
    try:
        import torch

        torch.set_num_threads(1)
        compute = prepare(*arguments)
        give_back()
        before = memory_now()
        kept = compute()
        send.send(memory_peak() - before)
        del kept
    except Exception as failure:
        send.send(f"{type(failure).__name__}: {failure}")
    send.close()


def _status(field: str) -> float:
    for line in _STATUS.read_text("utf8").splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"{_STATUS} has no {field}")


def _largest() -> float:
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
