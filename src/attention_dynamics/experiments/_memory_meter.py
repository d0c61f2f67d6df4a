r"""Two meters of the memory a computation takes beyond its inputs: counted bytes, and pages.

:func:`peak_bytes` follows every tensor that the computation makes and adds up those that live at
one time: the same number for the same code on every machine. What one operator, or a compiled
kernel, takes and gives back within itself is not seen. :func:`resident_bytes` asks the system how
many pages came to be used: it sees everything, and differs from run to run by a few hundred
kilobytes.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

R = TypeVar("R")
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_bytes(compute: Callable[[], R], device: str = "cpu") -> tuple[int, R]:
    r"""
    .. math:: \max_{\text{time}} \sum_{\text{storages made by compute and alive}} \text{bytes},

    and the result of ``compute()``, whose own bytes are among those that count.

    On a CPU the storages are counted; on CUDA the number is that of torch's allocator, after one
    run that builds kernels and work spaces. A thread of its own keeps buffers of earlier calls
    out of it, and no cyclic garbage is collected meanwhile, so that the count repeats.
    """
    if torch.device(device).type == "cuda":
        return _allocated(compute, torch.device(device))
    return in_fresh_thread(lambda: _counted(compute))


def resident_bytes(prepare: Callable[..., Callable[[], object]], *arguments: Any) -> int:
    r"""
    .. math:: \max_{\text{time}} \mathrm{RSS} - \mathrm{RSS}_{\text{before}}

    of ``compute()``, which the module-level function ``prepare`` returns, in a process of its own:
    in this one, memory that was freed before would be used again unseen. ``prepare(*arguments)``
    should build the inputs and compute once on small ones, so that libraries are in memory. One
    thread; Linux only, where the peak of a process can be forgotten and read again. Raises
    RuntimeError with what went wrong in the process.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, prepare.__module__])
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(send, prepare, arguments))
    process.start()
    send.close()
    try:
        answer = receive.recv()
    except EOFError:
        answer = "the process ended without an answer; was there memory enough?"
    process.join()
    if isinstance(answer, str):
        raise RuntimeError(answer)
    return int(answer)


class LiveBytes(TorchDispatchMode):
    """Follows the storages that are made while it is active; ``current`` and ``peak`` in bytes.

    A storage that an operator is given, and that was not made here, is an input and never counts;
    neither does a view, which shares the storage of another tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current = self.peak = 0
        self._own: dict[int, weakref.ref] = {}
        self._inputs: dict[int, Any] = {}  # kept alive, so that no new storage takes their place

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator; note what it was given, then what it made."""
        kwargs = kwargs or {}
        own, inputs = self._own, self._inputs
        for storage in _storages((*args, *kwargs.values())):
            if storage._cdata not in own:
                inputs[storage._cdata] = storage
        result = func(*args, **kwargs)
        for storage in _storages((result,)):
            if storage._cdata not in own and storage._cdata not in inputs:
                self._add(storage)
        return result

    def _add(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()

        def forget(_: object) -> None:
            del self._own[key]
            self.current -= size

        self._own[key] = weakref.ref(storage, forget)
        self.current += size
        self.peak = max(self.peak, self.current)


def _storages(values: Iterable[Any]) -> list[Any]:
    """The storages of the tensors among the values, and in lists of them."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value.untyped_storage())
        elif isinstance(value, list | tuple):
            found += _storages(value)
    return found


def _counted(compute: Callable[[], R]) -> tuple[int, R]:
    collecting = gc.isenabled()
    gc.disable()
    try:
        with LiveBytes() as live:
            result = compute()
    finally:
        if collecting:
            gc.enable()
    return live.peak, result


def _allocated(compute: Callable[[], R], device: torch.device) -> tuple[int, R]:
    compute()
    torch.cuda.synchronize(device)
    gc.collect()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = compute()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before, result


def _measure(
    send: Any, prepare: Callable[..., Callable[[], object]], arguments: tuple[Any, ...]
) -> None:
    try:
        torch.set_num_threads(1)
        send.send(_resident(prepare(*arguments)))
    except Exception as error:
        send.send(f"{type(error).__name__}: {error}")
    send.close()


def _resident(compute: Callable[[], object]) -> int:
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc: what was freed goes back
    if trim is not None:
        trim(0)
    try:
        _RESET.write_text("5")
    except OSError as error:
        raise RuntimeError(
            f"the peak of the resident memory cannot be measured here ({error}); this needs Linux "
            f"and the right to write {_RESET}: use peak_bytes"
        ) from None
    before = _status("VmRSS")
    kept = compute()
    peak = _status("VmHWM")
    del kept
    return peak - before


def _status(field: str) -> int:
    for line in _STATUS.read_text("utf8").splitlines():
        if line.startswith(field):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"{_STATUS} has no {field}")


def in_fresh_thread(function: Callable[[], R]) -> R:
    """Call ``function`` where no thread-local work space exists yet, and let its own go after."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(function).result()
