r"""Real processes that sweep a toy, started in milliseconds: forks of one that has loaded pandas.

Lines of JSON on the input: {"sweep": {...}} forks a process and answers its number, {"wait": n}
answers its exit status, negative for a signal.
"""

from __future__ import annotations

import builtins
import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "running"))
import toy_experiment as toy

from attention_dynamics.running import manifest, sweep

WRITING = ("fsync", "link", "replace", "unlink")


def die_at(count: int) -> None:
    """Kill this process where it is about to touch the disk for the count-th time."""
    left = [count]

    def dying(function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    for name in WRITING:
        setattr(os, name, dying(getattr(os, name)))
    opened = builtins.open

    def halved(path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        stream = opened(path, mode, *arguments, **options)
        left[0] -= 1
        if left[0] == 0:
            stream.write(b"half a fi")
            stream.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return stream

    from attention_dynamics.running import files

    files.open = halved  # type: ignore[attr-defined]


def run(
    directory: str,
    sizes: int = 12,
    seeds: int = 5,
    delay: float = 0.0,
    die: int = 0,
    noisy: bool = False,
    log: str = "",
    yields: str = "",
) -> None:
    """Sweep ``sizes`` x ``seeds`` cells; ``noisy`` numbers differ from process to process.

    With ``yields`` another process finishes the "first" or the "last" of the cells before this one.
    """
    total = sizes * seeds
    cells = Path(directory) / "cells"
    awaited = {"first": iter([1]), "last": iter([0] * (total - 1) + [total])}.get(yields, iter(()))

    def compute(config: toy.Config, seed: int, device: str = "cpu") -> Any:
        rows = toy.run(config, seed, device)
        finished, deadline = next(awaited, 0), time.monotonic() + 20
        while len(list(cells.glob("*.parquet"))) < finished:
            if time.monotonic() > deadline:
                raise TimeoutError("the other process finished no cell")
            time.sleep(0.001)
        if noisy:
            rows["value"] += 1e-9 * os.getpid()
        if log:
            with open(log, "a") as stream:
                stream.write(f"{config.size} {seed}\n")
        return rows

    names = ("NAME", "SCHEMA", "COLUMNS", "PROFILES", "summarise")
    experiment = SimpleNamespace(run=compute, **{name: getattr(toy, name) for name in names})
    configs = [toy.Config(2 + size, delay=delay) for size in range(sizes)]
    if die:
        die_at(die)
    frame = sweep(experiment, configs=configs, seeds=range(seeds), directory=directory)
    if noisy:
        (Path(directory) / f"returned.{os.getpid()}").write_text(frame.to_json(double_precision=15))


def child(request: dict[str, Any]) -> int:
    """What a forked process does: its exit status."""
    try:
        run(**request)
    except KeyboardInterrupt:
        return 130
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def main() -> None:
    """Answer requests until the input ends."""
    warnings.simplefilter("error")  # nothing is ever found damaged
    manifest._commit()  # asking git takes longer than a cell
    for line in sys.stdin:
        request = json.loads(line)
        if "sweep" in request:
            answer = os.fork()
            if answer == 0:
                os._exit(child(request["sweep"]))
        else:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
        print(answer, flush=True)


if __name__ == "__main__":
    main()
