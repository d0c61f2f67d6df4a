"""The experiment on certificates: shape, purity, bands, and that its bounds are bounds."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from attention_dynamics.experiments import certificates
from attention_dynamics.experiments.estimates import select
from attention_dynamics.running import Experiment, sweep

SMALL = certificates.PROFILES["smoke"].configs[0]


@pytest.fixture(scope="module")
def smoke():
    return sweep(certificates, "smoke")


def value(rows, quantity):
    return select(rows, quantity)["value"].item()


def test_the_module_has_the_shape_of_an_experiment():
    assert isinstance(certificates, Experiment)
    assert set(certificates.PROFILES) == {"smoke", "book", "repeated", "paper"}
    assert certificates.Config.__dataclass_params__.frozen


def test_the_book_profile_has_a_hundred_runs_of_each_kind():
    book = certificates.PROFILES["book"]
    for descent in ("ProjGD", "ProjSGD"):
        own = [config for config in book.configs if config.descent == descent]
        assert len(own) * len(book.seeds) == 108
        kinds = {(config.query, config.activation) for config in own}
        assert len(kinds) == 6
    repeated = certificates.PROFILES["repeated"]
    assert len(repeated.configs) * len(repeated.seeds) == 100
    used = set(book.seeds) | set(repeated.seeds)
    assert not used & {1000, 1001}, "the trial had other seeds"


def test_the_bands_are_those_fixed_before_the_run():
    assert {name: band.ends for name, band in certificates.BANDS.items()} == {
        "average_ratio_least": (1.0, None),
        "averaged_ratio_least": (1.0, None),
        "expected_ratio": (1.0, None),
        "average_ratio_median": (1.0, 2.0),
        "averaged_ratio_median": (1.0, 2.0),
    }


def test_a_cell_is_a_pure_function_of_config_and_seed():
    first = certificates.run(SMALL, 5)
    pd.testing.assert_frame_equal(certificates.run(SMALL, 5), first, check_exact=True)
    assert tuple(first.columns) == certificates.COLUMNS
    assert first["quantity"].is_unique
    other = certificates.run(SMALL, 6)
    assert (other["value"] != first["value"]).mean() > 0.5


def test_both_descents_of_a_seed_train_the_same_instance():
    gd, sgd = (
        certificates.run(replace(SMALL, descent=descent), 3) for descent in ("ProjGD", "ProjSGD")
    )
    for quantity in ("initial_loss", "heads", "samples", "steps"):
        assert value(gd, quantity) == value(sgd, quantity)
    assert value(gd, "noise") == 0 != value(sgd, "noise")


def test_one_instance_leaves_the_batches_to_the_seed():
    config = replace(SMALL, descent="ProjSGD", instance="one")
    first, second = (certificates.run(config, seed) for seed in (1, 2))
    assert value(first, "initial_loss") == value(second, "initial_loss")
    assert value(first, "noise") != value(second, "noise")


def test_sizes_are_drawn_up_to_those_given_or_are_those_given():
    for seed in range(8):
        rows = certificates.run(SMALL, seed)
        assert 2 <= value(rows, "heads") <= SMALL.heads
        assert 4 <= value(rows, "samples") <= SMALL.samples
        assert 10 <= value(rows, "steps") <= SMALL.steps
    exact = certificates.run(replace(SMALL, drawn=False), 0)
    assert value(exact, "heads") == SMALL.heads
    assert value(exact, "samples") == SMALL.samples
    assert value(exact, "steps") == SMALL.steps


def test_every_certificate_is_an_upper_bound(smoke):
    table = smoke.pivot(
        index=["descent", "query", "activation", "targets", "seed"], columns="quantity",
        values="value",
    )  # fmt: skip
    assert (table["average_ratio"] >= 1 - 1e-12).all()
    assert (table["averaged_ratio"] >= 1 - 1e-12).all()
    assert (table["least_loss"] <= table["average_loss"]).all()
    assert (table["slack_least"] >= -1e-12).all()
    terms = table["optimisation"] + table["approximation"] + table["linearisation"]
    assert (table["averaged_bound"] <= terms**2 * (1 + 1e-12)).all()


def test_the_summary_has_one_row_a_descent_and_band(smoke):
    table = certificates.summarise(smoke)
    assert len(table) == 2 * len(certificates.BANDS) - 1
    assert ((table["lower"] <= table["estimate"]) & (table["estimate"] <= table["upper"])).all()
    assert table[table["quantity"].str.endswith("least")]["inside"].all()


def test_the_expected_bound_is_that_of_one_run_where_all_runs_agree():
    # Without noise the bound in expectation over equal runs is the certificate of one.
    gd = certificates.run(SMALL, 1).pivot(index="seed", columns="quantity", values="value")
    same = pd.concat([gd, gd])
    assert certificates.expected_bound(same) == pytest.approx(gd["average_bound"].item())


def test_the_interval_of_a_median_is_that_of_the_binomial_law():
    # Of 108 values the order statistics 44 and 65 hold the median with at least 95 %.
    table = pd.DataFrame({"average_ratio": np.arange(1.0, 109.0)})
    found = certificates.estimate(table, "average_ratio_median")
    assert (found.lower, found.mean, found.upper) == (44.0, 54.5, 65.0)


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="'sigmoid'"):
        certificates.run(replace(SMALL, activation="sigmoid"), 0)


def test_an_instance_that_is_kept_is_left_as_it_was_drawn():
    config = replace(SMALL, instance="one", descent="ProjSGD")
    first = certificates.run(config, 1)
    certificates.run(config, 2)  # the same instance, other batches
    kept = certificates.run(config, 1)
    certificates.run(SMALL, 5)  # another instance: the first one is drawn anew
    pd.testing.assert_frame_equal(first, kept, check_exact=True)
    pd.testing.assert_frame_equal(first, certificates.run(config, 1), check_exact=True)
