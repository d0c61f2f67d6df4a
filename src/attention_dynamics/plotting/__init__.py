r"""Figures: one style, byte-stable SVG, scaling plots. The only subpackage with matplotlib."""

from attention_dynamics.plotting.scaling import add_guide, plot_scaling
from attention_dynamics.plotting.style import COLOURS, MARKERS, figure, save_svg, use_style

__all__ = [
    "COLOURS",
    "MARKERS",
    "add_guide",
    "figure",
    "plot_scaling",
    "save_svg",
    "use_style",
]
