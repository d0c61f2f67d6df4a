"""The adversary finds maxima that are known, and reports the best it saw."""

import pytest
import torch

from attention_dynamics.verification import projected_ascent

KAPPA = 4 / (3 * 3**0.5)


def into_ball(points):
    return points / points.norm(dim=-1, keepdim=True).clamp_min(1)


def starts(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def test_a_linear_maximum_on_the_ball_is_reached():
    direction = torch.tensor([3.0, 4.0, 0.0], dtype=torch.float64)
    values, points = projected_ascent(lambda x: x @ direction, starts(6, 3), into_ball, steps=300)
    assert values.min() > 5 * (1 - 1e-6)
    assert torch.allclose(points, direction / 5, atol=1e-3)


def test_a_sharp_bound_is_reached_to_a_part_in_a_thousand():
    """The third cumulant of scalar tokens in [-1, 1] never passes 4/(3 sqrt 3)."""

    def cumulant(tokens, logits):
        weights = logits.softmax(-1)
        centred = tokens - (weights * tokens).sum(-1, keepdim=True)
        return (weights * centred**3).sum(-1)

    def project(tokens, logits):
        return tokens.clamp(-1, 1), logits

    values, _ = projected_ascent(
        cumulant, (starts(16, 32), starts(16, 32)), project, steps=600, step_size=1.0
    )
    assert values.max() <= KAPPA + 1e-12
    assert values.max() > 0.999 * KAPPA


def test_the_best_point_of_each_start_is_kept():
    """A step far too long still never loses the start, nor mixes two starts."""
    begin = torch.tensor([[0.1], [2.0]], dtype=torch.float64)
    values, points = projected_ascent(
        lambda x: -(x[:, 0] ** 2), begin, lambda x: x, steps=3, step_size=50.0, final_step_size=40.0
    )
    assert (values >= torch.tensor([-0.01 - 1e-15, -4.0], dtype=torch.float64)).all()
    assert torch.allclose(-(points[:, 0] ** 2), values)


def test_the_same_starts_give_the_same_result():
    def run():
        return projected_ascent(lambda x: x.sin().sum(-1), starts(4, 5), into_ball, steps=20)

    first, second = run(), run()
    assert torch.equal(first.values, second.values)
    assert torch.equal(first.points, second.points)


def test_a_flat_objective_moves_nothing():
    begin = starts(3, 2)
    values, points = projected_ascent(lambda x: (0 * x).sum(-1), begin, lambda x: x, steps=5)
    assert torch.equal(points, begin)
    assert torch.equal(values, torch.zeros(3, dtype=torch.float64))


def test_bad_input_is_named():
    with pytest.raises(TypeError, match="float64"):
        projected_ascent(lambda x: x.sum(-1), starts(2, 2).float(), into_ball)
    with pytest.raises(ValueError, match=r"one value a start, \(2,\)"):
        projected_ascent(lambda x: x.sum(), starts(2, 2), into_ball)
    with pytest.raises(ValueError, match="not finite"):
        projected_ascent(lambda x: x.sum(-1) / 0, starts(2, 2), into_ball)
