"""The common task: shape, bands, determinism, shared data, and tangents that are right."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch

from attention_dynamics.experiments import common_models as models
from attention_dynamics.experiments import common_task as experiment
from attention_dynamics.running import Experiment, sweep

DESCENT = ("shallow", "encoder", "regression", "residual", "vanilla")


def small(model, **sizes):
    return experiment.Config(model, **({"dimension": 5, "samples": 4, "width": 6} | sizes))


@pytest.fixture(scope="module")
def smoke():
    return sweep(experiment, "smoke")


def test_the_module_has_the_shape_of_an_experiment():
    assert isinstance(experiment, Experiment)
    assert set(experiment.PROFILES) == {"smoke", "book", "paper"}
    assert experiment.Config.__dataclass_params__.frozen
    assert not set(experiment.PROFILES["smoke"].seeds) & set(experiment.PROFILES["book"].seeds)


def test_a_cell_is_a_pure_function_of_config_and_seed():
    config = small("regression", steps=5)
    first = experiment.run(config, 5)
    pd.testing.assert_frame_equal(experiment.run(config, 5), first, check_exact=True)
    assert tuple(first.columns) == experiment.COLUMNS
    assert (experiment.run(config, 6)["value"] != first["value"]).any()


@pytest.mark.parametrize("model", DESCENT)
def test_loss_gradient_and_kernel_belong_to_the_same_outputs(model):
    """Central differences of the error along the gradient, against the kernel and the loss."""
    problem = models.build(small(model), 7)
    loss, gradients = problem.loss_and_gradients(problem.start)
    error = problem.error(problem.start)
    assert float(loss) == pytest.approx(problem.weight / 2 * float(error.square().sum()))
    h = 1e-5
    ahead, behind = (problem.move(problem.start, gradients, s * h) for s in (-1.0, 1.0))
    moved = (problem.error(ahead) - problem.error(behind)) / (2 * h)
    expected = problem.weight * problem.kernel(problem.start) @ error
    torch.testing.assert_close(moved, expected, rtol=1e-6, atol=1e-8)


def test_models_share_tokens_and_related_models_their_start():
    aware, plain = (models.build(small(name), 3) for name in ("aware", "regression"))
    torch.testing.assert_close(aware.start.A, plain.start.A, rtol=0, atol=0)
    with_, without = (models.build(small(name), 3) for name in ("residual", "vanilla"))
    torch.testing.assert_close(with_.start.V, without.start.V, rtol=0, atol=0)
    tokens, target = models.task(small("shallow"), 3)
    torch.testing.assert_close(target @ target.mT, torch.eye(5, dtype=torch.float64))
    norms = tokens.norm(dim=-1)
    torch.testing.assert_close(norms, torch.ones_like(norms))


def test_a_frozen_tangent_falls_as_its_eigenvalues_say():
    values, vectors = torch.tensor([0.1, 1.0]).double(), torch.eye(2).double()
    fall = models.frozen_fall(values, vectors, torch.tensor([2.0, 0.0]).double(), 0.5, 7)
    assert fall == pytest.approx(-14 * math.log(0.95))


def test_retention_tells_geometric_from_power_and_floor():
    k = torch.arange(1001, dtype=torch.float64)
    for losses, expected in ((0.99**k, 1.0), ((k + 1) ** -2.0, 0.5), (0.5 + 0.5 * 0.9**k, 0.0)):
        recorded = models.Recorded(losses, None)
        found = experiment._quantities(recorded, 1000)["retention"]
        assert found == pytest.approx(expected, abs=0.01)


def test_a_wide_shallow_transformer_follows_its_tangent():
    config = small("shallow", dimension=8, width=512, steps=100)
    found = experiment.run(config, 4).set_index("quantity")["value"]
    assert found["start_ratio"] == pytest.approx(1, abs=0.05)
    assert found["rate_ratio"] == pytest.approx(1, abs=0.01)


def test_places_and_summary(smoke):
    assert set(experiment.place_of(smoke)) == {"wide", "narrow", "long", "many"}
    table = experiment.summarise(smoke).set_index("quantity")
    assert list(table.index) == list(experiment.BANDS)
    assert np.isfinite(table["estimate"]).all()


def test_an_unknown_model_or_quantity_is_refused(smoke):
    with pytest.raises(ValueError, match="model must be"):
        experiment.run(small("transformer"), 0)
    with pytest.raises(ValueError, match="quantity must be"):
        experiment.estimate(smoke, "speed")


def test_end_tenth_and_rates_of_a_known_curve():
    k = torch.arange(1001, dtype=torch.float64)
    losses = 3.0 * 0.99**k
    found = experiment._quantities(models.Recorded(losses, None), 1000)
    assert found["end"] == pytest.approx(1000 * math.log10(0.99))
    assert found["tenth"] == math.ceil(math.log(0.1) / math.log(0.99))
    assert found["rate"] == pytest.approx(-math.log(0.99))
    assert found["loss_64"] == pytest.approx(64 * math.log10(0.99))
    assert experiment._quantities(models.Recorded(losses[:5], None), 1000)["tenth"] == 1000
    tangents = models.Tangents(half=500 * 0.02, whole=1000 * 0.005, condition=2.0)
    found = experiment._quantities(models.Recorded(losses, tangents), 1000)
    assert found["rate_ratio"] == pytest.approx(0.02 / -math.log(0.99))
    assert found["start_ratio"] == pytest.approx(0.005 / -math.log(0.99))


def test_every_band_is_about_the_model_and_the_place_that_its_name_says():
    """A made-up value for each model, place and quantity, so that no two can be exchanged."""
    quantities = ("rate_ratio", "retention", "rate", "end", "tenth")
    values, rows = {}, []
    for config in experiment.PROFILES["book"].configs:
        shape = {
            "model": config.model,
            "dimension": config.dimension,
            "samples": config.samples,
            "length": config.length,
        }
        where = experiment.place_of(pd.DataFrame([shape]))[0]
        for quantity in quantities:
            value = 1.0 + len(values) ** 1.5
            values[config.model, where, quantity] = value
            rows += [shape | {"quantity": quantity, "seed": s, "value": value} for s in range(2)]
    frame = pd.DataFrame(rows)

    def log(quantity, over, under):
        return math.log10(values[(*over, quantity)] / values[(*under, quantity)])

    expected = {
        "retention_many": values["shallow", "many", "retention"],
        "residual_helps": values["vanilla", "wide", "end"] - values["residual", "wide", "end"],
        "aware_speedup": log("tenth", ("regression", "long"), ("aware", "long")),
        "length_helps": values["aware", "narrow", "end"] - values["aware", "long", "end"],
    }
    for model in ("shallow", "encoder", "regression", "residual"):
        expected[f"rate_ratio_{model}"] = values[model, "wide", "rate_ratio"]
        expected[f"retention_{model}"] = values[model, "wide", "retention"]
        expected[f"slower_{model}"] = log("rate", (model, "wide"), (model, "narrow"))
    expected["rate_ratio_vanilla"] = values["vanilla", "wide", "rate_ratio"]
    assert set(expected) == set(experiment.BANDS)
    for quantity, value in expected.items():
        assert experiment.estimate(frame, quantity).mean == pytest.approx(value), quantity
