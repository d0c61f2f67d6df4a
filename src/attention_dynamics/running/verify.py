r"""Stored results against their manifests, their sources, and the verdicts they came with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attention_dynamics.experiments.shape import Experiment
from attention_dynamics.running import verdicts
from attention_dynamics.running.files import exclusively
from attention_dynamics.running.manifest import MANIFEST_NAME
from attention_dynamics.running.rerun import Rerun, rerun
from attention_dynamics.running.store import read_results, write_manifest
from attention_dynamics.running.verdicts import Verdict


@dataclass(frozen=True)
class Verification:
    r"""What one stored result was found to be.

    ``problems`` says in words what is wrong, and is empty for a result that is as it was published:
    a band that was missed then and is missed now is none. ``verdicts`` are those of today;
    ``recorded`` says whether the manifest has its own to compare with. ``rerun`` is the comparison
    with recomputed cells, None if none was asked for.
    """

    directory: Path
    manifest: dict[str, Any] = field(default_factory=dict)
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    recorded: bool = False
    rerun: Rerun | None = None

    @property
    def missed(self) -> tuple[str, ...]:
        """The bands that are missed."""
        return tuple(name for name, verdict in self.verdicts.items() if not verdict.met)


def verify_results(
    directory: str | Path,
    experiment: Experiment,
    *,
    record: bool = False,
    cells: int = 0,
    seed: int = 0,
    device: str = "cpu",
) -> Verification:
    r"""Read a stored result against its source, and compute every verdict again.

    ``record`` writes the verdicts into a sound manifest that has none, and changes no other one.
    ``cells`` of the sweep, drawn with ``seed``, are computed again on ``device``, and compared by
    :func:`attention_dynamics.running.rerun.rerun`. Nothing is raised for a result that is not
    sound: the problems say what it is.
    """
    folder = Path(directory)
    try:
        frame, manifest = read_results(folder, experiment)
    except (ValueError, KeyError, OSError) as error:
        return Verification(folder, problems=(str(error),))
    before = verdicts.stored(manifest)
    try:
        now = verdicts.verdicts(experiment.summarise(frame))
    except Exception as error:
        if before is None and "no_verdicts_because" in manifest:
            now = {}  # published without verdicts, and said so
        else:
            problem = f"the table cannot be summarised: {type(error).__name__}: {error}"
            return Verification(folder, manifest, problems=(problem,))
    problems = () if before is None else tuple(verdicts.differences(before, now))
    if record and before is None:
        _record(folder, manifest, now)
        before = now
    again = None
    if cells:
        again = rerun(experiment, frame, manifest, cells=cells, seed=seed, device=device)
        problems += again.problems
    return Verification(folder, manifest, now, problems, before is not None, again)


def stored_directories(results: str | Path, names: tuple[str, ...] = ()) -> list[Path]:
    """The directories ``results/<experiment>/<profile>`` that hold a manifest, in order.

    Raises FileNotFoundError if there are none, or none of one of the ``names``.
    """
    root = Path(results)
    found = sorted(path.parent for path in root.glob(f"*/*/{MANIFEST_NAME}"))
    for name in names or ("",):
        if not any(name in ("", directory.parent.name) for directory in found):
            what = f"of {name!r} " if name else ""
            raise FileNotFoundError(
                f"no stored results {what}in {root}; attention-dynamics run makes them, and "
                "--results names another folder"
            )
    return [path for path in found if not names or path.parent.name in names]


def _record(directory: Path, manifest: dict[str, Any], now: dict[str, Verdict]) -> None:
    kept = {name: value for name, value in manifest.items() if name != "no_verdicts_because"}
    with exclusively(directory):
        write_manifest(directory, kept | verdicts.recorded(now))
