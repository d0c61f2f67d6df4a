r"""Figures: byte-stable SVG, legible colours, honest scaling plots."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb

from attention_dynamics.plotting import COLOURS, figure, plot_scaling, save_svg
from attention_dynamics.plotting.style import svg_bytes

POINTS = pd.DataFrame({"heads": [8, 16, 32], "mean": [0.4, 0.28, 0.2]})
POINTS = POINTS.assign(lower=0.9 * POINTS["mean"], upper=1.1 * POINTS["mean"])

DRAW = """
import sys, pandas as pd
from attention_dynamics.plotting import figure, plot_scaling
from attention_dynamics.plotting.style import svg_bytes
points = pd.DataFrame({"heads": [8, 16], "mean": [0.4, 0.2], "lower": [0.3, 0.1],
                       "upper": [0.5, 0.3]})
drawn, axes = figure()
plot_scaling(axes, {"loss": points}, against="heads", xlabel="m", guides={"loss": -0.5})
sys.stdout.buffer.write(svg_bytes(drawn))
"""


def drawn(curves=None, guides=None):
    figure_drawn, axes = figure()
    plot_scaling(
        axes, curves or {"loss": POINTS}, against="heads", xlabel="heads $m$", guides=guides
    )
    return figure_drawn, axes


def luminance(colour):
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return float(np.dot([0.2126, 0.7152, 0.0722], linear))


def test_two_processes_draw_the_same_bytes_without_a_date():
    first, second = (
        subprocess.run([sys.executable, "-c", DRAW], capture_output=True, check=True).stdout
        for _ in range(2)
    )
    assert first == second
    assert b"</svg>" in first
    assert b"dc:date" not in first


def test_a_saved_figure_is_the_bytes_of_the_figure(tmp_path):
    figure_drawn, _ = drawn()
    path = save_svg(figure_drawn, tmp_path / "deep" / "width.svg")
    assert path.read_bytes() == svg_bytes(figure_drawn)


def test_another_value_gives_another_figure():
    shifted = POINTS.assign(mean=1.01 * POINTS["mean"])
    assert svg_bytes(drawn()[0]) != svg_bytes(drawn({"loss": shifted})[0])


def test_every_colour_is_legible_on_the_figures_own_white_ground():
    for name, colour in COLOURS.items():
        assert 1.05 / (luminance(colour) + 0.05) >= 4.5, name
    ground = re.search(rb'id="patch_1">\s*<path[^>]*style="fill: #ffffff', svg_bytes(drawn()[0]))
    assert ground, "the figure needs an opaque ground: a dark page would swallow its ink"


# Machado, Oliveira and Fernandes (2009), severity 1, acting on linear RGB
DEFICIENCIES = {
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
}


@pytest.mark.parametrize("deficiency", DEFICIENCIES)
def test_the_first_three_colours_stay_apart_for_a_colour_blind_reader(deficiency):
    linear = np.array([[c**2.2 for c in to_rgb(colour)] for colour in COLOURS.values()])
    seen = np.clip(linear @ np.array(DEFICIENCIES[deficiency]).T, 0, 1) ** (1 / 2.2)
    for a, b in itertools.combinations(range(3), 2):
        assert np.linalg.norm(seen[a] - seen[b]) > 0.15, (list(COLOURS)[a], list(COLOURS)[b])


def test_the_curve_is_the_frame_and_the_guide_has_the_predicted_slope():
    _, axes = drawn(guides={"loss": -0.5})
    curve, guide = axes.lines
    np.testing.assert_array_equal(curve.get_xdata(), POINTS["heads"])
    np.testing.assert_array_equal(curve.get_ydata(), POINTS["mean"])
    x, y = guide.get_data()
    slopes = np.diff(np.log(y)) / np.diff(np.log(x))
    np.testing.assert_allclose(slopes, -0.5)
    assert y[0] == POINTS["mean"][0]
    assert axes.get_xscale() == axes.get_yscale() == "log"
    assert [text.get_text() for text in axes.texts] == ["loss"]


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match="1 to 6 frames, got 0"):
        plot_scaling(figure()[1], {}, against="heads", xlabel="m")
    with pytest.raises(ValueError, match=r"'gain'.*not among \['loss'\]"):
        drawn(guides={"gain": -1.0})


@pytest.mark.parametrize("lowest", [0.1, 1e-3, 1e-9])
def test_the_numbers_on_the_axis_do_not_lie_over_each_other(lowest):
    points = pd.DataFrame({"heads": [8, 256], "mean": [1.0, lowest]})
    points = points.assign(lower=points["mean"], upper=points["mean"])
    drawing, axes = figure(2, height=3.4)
    plot_scaling(axes[0], {"loss": points}, against="heads", xlabel="m")
    drawing.canvas.draw()
    low, high = axes[0].get_window_extent().intervaly
    boxes = [label.get_window_extent() for label in axes[0].get_yticklabels() if label.get_text()]
    shown = sorted(box.intervaly.tolist() for box in boxes if low <= box.intervaly.mean() <= high)
    assert len(shown) > 2
    for one, other in itertools.pairwise(shown):
        assert one[1] < other[0]
