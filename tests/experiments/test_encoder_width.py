"""The smallest width that reaches a threshold: shape, determinism, order, and slopes."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest
import torch

from attention_dynamics.experiments import common_models, common_task
from attention_dynamics.experiments import encoder_width as experiment
from attention_dynamics.models import wu_encoder
from attention_dynamics.models.wu_encoder import EncoderParameters
from attention_dynamics.running import Experiment

SMALL = experiment.Config(4, 4, largest=8, steps=60, threshold=0.1)
SMALL_STEP = 0.5  # over the largest eigenvalue of the Hessian of the tangent


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


def test_the_width_is_the_first_whose_own_descent_arrives():
    """Each width of the grid descended by hand, on gradients by automatic differentiation."""
    found = []
    for seed in range(4):
        arrives = []
        for width in SMALL.widths:
            cell = common_task.Config("encoder", 4, samples=4, width=width, steps=SMALL.steps)
            start = common_models.build(cell, seed).start
            tokens, target = common_models.task(cell, seed)
            y = (tokens[:, -1] @ target.mT)[:, 0]

            def output(*blocks, X=tokens):
                return wu_encoder.forward(EncoderParameters(*blocks), X, logit_exponent=0.5)

            rows = torch.autograd.functional.jacobian(output, tuple(start))
            jacobian = torch.cat([block.flatten(1) for block in rows], dim=1)
            largest = torch.linalg.matrix_norm(jacobian, 2) ** 2
            blocks, losses = [block.clone().requires_grad_() for block in start], []
            for _ in range(SMALL.steps + 1):
                loss = (output(*blocks) - y).square().mean()
                losses.append(float(loss.detach()))
                slopes = torch.autograd.grad(loss, blocks)
                with torch.no_grad():
                    for block, slope in zip(blocks, slopes, strict=True):
                        block -= SMALL_STEP * 4 / (2 * largest) * slope
            arrives.append(largest > 0 and min(losses) <= SMALL.threshold * losses[0])
        first = next((w for w, done in zip(SMALL.widths, arrives, strict=True) if done), 16)
        assert experiment.run(SMALL, seed)["value"][0] == first
        found.append(first)
    assert len(set(found)) > 1
