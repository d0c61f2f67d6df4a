r"""The record a check leaves behind, and the one quiet line it shows."""

import html
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

MIME_TYPE = "application/vnd.attention-dynamics.check+json"

# Kinds of evidence, strongest first, as the ledger counts them.
KINDS: dict[str, str] = {
    "proved": "proved symbolically",
    "certified": "certified by interval arithmetic",
    "numeric": "agrees to 40 digits",
    "autograd": "agrees in float64",
    "attacked": "bound attacked",
    "band": "measured against a band",
}
STATUSES = ("passed", "missed")


class CheckFailed(AssertionError):
    """A statement, or its wrong twin, did not do what the book says it does."""


@dataclass(frozen=True)
class CheckRecord:
    r"""What one check established: ``(label, kind, status, statement, detail, wrong twin)``.

    ``statement`` is the very expression that was checked, in LaTeX (``notation = "latex"``) or as
    the source of the call's arguments (``notation = "code"``). ``uses`` lists the labels it rests
    on. ``detail`` holds the numbers of its kind, ``wrong_twin`` how the twin was refuted.

    Raises ``ValueError`` for an unknown kind or status.
    """

    label: str
    kind: str
    status: str
    title: str
    uses: tuple[str, ...]
    statement: str
    notation: str
    scope: str
    detail: Mapping[str, Any] = field(default_factory=dict)
    wrong_twin: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Reject a record that the ledger could not count."""
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r} is unknown; use one of {sorted(KINDS)}")
        if self.status not in STATUSES:
            raise ValueError(f"status={self.status!r} is unknown; use one of {STATUSES}")

    def to_json(self) -> dict[str, Any]:
        """``record -> dict`` of JSON values, with no NaN or infinity in it."""
        data = asdict(self) | {"uses": list(self.uses)}
        json.dumps(data, allow_nan=False)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "CheckRecord":
        """``dict -> record``, the inverse of :meth:`to_json`."""
        return cls(**{**data, "uses": tuple(data["uses"])})

    @property
    def evidence(self) -> str:
        """The kind of evidence in words and its number, such as ``proved for every T, d``."""
        return EVIDENCE[self.kind](self)

    @property
    def mark(self) -> str:
        """``✓`` passed, ``≈`` band missed and said so."""
        return "✓" if self.status == "passed" else "≈"

    def to_text(self) -> str:
        """One line of plain text."""
        return f"{self.mark} {self.label}: {self.evidence}"

    def to_html(self) -> str:
        r"""One line of HTML: mark, evidence in words, the checked expression in ``\( \)``."""
        if self.notation == "latex":
            statement = (
                '<span class="math notranslate nohighlight">'
                rf"\({html.escape(self.statement, quote=False)}\)</span>"
            )
        else:
            statement = f"<code>{html.escape(self.statement)}</code>"
        colour = {"passed": "#1a7f4b", "missed": "#b7791f"}[self.status]
        # The inline style serves JupyterLab; the book's stylesheet overrides it by class.
        return (
            f'<div class="check-line check-{self.kind} check-{self.status}" '
            f'data-check="{html.escape(self.label)}" style="display:flex;gap:.7em;'
            f"align-items:baseline;border-left:3px solid {colour};padding:.15em .7em;"
            'font-size:.9em">'
            f'<span class="check-mark" style="color:{colour};font-weight:700">{self.mark}</span>'
            f'<span class="check-evidence" style="flex:none">{html.escape(self.evidence)}</span>'
            '<span class="check-statement" tabindex="0" role="group" '
            'aria-label="checked expression" style="overflow-x:auto;white-space:nowrap;'
            f'min-width:0">{statement}</span></div>'
        )

    def to_bundle(self) -> dict[str, Any]:
        """The output of the cell: HTML, plain text and the record itself."""
        return {
            "text/html": self.to_html(),
            "text/plain": self.to_text(),
            MIME_TYPE: self.to_json(),
        }

    def _ipython_display_(self) -> None:
        """Show nothing: the check has shown its line already."""


def show_number(value: float, digits: int = 3) -> str:
    """A number as the page shows it: ``0.9998``, ``2.1e-15``; no trailing zeros."""
    return f"{value:.{digits}g}"


def show_ratio(ratio: float) -> str:
    """``0.9998``: four digits, cut off and not rounded, so that 0.99996 is not read as attained."""
    return f"{int(ratio * 1e4) / 1e4:.4f}" if ratio < 1 else "1"


def show_interval(interval: Any) -> str:
    """``[a, b]``, with an open end written as infinity."""
    low, high = interval
    left = "(-∞" if low is None else f"[{show_number(low)}"
    right = "∞)" if high is None else f"{show_number(high)}]"
    return f"{left}, {right}"


def _proved(record: CheckRecord) -> str:
    return f"proved {record.scope}" if record.scope else "proved"


def _certified(record: CheckRecord) -> str:
    return f"certified: maximum in {record.detail['shown']}, {record.detail['boxes']} boxes"


def _numeric(record: CheckRecord) -> str:
    return f"agrees to {record.detail['digits']} digits at {record.detail['points']} random points"


def _autograd(record: CheckRecord) -> str:
    worst = record.detail["worst_relative_error"]
    return "agrees exactly" if worst == 0 else f"agrees to {show_number(worst, 2)}"


def _attacked(record: CheckRecord) -> str:
    ratio = record.detail["tightest_ratio"]
    words = f"attacked: tightest ratio {show_ratio(ratio)}"
    return f"{words} ({record.detail['attack']})" if record.detail["attack"] else words


def _band(record: CheckRecord) -> str:
    detail = record.detail
    verdict = "inside" if record.status == "passed" else "misses"
    words = (
        f"band: {show_number(detail['estimate'])} {show_interval(detail['interval'])} "
        f"{verdict} {show_interval(detail['band'])}"
    )
    return f"{words}: {detail['missed_because']}" if record.status == "missed" else words


EVIDENCE = {
    "proved": _proved,
    "certified": _certified,
    "numeric": _numeric,
    "autograd": _autograd,
    "attacked": _attacked,
    "band": _band,
}
