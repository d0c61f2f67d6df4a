r"""The width experiment: shape, seeds, determinism, and what its numbers must satisfy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from attention_dynamics.experiments import width
from attention_dynamics.experiments._teacher_problem import teacher_problem
from attention_dynamics.experiments.estimates import Estimate, select
from attention_dynamics.models import shallow
from attention_dynamics.models.parameters import independent_initialisation
from attention_dynamics.running import Experiment, process_pool, sweep

SMALL = width.PROFILES["smoke"].configs[1]


@pytest.fixture(scope="module")
def smoke():
    return sweep(width, "smoke")


def value(rows, quantity):
    return select(rows, quantity)["value"].item()


def test_the_module_has_the_shape_of_an_experiment():
    assert isinstance(width, Experiment)
    assert width.NAME == "width"
    assert set(width.PROFILES) == {"smoke", "book", "paper"}
    assert width.Config.__dataclass_params__.frozen


def test_the_paper_profile_has_the_papers_sizes():
    configs, seeds = width.PROFILES["paper"].configs, width.PROFILES["paper"].seeds
    assert [config.heads for config in configs] == [8, 16, 32, 64, 128, 256]
    assert seeds == tuple(range(10))
    assert len({replace(config, heads=2) for config in configs}) == 1
    sizes = vars(configs[0])
    expected = {
        "dimension": 8, "length": 16, "samples": 5000, "validation_fraction": 0.2,
        "teacher_heads": 8192, "anchors": 16, "transport_norm": 3.0, "projection_radius": 3.0,
        "steps": 4000, "step_scale": 1.75, "activation": "tanh",
    }  # fmt: skip
    assert {name: sizes[name] for name in expected} == expected


def test_the_book_profile_differs_from_the_papers_in_what_costs_time_only():
    cheap = {"samples", "steps", "adversary_starts", "adversary_steps"}
    for small, full in zip(
        width.PROFILES["book"].configs, width.PROFILES["paper"].configs, strict=True
    ):
        assert {name for name in vars(small) if vars(small)[name] != vars(full)[name]} == cheap
    assert width.PROFILES["book"].seeds == width.PROFILES["paper"].seeds


def test_the_bands_are_those_of_the_theory():
    assert {name: band.ends for name, band in width.BANDS.items()} == {
        "approximation_sup": (-0.6, -0.4),
        "approximation_rms": (-0.6, -0.4),
        "linearisation_adversarial": (-0.6, -0.4),
        "linearisation_random": (-1.15, -0.85),
        "training_loss_minimum": (None, 0.0),
    }


def test_a_cell_is_a_pure_function_of_config_and_seed():
    first = width.run(SMALL, 5)
    teacher_problem.cache_clear()
    pd.testing.assert_frame_equal(width.run(SMALL, 5), first, check_exact=True)
    assert tuple(first.columns) == width.COLUMNS
    assert first["quantity"].is_unique
    other = width.run(SMALL, 6)
    assert (other["value"] != first["value"]).mean() > 0.8


def test_the_order_of_the_cells_changes_no_number(smoke):
    configs = width.PROFILES["smoke"].configs[::-1]
    again = sweep(width, configs=configs, seeds=(2, 1, 0))
    order = ["heads", "seed", "quantity"]
    pd.testing.assert_frame_equal(
        again.sort_values(order, ignore_index=True),
        smoke.sort_values(order, ignore_index=True),
        check_exact=True,
    )


def test_a_worker_process_gives_the_same_numbers(smoke):
    config = width.PROFILES["smoke"].configs[0]
    with process_pool(1) as pool:
        rows = sweep(width, configs=[config], seeds=[0, 1], executor=pool)
    here = smoke[(smoke["heads"] == config.heads) & (smoke["seed"] < 2)].reset_index(drop=True)
    pd.testing.assert_frame_equal(rows, here, rtol=1e-6)


def test_all_widths_of_a_seed_share_their_targets_and_seeds_do_not(smoke):
    variances = select(smoke, "target_variance").groupby("seed")["value"].unique()
    assert (variances.map(len) == 1).all()
    assert variances.map(lambda values: values[0]).is_unique


def test_what_is_known_without_measuring_holds(smoke):
    table = smoke.pivot(index=["heads", "seed"], columns="quantity", values="value")
    assert (table["training_loss_minimum"] <= table["training_loss_final"]).all()
    assert (table["training_loss_minimum"] < table["target_variance"] * 2).all()
    assert (table["approximation_rms"] <= table["approximation_sup"]).all()
    assert (table["linearisation_adversarial_mean"] <= table["linearisation_adversarial"]).all()
    assert (table["linearisation_random"] < table["linearisation_adversarial"]).all()
    for error in ("approximation_sup", "approximation_rms"):
        assert (table[error] <= table[f"{error}_bound"]).all()
    assert (table["linearisation_adversarial"] <= table["linearisation_bound"]).all()
    radius = SMALL.projection_radius * (1 + 1e-5)
    assert (table[["distance_c", "distance_U", "distance_W"]] <= radius).all(axis=None)
    relative = table["training_loss_final_relative"] * table["target_variance"]
    np.testing.assert_allclose(relative, table["training_loss_final"], rtol=1e-12)


def test_pairing_the_heads_leaves_half_of_them_independent():
    # RMS of a mean of N independent terms is N^{-1/2}: paired heads cost a factor sqrt(2)
    config = replace(SMALL, heads=16, samples=25, teacher_heads=4096, steps=1)
    rows = pd.concat([width.run(config, seed) for seed in range(40)])
    paired, unpaired = (
        (select(rows, f"approximation_rms{suffix}")["value"] ** 2).mean()
        for suffix in ("", "_unpaired")
    )
    assert 1.4 < paired / unpaired < 2.9


def test_the_last_token_can_be_the_query():
    last = width.run(replace(SMALL, query="last"), 0)
    fixed = width.run(SMALL, 0)
    assert value(last, "target_variance") != value(fixed, "target_variance")
    with pytest.raises(ValueError, match="'fixed' or 'last', got 'first'"):
        width.run(replace(SMALL, query="first"), 0)


def test_an_odd_width_is_refused_by_name():
    with pytest.raises(ValueError, match="m must be even, got m = 5"):
        width.run(replace(SMALL, heads=5), 0)


def synthetic(exponents):
    random = np.random.default_rng(0)
    return pd.DataFrame(
        {"heads": m, "seed": seed, "quantity": quantity,
         "value": (1 + seed) * m**exponent * np.exp(0.02 * random.standard_normal())}
        for quantity, exponent in exponents.items() for seed in range(5) for m in (8, 16, 32, 64)
    )  # fmt: skip


THEORY = {
    "training_loss_minimum_unpaired": -0.3,
    "approximation_sup": -0.5,
    "approximation_rms": -0.5,
    "linearisation_adversarial": -0.5,
    "linearisation_random": -1.0,
    "training_loss_minimum": -0.3,
}


def test_summarise_finds_the_exponents_of_the_theory_inside_their_bands():
    summary = width.summarise(synthetic(THEORY)).set_index("quantity")
    slopes = summary["slope"].drop(width.UNPAIRED)
    np.testing.assert_allclose(slopes, [THEORY[name] for name in slopes.index], atol=0.03)
    assert summary["inside"].drop(width.UNPAIRED).all()
    assert (summary["seeds"] == 5).all()


@pytest.mark.parametrize(
    ("quantity", "exponent"),
    [("approximation_sup", -0.35), ("linearisation_random", -0.5), ("training_loss_minimum", 0.1)],
)
def test_summarise_reports_a_miss(quantity, exponent):
    summary = width.summarise(synthetic({**THEORY, quantity: exponent})).set_index("quantity")
    assert not summary.loc[quantity, "inside"]
    assert summary.drop([quantity, width.UNPAIRED])["inside"].all()


def test_unpaired_heads_start_from_a_random_function_and_pay_for_it(smoke):
    table = smoke.pivot(index=["heads", "seed"], columns="quantity", values="value")
    # the random function varies from seed to seed; on average it is far larger than the target
    assert table["training_loss_initial_unpaired"].mean() > 2 * table["target_variance"].mean()
    problem = width._problem(SMALL, 1, "cpu")
    stream = width._stream(1, "unpaired", SMALL)
    unpaired = independent_initialisation(SMALL.heads, SMALL.dimension, generator=stream)
    loss = shallow.loss(unpaired, problem.tokens, problem.targets, query=problem.query)
    initial = table["training_loss_initial_unpaired"].loc[SMALL.heads, 1]
    assert float(loss) == pytest.approx(initial, rel=1e-5)


@pytest.mark.parametrize(("factor", "inside"), [(3.0, True), (0.5, False)])
def test_the_ratio_of_the_losses_is_a_geometric_mean_over_widths(factor, inside):
    frame = synthetic(THEORY)
    paired = frame["quantity"] == "training_loss_minimum"
    unpaired = frame[paired].assign(quantity="training_loss_minimum_unpaired")
    noise = np.where(unpaired["heads"] == 8, 4.0, 1.0) * (1 + 0.001 * unpaired["seed"])
    unpaired["value"] = unpaired["value"] * factor * noise / 4**0.25
    kept = frame[frame["quantity"] != "training_loss_minimum_unpaired"]
    row = width.summarise(pd.concat([kept, unpaired])).set_index("quantity").loc[width.UNPAIRED]
    assert row["slope"] == pytest.approx(factor, rel=0.01)
    assert row["lower"] < row["slope"] < row["upper"]
    assert row["seeds"] == 5
    assert row["inside"] == inside


def test_an_interval_that_touches_zero_does_not_show_a_sign():
    band = width.BANDS["training_loss_minimum"]
    assert not band.contains(Estimate(-0.1, -0.21, 0.01, 5))
