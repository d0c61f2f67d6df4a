r"""``verify`` every stored result: files, cells, profiles, and the verdict of every band."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from attention_dynamics import experiments
from attention_dynamics.commands.sweeps import add_device
from attention_dynamics.running.device import choose_device, prepare_device
from attention_dynamics.running.manifest import MANIFEST_NAME, read_manifest
from attention_dynamics.running.store import RESULTS
from attention_dynamics.running.verify import Verification, stored_directories, verify_results


def add(commands: Any) -> None:
    """Declare ``verify``."""
    verify = commands.add_parser(
        "verify", help="check every stored result, and its verdicts against those published"
    )
    verify.set_defaults(command=verify_stored)
    verify.add_argument("experiments", nargs="*", help="names (default: all that are stored)")
    verify.add_argument(
        "--results", type=Path, default=Path(RESULTS), help="folder of all results (results)"
    )
    verify.add_argument(
        "--record",
        action="store_true",
        help="write the verdicts into manifests that have none, once; others stay as they are",
    )
    verify.add_argument(
        "--rerun", type=int, default=0, metavar="CELLS",
        help="also compute so many cells of each result again, drawn at random, and compare",
    )  # fmt: skip
    verify.add_argument("--seed", type=int, default=0, help="of the draw of cells (default 0)")
    add_device(verify)


def verify_stored(options: argparse.Namespace) -> int:
    """Print one line a band; 1 if a result is not as it was published, 0 otherwise.

    A band that was missed when published and is missed today is printed, and fails nothing.
    """
    if options.rerun < 0:
        raise ValueError(f"rerun must be a number of cells, 0 or more, got {options.rerun}")
    device = "cpu"
    if options.rerun:
        device = choose_device(options.device)
        prepare_device(device)
    found = []
    for directory in stored_directories(options.results, tuple(options.experiments)):
        try:
            experiment = experiments.get(read_manifest(directory / MANIFEST_NAME)["experiment"])
        except (ValueError, KeyError) as error:
            found.append(Verification(directory, problems=(f"unknown experiment: {error}",)))
        else:
            found.append(
                verify_results(
                    directory,
                    experiment,
                    record=options.record,
                    cells=options.rerun,
                    seed=options.seed,
                    device=device,
                )
            )
        _print(found[-1], options.results)
    wrong = sum(bool(result.problems) for result in found)
    bands, missed = (sum(len(x) for x in each) for each in zip(
        *((result.verdicts, result.missed) for result in found), strict=True
    ))  # fmt: skip
    print(
        f"{len(found)} results, {bands - missed} bands met, {missed} missed; "
        f"{wrong} results not as published"
    )
    return 1 if wrong else 0


def _print(result: Verification, results: Path) -> None:
    manifest = result.manifest
    name = result.directory.relative_to(results)
    if manifest:
        print(f"{name}: {manifest['cells']} cells, commit {str(manifest['commit'])[:12]}")
    else:
        print(f"{name}:")
    for band, verdict in result.verdicts.items():
        print(f"  {'met   ' if verdict.met else 'MISSED'} {band}: {verdict}")
    if manifest and not result.recorded:
        print("  no verdicts were stored with it; verify --record adds today's")
    again = result.rerun
    if again is not None:
        where = "" if again.same_device else ", on another kind of device"
        print(
            f"  {again.cells} cells again{where}: {again.numbers} numbers, {again.equal} equal bit "
            f"for bit, {again.beyond} beyond the tolerance (largest relative difference "
            f"{again.largest:.2g}), {len(again.problems)} intervals apart"
        )
    for problem in result.problems:
        print(f"  WRONG  {problem}")
