r"""The groups of comparisons, in the order of the table, and how a process for one is started."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from attention_dynamics.running.manifest import cell_facts
from benchmarks.table import Case, Point, Row, Settings, as_text, run_case

#: Lets the allocator keep what it has instead of returning it to the system after every step.
TUNED_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "MALLOC_TOP_PAD_": "268435456",
}


@dataclass(frozen=True)
class Group:
    """A module ``benchmarks.<name>`` with ``cases(settings)``, and the processes it runs in.

    Each entry of ``mallocs`` is a process of its own: the allocator reads its settings at the
    start. ``threads`` are those of the pool of OpenMP; a row says how many it uses.
    """

    name: str
    mallocs: tuple[str, ...] = ("default",)
    threads: int | None = None

    def cases(self, settings: Settings) -> list[Case]:
        """The cases of the module."""
        return list(importlib.import_module(f"benchmarks.{self.name}").cases(settings))


GROUPS = {
    group.name: group
    for group in (
        Group("machine", threads=2),
        Group("training_step", mallocs=("default", "tuned")),
        Group("threads", threads=2),
        Group("tangent_kernel"),
        Group("teacher"),
        Group("linearisation"),
        Group("recurrence", mallocs=("default", "tuned")),
        Group("regression_step", mallocs=("default", "tuned")),
        Group("memory"),
        Group("peers"),
        Group("limit_kernel"),
        Group("growth"),
        Group("reproduction"),
        Group("gpu"),
    )
}


def run(
    names: Sequence[str], *, quick: bool, threads: int
) -> Iterator[Row | Point | dict[str, Any]]:
    """What the groups measured, and facts about each: one process a group and malloc.

    A process that dies leaves a row that says so. Small sizes share one process.
    """
    if quick:
        starts = [(",".join(names), "default", threads)]
    else:
        starts = [
            (name, malloc, GROUPS[name].threads or threads)
            for name in names
            for malloc in GROUPS[name].mallocs
        ]
    for name, malloc, pool in starts:
        with tempfile.TemporaryDirectory() as folder:
            lines = Path(folder) / "lines"
            command = [sys.executable, "-m", "benchmarks.groups", name, malloc, str(pool)]
            done = subprocess.run(
                [*command, str(lines), *(["--quick"] if quick else [])],
                env=environment(malloc, pool),
                check=False,
            )
            yield from read(lines)
            if done.returncode:
                error = f"its process ended with status {done.returncode}"
                yield Row(name, name, "", "", "", malloc=malloc, error=error)


def environment(malloc: str, threads: int) -> dict[str, str]:
    """The environment of a process: threads, and the allocator's settings where it is tuned."""
    clean = {name: value for name, value in os.environ.items() if name not in TUNED_MALLOC}
    root = Path(__file__).resolve().parents[1]
    paths = [str(root), str(root / "src"), *filter(None, [clean.get("PYTHONPATH")])]
    return {
        **clean,
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join(paths),
        **(TUNED_MALLOC if malloc == "tuned" else {}),
    }


def write(lines: Path, entry: Row | Point | dict[str, Any]) -> None:
    """Append one entry, so that a process that dies later loses nothing."""
    values = entry if isinstance(entry, dict) else vars(entry)
    with lines.open("a", encoding="utf8") as file:
        file.write(json.dumps([type(entry).__name__, values]) + "\n")


def read(lines: Path) -> Iterator[Row | Point | dict[str, Any]]:
    """The entries of a finished or dead process."""
    kinds: dict[str, Any] = {"Row": Row, "Point": Point, "dict": dict}
    for line in lines.read_text("utf8").splitlines() if lines.exists() else ():
        kind, values = json.loads(line)
        yield kinds[kind](**values)


def measure(name: str, settings: Settings, lines: Path) -> None:
    """Measure one group in this process and write down what comes."""
    print(f"\n{name.replace('_', ' ')} (malloc {settings.malloc})", flush=True)
    start = time.perf_counter()
    for case in GROUPS[name].cases(settings):
        for entry in run_case(name, case):
            write(lines, entry)
            if isinstance(entry, Row):
                print(as_text(entry), flush=True)
    seconds = time.perf_counter() - start
    facts = {
        "group": name,
        "malloc": settings.malloc,
        "commit": cell_facts("cpu", seconds)["commit"],
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "load": round(os.getloadavg()[0], 2),
    }
    write(lines, facts)


def main(arguments: list[str]) -> None:
    """Run groups in this process: names, malloc, threads, file for the entries, [--quick]."""
    names, malloc, threads, lines, *rest = arguments
    settings = Settings("--quick" in rest, malloc, int(threads))
    for name in names.split(","):
        measure(name, settings, Path(lines))


if __name__ == "__main__":
    main(sys.argv[1:])
