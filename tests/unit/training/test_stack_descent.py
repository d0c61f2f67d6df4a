"""Descent on a stack against a loop of its own, and against the descent of one layer."""

import numpy as np
import pytest
import torch

from attention_dynamics.models import shallow_stack
from attention_dynamics.models.shallow import ShallowTransformer
from attention_dynamics.models.stack_parameters import stack_initialisation
from attention_dynamics.training.descent import DescentConfig, projected_gradient_descent
from attention_dynamics.training.projection import ProjectionSet, Radii
from attention_dynamics.training.stack_descent import project, stack_descent


def problem(depth, outputs="last", start="paired"):
    g = torch.Generator().manual_seed(depth)
    phi = stack_initialisation(depth, 4, 3, generator=g, start=start, dtype=torch.float64)
    X = torch.randn(5, 4, 3, generator=g, dtype=torch.float64) / 2
    y = torch.randn(*((5,) if outputs == "last" else (5, 4)), generator=g, dtype=torch.float64)
    return phi, X, y


def test_one_layer_takes_the_steps_of_the_shallow_descent():
    phi, X, y = problem(1)
    config = DescentConfig(steps=12, step_size=0.4, radii=Radii(0.2, 0.3, 0.1))
    run = stack_descent(phi, X, y, config)
    model = ShallowTransformer(phi.readout, query="last")
    other = projected_gradient_descent(model, X, y, config)
    for name in ("final", "averaged"):
        for one, two in zip(getattr(run, name).readout, getattr(other, name), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-13)
    assert run.best_loss == pytest.approx(other.best_loss, rel=1e-12)
    np.testing.assert_allclose(run.history["loss"], other.history["loss"], rtol=1e-12)
    active = other.history[["active_c", "active_U", "active_W"]].sum(axis=1)
    assert list(run.history["active_1"]) == list(active)
    assert run.history["active_1"].max() > 0


@pytest.mark.parametrize("outputs", shallow_stack.OUTPUTS)
def test_the_steps_are_those_of_a_loop(outputs):
    start, X, y = problem(3, outputs, "mixed")
    run = stack_descent(start, X, y, DescentConfig(steps=5, step_size=0.1), outputs=outputs)
    phi, iterates = start, []
    for k in range(5):
        iterates.append(phi)
        loss, gradients = shallow_stack.loss_and_gradients(phi, X, y, outputs=outputs)
        assert run.history["loss"][k] == pytest.approx(float(loss), rel=1e-12)
        norm = torch.cat([block.flatten() for block in gradients.inner[1]]).norm()
        assert run.history["gradient_2"][k] == pytest.approx(float(norm), rel=1e-12)
        phi = phi.zip(gradients, lambda a, g: a - 0.1 * g)
    for one, two in zip(run.final.layers(), phi.layers(), strict=True):
        for a, b in zip(one, two, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
    away = torch.cat([
        (a - b).flatten()
        for a, b in zip(run.final.readout, start.readout, strict=True)
    ]).norm()  # fmt: skip
    assert run.history["distance_3"].iloc[-1] == pytest.approx(float(away), rel=1e-12)
    mean = sum(phi.inner[0].C for phi in iterates) / 5
    torch.testing.assert_close(run.averaged.inner[0].C, mean, rtol=1e-12, atol=1e-13)
    assert run.initial.inner[0].C is not start.inner[0].C
    assert run.best_loss == run.history["loss"].min()


def test_projection_brings_every_layer_into_its_ball():
    centre, _, _ = problem(3)
    far = centre.map(lambda block: block + 1.0)
    radii = Radii(0.2, 0.0, None)
    near, active = project(far, centre, radii)
    assert active == [8, 8, 8]  # four heads, two bounded blocks
    for layer, start in zip(near.layers(), centre.layers(), strict=True):
        moved = (layer[0] - start[0]).reshape(4, -1).norm(dim=1)
        torch.testing.assert_close(moved, torch.full((4,), 0.1, dtype=torch.float64))
        torch.testing.assert_close(layer[1], start[1])
    assert torch.equal(near.readout.W, far.readout.W)
    expected = ProjectionSet(centre.readout, radii).project(far.readout)
    assert all(map(torch.equal, near.readout, expected))
    same, active = project(near, near, Radii(1.0, 1.0, 1.0))
    assert active == [0, 0, 0]
    assert torch.equal(same.inner[0].C, near.inner[0].C)


def test_batches_patience_and_divergence_are_refused():
    phi, X, y = problem(2)
    for option in ({"batch_size": 2}, {"patience": 3}):
        with pytest.raises(ValueError, match="config"):
            stack_descent(phi, X, y, DescentConfig(steps=2, **option))
    with pytest.raises(FloatingPointError, match="reduce step_size"):
        stack_descent(phi, X, y, DescentConfig(steps=9, step_size=1e200))
