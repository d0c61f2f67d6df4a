r"""The style of every figure: colour-blind safe, legible on light and dark pages, byte-stable.

Figures carry an opaque white ground of their own: a dark page shows a light panel with dark ink, or
inverts the whole panel as the book does, and never dark ink on a dark ground. Colours come from the
Okabe-Ito palette, darkened until each has a contrast of at least 4.5 against white, so that labels
may be set in them.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import matplotlib as mpl
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS: Mapping[str, str] = MappingProxyType(
    {
        "blue": "#0067a5",
        "orange": "#b34700",
        "green": "#00785a",
        "purple": "#9c4078",
        "brown": "#7a5c00",
        "grey": "#5c5c5c",
    }
)
MARKERS = ("o", "s", "^", "D", "v", "P")
_INK = "#222222"
_SIZE = (6.4, 3.8)

SETTINGS: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": _INK,
    "axes.facecolor": "white",
    "axes.grid": True,
    "axes.labelcolor": _INK,
    "axes.prop_cycle": cycler(color=list(COLOURS.values()), marker=list(MARKERS)),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "figure.constrained_layout.use": True,
    "figure.dpi": 96,
    "figure.facecolor": "white",
    "figure.figsize": _SIZE,
    "font.family": "DejaVu Sans",  # ships with matplotlib: the same glyphs everywhere
    "font.size": 10,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "mathtext.fontset": "dejavusans",
    "savefig.dpi": 96,
    "savefig.facecolor": "white",
    "svg.fonttype": "path",
    "svg.hashsalt": "attention-dynamics",
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
}
_SVG_METADATA = {"Date": None}


def use_style() -> None:
    """Set the style; in a notebook also send figures as SVG without a date.

    Call it in the first cell of a chapter. Outside IPython only matplotlib's settings change.
    """
    mpl.rcParams.update(SETTINGS)
    if "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None:
        from matplotlib_inline.backend_inline import set_matplotlib_formats

        set_matplotlib_formats("svg", metadata=dict(_SVG_METADATA))


def figure(
    columns: int = 1, *, height: float = _SIZE[1], width: float | None = None, **options: Any
) -> tuple[Figure, Any]:
    """A figure with one row of axes in the book's sizes (inches): 6.4 wide, 8 from two columns.

    Returns the figure and its axes: one ``Axes``, or an array of them for several columns.
    """
    import matplotlib.pyplot as plt

    mpl.rcParams.update(SETTINGS)
    size = (width if width is not None else (_SIZE[0] if columns == 1 else 8.0), height)
    return plt.subplots(1, columns, figsize=size, **options)


def label_line(axes: Axes, x: float, y: float, text: str, colour: str) -> None:
    """A direct label right of a line's last point, in the line's colour."""
    axes.annotate(
        text,
        (x, y),
        xytext=(7, 0),
        textcoords="offset points",
        color=colour,
        va="center",
        ha="left",
        annotation_clip=False,
        fontsize=9,
    )


def svg_bytes(drawn: Figure) -> bytes:
    """The figure as SVG: the same bytes for the same figure, on every day."""
    buffer = io.BytesIO()
    with mpl.rc_context(SETTINGS):
        if drawn.get_layout_engine() is not None:
            # the layout moves a little each time a figure is drawn: draw once, then hold it
            drawn.draw_without_rendering()
            drawn.set_layout_engine("none")
        drawn.savefig(buffer, format="svg", metadata=dict(_SVG_METADATA), bbox_inches="tight")
    return buffer.getvalue()


def save_svg(drawn: Figure, path: str | Path) -> Path:
    """Write :func:`svg_bytes`; the folder is made where it is missing."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(svg_bytes(drawn))
    return target
