r"""``python -m benchmarks``: measure, print the table, and keep it in ``results/benchmarks/``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.groups import GROUPS, run
from benchmarks.results import store
from benchmarks.table import Point, Row, as_text

ROOT = Path(__file__).resolve().parents[1]


def main(arguments: list[str] | None = None) -> int:
    """Run the groups one after the other; returns 1 if a row failed, 0 if not.

    A target that is missed is a result and no failure; a row without a result is a failure.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.strip())
    parser.add_argument("--only", nargs="+", choices=list(GROUPS), help="measure these groups")
    parser.add_argument("--quick", action="store_true", help="small sizes, under a minute")
    parser.add_argument("--threads", type=int, default=1, help="threads of a row, 1 unless it says")
    parser.add_argument("--output", type=Path, help="folder of the results")
    options = parser.parse_args(arguments)
    default = ROOT / ("build/benchmarks" if options.quick else "results/benchmarks")
    folder = options.output or default

    load = os.getloadavg()[0]
    if load > 0.5 and not options.quick:
        print(f"This machine is busy (load {load:.2f}): times will be worse than it can do.")
    entries: list[Row | Point | dict[str, Any]] = []
    for entry in run(options.only or list(GROUPS), quick=options.quick, threads=options.threads):
        entries.append(entry)
        if isinstance(entry, dict):  # a group is complete
            store(folder, entries, quick=options.quick, threads=options.threads)
    store(folder, entries, quick=options.quick, threads=options.threads)

    rows = [entry for entry in entries if isinstance(entry, Row)]
    verdicts = [row.met for row in rows]
    print(
        f"\n{len(rows)} rows: {verdicts.count('yes')} targets met, {verdicts.count('no')} missed, "
        f"{verdicts.count('failed')} failed. The table is {folder / 'table.csv'}."
    )
    for verdict, title in (("no", "Missed"), ("failed", "Failed")):
        for row in rows:
            if row.met == verdict:
                print(f"{title}: {as_text(row)}")
    return int("failed" in verdicts)


if __name__ == "__main__":
    sys.exit(main())
