"""The smallest width that reaches a threshold: shape, determinism, order, and slopes."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest

from attention_dynamics.experiments import encoder_width as experiment
from attention_dynamics.running import Experiment

SMALL = experiment.Config(4, 4, largest=8, steps=60, threshold=0.1)


def test_the_module_has_the_shape_of_an_experiment():
    assert isinstance(experiment, Experiment)
    assert set(experiment.PROFILES) == {"smoke", "book", "paper"}
    assert not set(experiment.PROFILES["smoke"].seeds) & set(experiment.PROFILES["book"].seeds)


def test_a_cell_is_a_pure_function_of_config_and_seed():
    first = experiment.run(SMALL, 5)
    pd.testing.assert_frame_equal(experiment.run(SMALL, 5), first, check_exact=True)
    assert tuple(first.columns) == experiment.COLUMNS


def test_an_easier_threshold_never_needs_more_width():
    for seed in range(4):
        hard, easy = (
            experiment.run(replace(SMALL, threshold=level), seed)["value"][0]
            for level in (0.1, 0.5)
        )
        assert easy <= hard


def test_out_of_reach_is_twice_the_last_width():
    assert experiment.run(replace(SMALL, steps=1, threshold=1e-9), 0)["value"][0] == 16


def test_the_summary_tells_the_two_places_apart():
    rows = [
        {"seed": seed, "dimension": d, "samples": n, "quantity": "width", "value": float(n**p)}
        for seed in range(3)
        for d, p in ((4, 1), (0, 3))
        for n in (4, 8, 16)
    ]
    table = experiment.summarise(pd.DataFrame(rows)).set_index("quantity")
    assert table.loc["width_narrow", "slope"] == pytest.approx(1)
    assert table.loc["width_narrow", "inside"]
    assert not table.loc["width_wide", "inside"]
