"""Checks on numbers fail when they should, and say where."""

from typing import NamedTuple

import numpy as np
import pytest
import torch

from attention_dynamics.verification import CheckFailed, check


class Blocks(NamedTuple):
    """A pair of named tensors, like the parameters of a model."""

    c: torch.Tensor
    U: torch.Tensor


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


VALUES = tensor(1.0, -2.0, 3.0)


def test_close_records_the_worst_relative_error():
    record = check.close("eq-a", VALUES * (1 + 3e-12), VALUES, wrong=-VALUES)
    assert record.kind == "autograd"
    assert record.detail["worst_relative_error"] == pytest.approx(3e-12, rel=1e-3)
    assert record.evidence == "agrees to 3e-12"
    assert record.statement == "VALUES * (1 + 3e-12) ≈ VALUES"


def test_close_names_the_entry_that_is_off():
    with pytest.raises(
        CheckFailed, match=r"actual\[1\] = -2.00002 against -2.0, relative error 1e-05"
    ):
        check.close("eq-a", tensor(1.0, -2.00002, 3.0), VALUES, wrong=-VALUES)


def test_close_compares_blocks_by_name():
    good = Blocks(VALUES, VALUES.outer(VALUES))
    copy = Blocks(VALUES.clone(), VALUES.outer(VALUES))
    check.close("eq-a", good, copy, wrong=Blocks(VALUES.clone(), -good.U))
    off = good.U.clone()
    off[2, 0] += 1
    with pytest.raises(CheckFailed, match=r"actual.U\[2, 0\]"):
        check.close("eq-a", Blocks(VALUES, off), copy, wrong=Blocks(2 * VALUES, good.U))
    with pytest.raises(ValueError, match="2 blocks and expected has 1"):
        check.close("eq-a", good, VALUES.clone(), wrong=-VALUES)


def test_close_calls_what_can_be_called():
    check.close("eq-a", lambda: VALUES, VALUES.numpy().copy(), wrong=lambda: VALUES + 1)


@pytest.mark.parametrize(
    ("actual", "error", "match"),
    [
        (tensor(1.0, float("nan"), 3.0), CheckFailed, r"actual\[1\] = nan is not finite"),
        (tensor(1.0, float("inf"), 3.0), CheckFailed, "not finite"),
        (tensor(), ValueError, "empty"),
        ((), ValueError, "empty"),
        (VALUES[:2].clone(), ValueError, r"shape \(2,\) and expected has shape \(3,\)"),
        (VALUES.float(), TypeError, "float32: checks compare float64"),
        (VALUES[None], ValueError, "nothing is broadcast"),
    ],
)
def test_close_refuses_what_compares_nothing(actual, error, match):
    with pytest.raises(error, match=match):
        check.close("eq-a", actual, VALUES.clone(), wrong=-VALUES)


def test_close_refuses_an_object_compared_with_itself():
    with pytest.raises(ValueError, match="same object"):
        check.close("eq-a", VALUES, VALUES, wrong=-VALUES)
    with pytest.raises(ValueError, match="share their memory"):
        check.close("eq-a", VALUES, VALUES.numpy(), wrong=-VALUES)
    with pytest.raises(ValueError, match="share their memory"):
        check.close("eq-a", VALUES.view(3, 1), VALUES.view(3, 1), wrong=-VALUES)


def test_close_takes_float32_only_when_told():
    single = VALUES.float()
    record = check.close(
        "eq-a", single * (1 + 1e-6), single, wrong=-single, dtype="float32", rtol=1e-5
    )
    assert record.detail["dtype"] == "float32"


def test_a_twin_of_close_has_to_miss_by_a_thousand_tolerances():
    with pytest.raises(CheckFailed, match="misses by only"):
        check.close("eq-a", VALUES.clone(), VALUES, wrong=VALUES * (1 + 1e-8))
    check.close("eq-a", VALUES.clone(), VALUES, wrong=VALUES * (1 + 1e-6))


def test_an_exact_zero_may_be_expected():
    zero = torch.zeros(3, dtype=torch.float64)
    record = check.close("eq-a", zero.clone(), zero, wrong=zero + 1)
    assert record.evidence == "agrees exactly"
    with pytest.raises(CheckFailed, match=r"against 0\.0"):
        check.close("eq-a", zero + 1e-12, zero, wrong=zero + 1)
    check.close("eq-a", zero + 1e-12, zero, wrong=zero + 1, atol=1e-11)


def test_bound_reports_the_tightest_ratio():
    record = check.bound("lem-a", [0.2, 0.49999], 0.5, wrong=0.49, at_least=0.999, attack="ascent")
    assert record.kind == "attacked"
    assert record.detail["tightest_ratio"] == pytest.approx(0.99998)
    assert record.evidence == "attacked: tightest ratio 0.9999 (ascent)"


def test_a_bound_that_is_passed_fails():
    with pytest.raises(CheckFailed, match=r"observed\[1\] = .*0.51.* passes the bound"):
        check.bound("lem-a", [0.2, 0.51], 0.5, wrong=0.4)


def test_rounding_of_a_bound_that_is_reached_is_forgiven():
    record = check.bound("lem-a", [0.5 * (1 + 4e-16)], 0.5, wrong=0.4)
    assert record.detail["tightest_ratio"] == 1.0


def test_a_promised_ratio_must_be_reached():
    with pytest.raises(CheckFailed, match=r"at_least=0\.999 was promised"):
        check.bound("lem-a", [0.4], 0.5, wrong=0.3, at_least=0.999)


def test_a_wrong_bound_must_be_violated_and_smaller():
    with pytest.raises(CheckFailed, match="no observation violates"):
        check.bound("lem-a", [0.3], 0.5, wrong=0.4)
    with pytest.raises(ValueError, match="smaller"):
        check.bound("lem-a", [0.3], 0.5, wrong=0.6)
    with pytest.raises(ValueError, match="must be positive"):
        check.bound("lem-a", [0.0], 0.0, wrong=-1.0)
    with pytest.raises(ValueError, match="empty"):
        check.bound("lem-a", np.array([]), 0.5, wrong=0.1)
    with pytest.raises(CheckFailed, match="not finite"):
        check.bound("lem-a", [float("nan")], 0.5, wrong=0.1)


def test_bounds_may_differ_from_observation_to_observation():
    observed, limit = np.array([1.0, 2.0]), np.array([1.0, 2.5])
    assert check.bound("lem-a", observed, limit, wrong=limit / 2).detail["tightest_ratio"] == 1.0
    with pytest.raises(CheckFailed, match=r"observed\[1\]"):
        check.bound("lem-a", observed, limit[::-1].copy(), wrong=limit / 3)


def test_band_wants_the_whole_interval():
    record = check.band("obs-a", -0.49, (-0.52, -0.46), (-0.6, -0.4), wrong=(-1.1, -0.9))
    assert record.status == "passed"
    assert record.evidence == "band: -0.49 [-0.52, -0.46] inside [-0.6, -0.4]"
    with pytest.raises(CheckFailed, match="does not lie inside the band"):
        check.band("obs-a", -0.49, (-0.62, -0.46), (-0.6, -0.4), wrong=(-1.1, -0.9))
    with pytest.raises(CheckFailed, match="verdict of the right one"):
        check.band("obs-a", -0.49, (-0.52, -0.46), (-0.6, -0.4), wrong=(-0.7, -0.3))


def test_band_ends_may_be_open():
    check.band("obs-a", -0.3, (-0.4, -0.2), (None, 0.0), wrong=(0.0, None))
    with pytest.raises(ValueError, match="one end may be None"):
        check.band("obs-a", -0.3, (-0.4, -0.2), (None, None), wrong=(0.0, None))


def test_a_missed_band_is_amber_and_says_why():
    record = check.band(
        "obs-a", -0.36, (-0.38, -0.34), (-0.6, -0.4), wrong=(-0.6, -0.3),
        missed_because="limited by the number of steps",
    )  # fmt: skip
    assert record.status == "missed"
    assert record.evidence.endswith("misses [-0.6, -0.4]: limited by the number of steps")
    with pytest.raises(CheckFailed, match="missed_because has to go"):
        check.band(
            "obs-a", -0.5, (-0.52, -0.48), (-0.6, -0.4), wrong=(-0.9, -0.3), missed_because="so"
        )
    with pytest.raises(CheckFailed, match="twin that is met"):
        check.band(
            "obs-a", -0.36, (-0.38, -0.34), (-0.6, -0.4), wrong=(1.0, 2.0), missed_because="so"
        )
    with pytest.raises(ValueError, match="must say why"):
        check.band("obs-a", -0.36, (-0.38, -0.34), (-0.6, -0.4), wrong=(-1, 0), missed_because=" ")


@pytest.mark.parametrize("interval", [(-0.4, -0.2), (-0.6, float("nan")), (-0.6, float("inf"))])
def test_an_estimate_lies_in_its_finite_interval(interval):
    with pytest.raises(ValueError, match="must lie in a finite interval"):
        check.band("obs-a", -0.5, interval, (-0.6, -0.4), wrong=(0.0, 1.0))


# What must not pass ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_close_sees_shared_memory_whatever_the_type(dtype):
    values = torch.ones(3, dtype=dtype)
    with pytest.raises(ValueError, match="share their memory"):
        check.close(
            "eq-a", values, values.view(3), wrong=torch.full((3,), 7.0), dtype="float32", rtol=1e-5
        )


def test_close_pairs_the_blocks_of_mappings_by_their_keys():
    actual = {"c": VALUES, "U": 2 * VALUES}
    turned = {"U": 2 * VALUES, "c": VALUES.clone()}
    check.close("eq-a", actual, turned, wrong={"U": VALUES, "c": VALUES.clone()})
    with pytest.raises(ValueError, match="use the same keys on both sides"):
        check.close("eq-a", actual, {"c": VALUES.clone(), "W": 2 * VALUES}, wrong=turned)


def test_close_does_not_hide_an_error_behind_its_absolute_tolerance():
    record = check.close("eq-a", VALUES + 1e-4, VALUES, wrong=-VALUES, atol=1e-3)
    assert record.detail["worst_relative_error"] == pytest.approx(1e-4 / 3)
    tiny = check.close("eq-a", tensor(1.0, 1e-17), tensor(1.0, 0.0), wrong=-VALUES[:2], atol=1e-14)
    assert tiny.detail["worst_relative_error"] == pytest.approx(1e-17)


@pytest.mark.parametrize(
    ("rtol", "atol"),
    [(0.5, 0.0), (float("inf"), 0.0), (float("nan"), 0.0), (-1.0, 0.0), (1e-9, float("nan"))],
)
def test_close_wants_tolerances_that_are_tolerances(rtol, atol):
    with pytest.raises(ValueError, match="rtol="):
        check.close("eq-a", VALUES * 1.4, VALUES, wrong=-1e9 * VALUES, rtol=rtol, atol=atol)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", ["observed", "bound", "wrong"])
def test_bound_takes_finite_numbers_only(place, bad):
    sides = {"observed": [0.5, 0.9], "bound": [1.0, 1.0], "wrong": [0.8, 0.8]}
    sides[place] = [sides[place][0], bad]
    with pytest.raises(CheckFailed, match="is not finite"):
        check.bound("lem-a", sides["observed"], sides["bound"], wrong=sides["wrong"])


@pytest.mark.parametrize(
    ("observed", "bound", "wrong", "match"),
    [
        ([], 1.0, 0.5, "is empty"),
        ([0.9], -1.0, -2.0, "must be positive"),
        ([0.9], 0.0, -1.0, "must be positive"),
        ([0.9], 1.0, -1.0, "smaller than bound"),
        ([0.9], 1.0, 1.5, "smaller than bound"),
        ([0.9, 0.8], [1.0, 1.0, 1.0], 0.5, r"bound has shape \(3,\) and observed has shape \(2,\)"),
        ([0.9, 0.8], 1.0, [0.5, 0.5, 0.5], "wrong has shape"),
    ],
)
def test_bound_wants_bounds_that_bound(observed, bound, wrong, match):
    with pytest.raises(ValueError, match=match):
        check.bound("lem-a", observed, bound, wrong=wrong)


def test_bound_is_not_its_own_witness():
    with pytest.raises(ValueError, match="share their memory"):
        check.bound("lem-a", VALUES[::2], VALUES[::2], wrong=0.5)


@pytest.mark.parametrize("at_least", [float("nan"), 0.0, -1.0, 1.5])
def test_bound_promises_a_ratio(at_least):
    with pytest.raises(ValueError, match="at_least"):
        check.bound("lem-a", [0.001], 1.0, wrong=0.0005, at_least=at_least)


NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    "ends", [(NAN, 1.0), (0.0, NAN), (NAN, NAN), (-INFINITY, INFINITY), (0.0, INFINITY), (1.0, 0.0)]
)
def test_band_ends_are_finite_or_open(ends):
    with pytest.raises(ValueError, match="needs finite low < high"):
        check.band("obs-a", 0.5, (0.4, 0.6), (0.0, 1.0), wrong=ends)
    with pytest.raises(ValueError, match="needs finite low < high"):
        check.band("obs-a", 0.5, (0.4, 0.6), ends, wrong=(0.0, 1.0), missed_because="no number")


@pytest.mark.parametrize(
    ("estimate", "interval"),
    [
        (NAN, (0.4, 0.6)),
        (0.5, (0.6, 0.4)),
        (0.5, (NAN, 0.6)),
        (0.5, (-INFINITY, 0.6)),
        (0.7, (0.4, 0.6)),
        (0.5, (0.4, 0.6, 0.7)),
    ],
)
def test_band_wants_an_interval_around_the_estimate(estimate, interval):
    with pytest.raises(ValueError, match=r"interval|unpack"):
        check.band("obs-a", estimate, interval, (0.0, 1.0), wrong=(0.5, 1.0))


def test_a_band_open_to_one_side_holds_the_whole_interval():
    assert check.band("obs-a", 0.5, (0.4, 0.6), (None, 0.6), wrong=(0.45, None)).status == "passed"
    with pytest.raises(CheckFailed, match="does not lie inside"):
        check.band("obs-a", 0.5, (0.4, 0.6), (0.41, None), wrong=(None, 0.5))
