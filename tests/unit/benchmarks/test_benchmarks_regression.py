"""The regression benchmark: its peers compute the model, and a wrong step of ours is refused."""

import math

import pytest
import torch

from attention_dynamics.models import regression
from benchmarks import regression_step
from benchmarks.table import Disagreement, Row, Settings, run_case

QUICK = Settings(quick=True)


@pytest.mark.parametrize("shape", regression_step.QUICK, ids=str)
@pytest.mark.parametrize(
    "pool",
    [regression_step.fused_attention, regression_step.plain_softmax],
    ids=lambda f: f.__name__,
)
def test_the_peers_are_the_model(shape, pool):
    factors, data = regression_step.task(shape)
    expected = regression.attend(factors, data.queries, data.contexts)
    actual = pool(data.queries @ factors.B, data.contexts)
    torch.testing.assert_close(actual, expected)
    loss, *gradients = regression_step.through_autograd(pool, factors, data)
    expected_loss, expected_gradients = regression.loss_and_gradients(factors, *data)
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(tuple(gradients), tuple(expected_gradients))
    assert data.contexts.dtype == shape.dtype


def test_every_quick_case_is_measured():
    for case in regression_step.cases(QUICK):
        rows = [row for row in run_case("regression_step", case) if isinstance(row, Row)]
        assert [row.baseline for row in rows] == ["fused attention", "plain softmax", "ours"]
        assert not any(row.error for row in rows), rows
        assert all(row.ratio > 0 for row in rows)
        compared = [row for row in rows if not math.isnan(row.tolerance)]
        assert len(compared) == 2
        assert all(row.difference <= row.tolerance for row in compared)


def test_the_full_sizes_hold_both_kinds_of_context_and_both_precisions():
    names = {case.name for case in regression_step.cases(Settings())}
    assert len(names) == len(regression_step.SHAPES)
    for word in ("shared", "own", "float32", "float64"):
        assert any(word in name for name in names)


def test_a_wrong_gradient_is_refused(monkeypatch):
    correct = regression_step.closed_form
    monkeypatch.setattr(
        regression_step, "closed_form",
        lambda factors, data: (lambda loss, A, B: (loss, A, 1.01 * B))(*correct(factors, data)),
    )  # fmt: skip
    with pytest.raises(Disagreement, match="differ by"):
        regression_step.measure(regression_step.QUICK[0], QUICK)


def test_the_work_is_four_products_and_one_exponential_a_pair():
    work = regression_step.Shape(10, 20, 3).work()
    assert (work.flops, work.exponentials) == (8 * 3 * 200, 200)
