r"""The bound explorer: sliders over a frame of numbers, as HTML that stands on its own.

The page holds every number that a slider can reach; the script in it looks them up and draws them,
and computes none. Without a script, and on paper, the first view stands there with its numbers.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from attention_dynamics.plotting._digits import integer, number, power_of_ten, rounded_up

#: The sliders in their order, each with its column, symbol and words.
SLIDERS = (
    ("heads", "m", "heads"),
    ("steps", "τ", "steps"),
    ("dimension", "d", "token dimension"),
    ("samples", "n", "samples"),
    ("length", "T", "tokens"),
)
#: What can be chosen, each with its column, legend and words for the values.
CHOICES: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    ("version", "Bound", {"book": "fast form of this book", "paper": "dependences of the paper"}),
    ("step_rule", "Step size", {"decreasing": "η = 1/√τ", "constant": "η = {step_size}"}),
)
BARS = ("optimisation", "approximation", "linearisation", "total")
#: The paper's sizes, where the table has them.
FIRST_VIEW: Mapping[str, Any] = {
    "version": "book", "step_rule": "decreasing", "heads": 64, "steps": 4000, "dimension": 8,
    "samples": 5000, "length": 16,
}  # fmt: skip
#: Axes of the tree of numbers, the innermost last; equal branches are stored once.
_ORDER = ("version", "length", "samples", "step_rule", "dimension", "steps", "heads")
_COLUMNS = (*BARS, "kappa", "step_size", "small", "fast")


def bound_explorer(
    table: pd.DataFrame, *, first: Mapping[str, Any] = FIRST_VIEW, mark: float = 1.0
) -> BoundExplorer:
    r"""Sliders for m, :math:`\tau`, d, n and T, and the terms of the bound as bars on a log axis.

    Returns an object that Jupyter and the book show as HTML. Several may stand on one page.
    Numbers are shown as three digits, rounded up, so that what is read is still a bound.

    Raises ValueError for a missing column, stops that do not form a full product, or a term that
    is not positive and finite.

    Parameters
    ----------
    table
        A row for each combination of the columns ``version``, ``step_rule``, ``heads``,
        ``steps``, ``dimension``, ``samples`` and ``length``, with ``optimisation``,
        ``approximation``, ``linearisation`` and ``total`` in the unit of the loss, ``kappa``,
        ``step_size``, ``form`` and ``probability``; ``theory.bound_table`` makes it.
    first
        The first view, a value for each slider and choice; the first stop where it has none.
    mark
        The loss above which a bound is vacuous.

    """
    required = {*_ORDER, *BARS, "kappa", "step_size", "form", "probability"}
    if missing := sorted(required - set(table.columns)):
        raise ValueError(f"table: expected the columns of a table of bounds, {missing} missing")
    values = table[list(BARS)].to_numpy(dtype=float)
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise ValueError("table: expected positive and finite terms, since the axis is logarithmic")
    return BoundExplorer(table, first, mark)


class BoundExplorer:
    """An interactive figure of a table of bounds, made by :func:`bound_explorer`."""

    def __init__(self, table: pd.DataFrame, first: Mapping[str, Any], mark: float) -> None:
        self._mark = mark
        self._assumptions = str(table.attrs.get("assumptions", ""))
        self._probability = float(table["probability"].min())
        self._stops = {name: _stops(table, name) for name in _ORDER}
        self._grids = _grids(table, self._stops)
        #: Index of the stop at which each slider and choice stands first.
        self._first = {
            name: stops.index(first[name]) if first.get(name) in stops else 0
            for name, stops in self._stops.items()
        }
        place = tuple(self._first.values())
        self._view = {name: float(grid[place]) for name, grid in self._grids.items()}

    def __repr__(self) -> str:
        sizes = ", ".join(f"{symbol} = {self._size(name)}" for name, symbol, _ in SLIDERS)
        terms = ", ".join(f"{name} {number(self._view[name])}" for name in BARS)
        return f"Bound on the loss at {sizes}, in the unit of the loss: {terms}"

    def _repr_html_(self) -> str:
        payload = json.dumps(self._payload(), separators=(",", ":")).replace("<", "\\u003c")
        return (
            f'<div class="bound-explorer">\n<style>\n{_asset("explorer.css")}</style>\n'
            f'{self._panel()}\n<script type="application/json">{payload}</script>\n'
            f"<script>\n{_asset('explorer.js')}</script>\n</div>\n"
        )

    def _payload(self) -> dict[str, Any]:
        pool: list[tuple[float, ...]] = []
        known: dict[tuple[float, ...], int] = {}

        def store(node: tuple[float, ...]) -> int:
            if node not in known:
                known[node] = len(pool)
                pool.append(node)
            return known[node]

        def branch(place: tuple[int, ...]) -> int:
            if len(place) == len(_ORDER) - 1:
                leaves = (self._grids[name][place].tolist() for name in _COLUMNS)
                return store(tuple(store(tuple(map(_compact, leaf))) for leaf in leaves))
            children = range(len(self._stops[_ORDER[len(place)]]))
            return store(tuple(branch((*place, child)) for child in children))

        return {
            "order": _ORDER, "columns": _COLUMNS, "root": branch(()), "pool": pool,
            "stops": {name: [integer(stop) for stop in self._stops[name]] for name, *_ in SLIDERS},
            "choices": {name: self._stops[name] for name, *_ in CHOICES}, "first": self._first,
            "axis": self._decades(*BARS), "spark": self._decades("total"), "mark": self._mark,
        }  # fmt: skip

    def _decades(self, *names: str) -> tuple[int, int]:
        """The decades that hold these columns and the mark."""
        values = np.concatenate([self._grids[name].ravel() for name in names])
        lowest, highest = min(values.min(), self._mark), max(values.max(), self._mark)
        return math.floor(math.log10(lowest)), math.ceil(math.log10(highest))

    def _place(self, value: float) -> str:
        low, high = self._decades(*BARS)
        return f"{100 * (math.log10(value) - low) / (high - low):.2f}%"

    def _size(self, name: str) -> str:
        return integer(self._stops[name][self._first[name]])

    def _panel(self) -> str:
        mark, low_high = number(self._mark), self._decades(*BARS)
        sizes = ", ".join(
            f'<span class="be-size"><i>{symbol}</i> = <span data-size="{name}">{self._size(name)}'
            "</span></span>"
            for name, symbol, _ in SLIDERS
        )
        ticks = "".join(
            f'<span style="left:{self._place(10.0**power)}">{power_of_ten(power)}</span>'
            for power in range(low_high[0], low_high[1] + 1)
            if power % 2 == 0
        )
        return f"""\
<form class="be-panel" aria-label="Bound explorer" autocomplete="off">
<div class="be-result">
<p class="be-headline"><span><i>L<sub>n</sub></i>(<i class="be-mean">ϕ</i>) ≤ \
<b>{self._number("total")}</b></span>
{self._when("vacuous", f"vacuous: above {mark}")}{self._when("useful", f"below {mark}")}</p>
<div class="be-chart" role="table" style="--mark:{self._place(self._mark)}" \
aria-label="The three terms and the total, in the unit of the loss">
{"".join(self._bar(name) for name in BARS)}\
<div class="be-axis" aria-hidden="true"><div>{ticks}<em>vacuous above {mark}</em></div></div>
</div>
</div>
<div class="be-sliders">
{"".join(self._slider(*slider) for slider in SLIDERS)}\
</div>
<div class="be-choices">
{"".join(self._choice(*choice) for choice in CHOICES)}\
<button type="button">Reset</button>
</div>
<div class="be-notes">
<p>{self._when("large", "κ ≥ 1: the step is too long for the fast form.")}
<span class="be-size">κ = ηG² = {self._number("kappa")}</span> at
<span class="be-size">η = {self._number("step_size")}</span>.
{self._when("fast", "Fast form: √total is at most the sum of the roots of the three terms.")}\
{self._when("paper", "Paper’s form: the three terms add up to the total.")}</p>
<p>A priori, with probability at least {self._probability:.3g}, at {sizes}.
{html.escape(self._assumptions)}. Rounded up to three digits.</p>
<p class="be-hint">The line over a slider is the total while that slider alone moves; dashed: \
loss {mark}.</p>
<p class="be-static">Shown is one setting; the sliders need JavaScript.</p>
</div>
<p class="be-live" role="status"></p>
</form>"""

    def _slider(self, name: str, symbol: str, words: str) -> str:
        last, at = len(self._stops[name]) - 1, self._first[name]
        return f"""\
<div class="be-slider" data-axis="{name}">
<span class="be-name"><i>{symbol}</i> {words} <span class="be-same" hidden>no effect</span></span>
<b data-size="{name}">{self._size(name)}</b>
<svg aria-hidden="true" focusable="false"></svg>
<input type="range" min="0" max="{last}" step="1" value="{at}" data-symbol="{symbol}" \
aria-label="{symbol}, {words}" aria-valuetext="{self._size(name)} {words}">
</div>
"""

    def _choice(self, name: str, legend: str, words: Mapping[str, str]) -> str:
        buttons = ""
        for index, stop in enumerate(self._stops[name]):
            checked = " checked" if index == self._first[name] else ""
            text = words.get(stop, str(stop))
            if name == "step_rule":
                text = text.format(step_size=number(self._largest_step(index)))
            buttons += (
                f'<label><input type="radio" name="{name}" value="{index}"{checked}> '
                f"{html.escape(text)}</label>\n"
            )
        return f"<fieldset><legend>{legend}</legend>\n{buttons}</fieldset>\n"

    def _largest_step(self, rule: int) -> float:
        axis = _ORDER.index("step_rule")
        return float(np.take(self._grids["step_size"], rule, axis=axis).max())

    def _bar(self, name: str) -> str:
        return f"""\
<div role="row" class="be-row be-{name}"><span role="rowheader">{name}</span>
<span role="cell">{self._number(name)}</span>
<div class="be-track" aria-hidden="true"><div data-bar="{name}" \
style="width:{self._place(self._view[name])}"></div></div></div>
"""

    def _number(self, name: str) -> str:
        return f'<span data-number="{name}">{number(self._view[name])}</span>'

    def _when(self, state: str, text: str) -> str:
        """Words for one of a pair of states; the script shows and hides them."""
        vacuous, fast, small = (
            self._view["total"] > self._mark, bool(self._view["fast"]), bool(self._view["small"])
        )  # fmt: skip
        states = {"vacuous": vacuous, "useful": not vacuous, "fast": fast, "paper": not fast}
        hidden = "" if (states | {"large": not small})[state] else " hidden"
        return f'<span data-when="{state}"{hidden}>{text}</span>'


def _stops(table: pd.DataFrame, name: str) -> list[Any]:
    found = table[name].unique().tolist()
    return found if isinstance(found[0], str) else sorted(found)


def _grids(table: pd.DataFrame, stops: Mapping[str, list[Any]]) -> dict[str, NDArray[np.float64]]:
    """Each column as an array with the axes of ``stops``."""
    whole = pd.MultiIndex.from_product(list(stops.values()), names=list(stops))
    rows = table.set_index(list(stops))
    if len(rows) != len(whole) or rows.index.has_duplicates or not whole.isin(rows.index).all():
        raise ValueError(
            f"table: expected one row for each of the {len(whole)} combinations of its stops, got "
            f"{len(rows)}; the sliders are independent of each other"
        )
    rows = rows.reindex(whole)
    columns = {name: rounded_up(rows[name].to_numpy(dtype=float)) for name in (*BARS, "kappa")}
    columns |= {
        "step_size": rows["step_size"].to_numpy(dtype=float),
        "small": (rows["kappa"] < 1).to_numpy(dtype=float),
        "fast": (rows["form"] == "fast").to_numpy(dtype=float),
    }
    return {
        name: column.reshape([len(axis) for axis in stops.values()])
        for name, column in columns.items()
    }


def _compact(value: float) -> float:
    value = float(f"{value:.3g}")
    return int(value) if value.is_integer() else value


@cache
def _asset(name: str) -> str:
    return resources.files("attention_dynamics.plotting").joinpath(name).read_text("utf8")
