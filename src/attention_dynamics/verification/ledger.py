"""Records collected from executed notebooks, and the counts a ledger states."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from attention_dynamics.verification.record import KINDS, MIME_TYPE, CheckRecord, show_ratio


def records_in(notebook: Mapping[str, Any]) -> list[CheckRecord]:
    """The records in the outputs of one executed notebook (its JSON), in order."""
    return [
        CheckRecord.from_json(output["data"][MIME_TYPE])
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
        for output in cell["outputs"]
        if MIME_TYPE in output.get("data", {})
    ]


@dataclass(frozen=True)
class Count:
    """How many checks of one kind ran, how many of them are missed, and their range in words."""

    kind: str
    checks: int
    missed: int
    note: str


def count_by_kind(records: Iterable[CheckRecord]) -> list[Count]:
    """One :class:`Count` a kind, strongest evidence first; kinds without a check are left out."""
    everything = list(records)
    counts = []
    for kind in KINDS:
        own = [record for record in everything if record.kind == kind]
        if own:
            missed = sum(record.status == "missed" for record in own)
            counts.append(Count(kind, len(own), missed, _note(kind, own)))
    return counts


def _note(kind: str, records: list[CheckRecord]) -> str:
    detail = [record.detail for record in records]
    if kind == "proved":
        generic = sum(bool(d["sizes"]) for d in detail)
        return f"{generic} of them for every length or dimension"
    if kind == "numeric":
        return f"{sum(d['points'] for d in detail)} random points"
    if kind == "autograd":
        return f"worst relative error {max(d['worst_relative_error'] for d in detail):.1e}"
    if kind == "attacked":
        ratios = [d["tightest_ratio"] for d in detail]
        sharp = sum(d["at_least"] is not None and d["at_least"] >= 0.99 for d in detail)
        reach = f"{show_ratio(min(ratios))} to {show_ratio(max(ratios))}"
        return f"tightest ratios {reach}, {sharp} shown sharp"
    if kind == "certified":
        return f"{sum(d['boxes'] for d in detail)} boxes"
    missed = sum(record.status == "missed" for record in records)
    return f"{len(records) - missed} met, {missed} missed"
