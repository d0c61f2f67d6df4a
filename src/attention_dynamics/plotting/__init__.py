r"""Figures: one style, byte-stable SVG, scaling plots, and one with sliders.

The only subpackage with matplotlib.
"""

from attention_dynamics.plotting.explorer import bound_explorer
from attention_dynamics.plotting.scaling import add_guide, plot_scaling
from attention_dynamics.plotting.style import COLOURS, MARKERS, figure, save_svg, use_style

__all__ = [
    "COLOURS",
    "MARKERS",
    "add_guide",
    "bound_explorer",
    "figure",
    "plot_scaling",
    "save_svg",
    "use_style",
]
