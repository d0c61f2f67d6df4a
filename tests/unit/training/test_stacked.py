import math

import pandas as pd
import pytest
import torch

from attention_dynamics.data.streams import generator
from attention_dynamics.models import get_activation, shallow
from attention_dynamics.models._pass import prepare
from attention_dynamics.models.parameters import independent_initialisation
from attention_dynamics.models.shallow import ShallowTransformer
from attention_dynamics.training import stacked
from attention_dynamics.training.descent import DescentConfig, projected_gradient_descent
from attention_dynamics.training.projection import Radii
from attention_dynamics.training.stacked import (
    stack,
    stacked_loss_and_gradients,
    stacked_projected_gradient_descent,
)

DOUBLE = torch.float64


def normal(name, *shape):
    return torch.randn(*shape, generator=generator(0, "stacked", name), dtype=DOUBLE)


def parameters(*heads, dimension=3):
    return [
        independent_initialisation(m, dimension, generator=generator(m, "phi"), dtype=DOUBLE)
        for m in heads
    ]


def models(*heads, query="last", **options):
    return [
        ShallowTransformer.symmetric(m, 3, query=query, seed=s, dtype=DOUBLE, **options)
        for s, m in enumerate(heads)
    ]


def assert_same(found, expected, tolerance=1e-12):
    for block, one in zip(found, expected, strict=True):
        assert block.shape == one.shape
        assert float((block - one).norm()) <= tolerance * float(one.norm())


@pytest.mark.parametrize("heads", [(4, 4), (2, 8, 4), (3, 6), (1, 3), (5,)], ids=str)
def test_stacking_is_undone_exactly(heads):
    before = parameters(*heads)
    stacked = stack(before)
    assert stacked.heads == heads
    for model, found in zip(before, stacked.unstack(), strict=True):
        assert all(torch.equal(block, one) for block, one in zip(found, model, strict=True))
    padded = stacked.parameters.heads * len(heads) - sum(heads)
    assert int((stacked.parameters.c == 0).sum()) == padded
    assert int((stacked.parameters.W == 0).all(dim=(2, 3)).sum()) == padded


def test_partners_stay_half_a_width_apart():
    stacked = stack([model.snapshot() for model in models(2, 8, 4)]).parameters
    first, second = stacked.U.chunk(2, dim=1)
    assert torch.equal(first, second)
    first, second = stacked.c.chunk(2, dim=1)
    assert torch.equal(first, -second)


@pytest.mark.parametrize("engine", ["reference", "eager", "auto"])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])
@pytest.mark.parametrize("heads", [(4, 4), (2, 6, 3)], ids=str)
def test_losses_and_gradients_are_those_of_each_model(heads, shared, engine):
    count = len(heads)
    tokens = normal("x", 7, 5, 3) if shared else normal("x", count, 7, 5, 3)
    mask = normal("mask", *tokens.shape[:-1]) > -0.5
    mask[..., 2] = True
    queries = [normal(f"q {s}", 3) for s in range(count)]
    scales = [m**-0.5 for m in heads]
    y = normal("y", count, 7)
    members = parameters(*heads)
    losses, gradients = stacked_loss_and_gradients(
        stack(members), tokens, y, query=queries, scale=scales, mask=mask, engine=engine
    )
    for s, (member, found) in enumerate(zip(members, gradients.unstack(), strict=True)):
        loss, expected = shallow.loss_and_gradients(
            member, tokens if shared else tokens[s], y[s], query=queries[s], scale=scales[s],
            mask=mask if shared else mask[s], engine="reference",
        )  # fmt: skip
        assert float(losses[s]) == pytest.approx(float(loss), rel=1e-13)
        assert_same(found, expected)
    total = sum(int(torch.count_nonzero(gradient)) for gradient in gradients.parameters)
    own = sum(int(torch.count_nonzero(block)) for one in gradients.unstack() for block in one)
    assert total == own  # padded heads have gradient 0


@pytest.mark.parametrize(
    "radii",
    [None, Radii(c=0.4, U=0.2, W=0.1), Radii(c=0.0, U=None, W=0.2)],
    ids=["free", "bounded", "frozen"],
)
@pytest.mark.parametrize("kind", ["seeds", "widths", "own data"])
def test_stepping_together_is_stepping_one_by_one(kind, radii):
    heads = (2, 6, 4) if kind == "widths" else (4, 4)
    count = len(heads)
    own = kind == "own data"
    tokens, y = (normal("x", count, 9, 5, 3), normal("y", count, 9)) if own else (
        normal("x", 9, 5, 3), normal("y", 9))  # fmt: skip
    config = DescentConfig(steps=30, step_size=0.3, radii=radii, record_every=7)
    options = {"logit_exponent": -0.5} if kind == "widths" else {}
    trained = models(*heads, **options)
    results = stacked_projected_gradient_descent(trained, tokens, y, config, together=True)
    alone = models(*heads, **options)
    for s, (model, single, result) in enumerate(zip(trained, alone, results, strict=True)):
        expected = projected_gradient_descent(
            single, tokens[s] if own else tokens, y[s] if own else y, config
        )
        for name in ("initial", "final", "averaged", "best"):
            assert_same(getattr(result, name), getattr(expected, name))
        assert_same(model.snapshot(), single.snapshot())
        for name in ("best_step", "steps_taken", "stopped_early", "step_size"):
            assert getattr(result, name) == getattr(expected, name)
        assert result.best_loss == pytest.approx(expected.best_loss, rel=1e-12)
        pd.testing.assert_frame_equal(result.history, expected.history, rtol=1e-11, atol=1e-13)
        if radii is not None:
            assert result.history["active_W"].max() > 0
        if radii is not None and radii.c == 0:
            assert torch.equal(result.final.c, result.initial.c)


def test_each_model_may_have_its_own_radii():
    tokens, y = normal("x", 9, 5, 3), normal("y", 9)
    config = DescentConfig(steps=20, step_size=0.5)
    radii = [Radii(c=0.1, U=0.1, W=0.1), Radii(c=None, U=None, W=None)]
    tight, free = stacked_projected_gradient_descent(
        models(4, 4), tokens, y, config, radii=radii, together=True
    )
    assert tight.history["distance_U"].max() == pytest.approx(0.1, rel=1e-12)
    assert free.history["distance_U"].max() > 0.2
    assert free.history["active_U"].max() == 0


def test_on_a_cpu_the_descents_run_one_by_one():
    tokens, y = normal("x", 9, 5, 3), normal("y", 9)
    config = DescentConfig(steps=10, radii=Radii(c=1.0, U=1.0, W=1.0))
    for model, result in zip(
        models(2, 4), stacked_projected_gradient_descent(models(2, 4), tokens, y, config),
        strict=True,
    ):  # fmt: skip
        expected = projected_gradient_descent(model, tokens, y, config)
        assert all(
            torch.equal(block, one) for block, one in zip(result.final, expected.final, strict=True)
        )
        pd.testing.assert_frame_equal(result.history, expected.history)


# NumPy, in which Triton interprets, warns of what a GPU passes over.
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_a_descent_that_diverges_is_named():
    tokens, y = normal("x", 2, 9, 5, 3), normal("y", 2, 9)
    y[1] *= 1e200
    trained = models(4, 4)
    before = [model.snapshot() for model in trained]
    with pytest.raises(FloatingPointError, match=r"loss: inf of models\[1\] at step 0 "):
        stacked_projected_gradient_descent(
            trained, tokens, y, DescentConfig(steps=3), together=True
        )
    for model, start in zip(trained, before, strict=True):
        assert torch.equal(model.snapshot().W, start.W)


def test_errors_say_what_can_be_stacked():
    tokens, y = normal("x", 9, 5, 3), normal("y", 9)
    with pytest.raises(ValueError, match="models: expected at least one, got none"):
        stack([])
    with pytest.raises(ValueError, match=r"models\[1\]: expected d = 3.*got d = 2"):
        stack([*parameters(4), *parameters(4, dimension=2)])
    for field in ({"batch_size": 4}, {"patience": 3}):
        config = DescentConfig(steps=3, **field)
        with pytest.raises(ValueError, match="config: expected batch_size and patience to be None"):
            stacked_projected_gradient_descent(models(4, 4), tokens, y, config)
    with pytest.raises(ValueError, match="expected one activation"):
        stacked_projected_gradient_descent(
            [*models(4), *models(4, activation="erf")], tokens, y, DescentConfig(steps=3)
        )
    with pytest.raises(ValueError, match="radii: expected one for each of 2 models, got 1"):
        stacked_projected_gradient_descent(
            models(4, 4), tokens, y, DescentConfig(steps=3), radii=[Radii(1.0, 1.0, 1.0)]
        )
    with pytest.raises(ValueError, match=r"targets: expected shape \(S, n\)"):
        stacked_loss_and_gradients(stack(parameters(4, 4)), tokens, y, query="last")


def test_averages_do_not_depend_on_the_number_of_recorded_rows():
    tokens, y = normal("x", 9, 5, 3), normal("y", 9)
    results = [
        stacked_projected_gradient_descent(
            models(4, 6), tokens, y, DescentConfig(steps=12, record_every=every), together=True
        )
        for every in (1, 5)
    ]
    for fine, coarse in zip(*results, strict=True):
        assert torch.equal(fine.averaged.W, coarse.averaged.W)
        assert fine.best_step == coarse.best_step
        assert len(fine.history) == 13
        assert list(coarse.history["step"]) == [0, 5, 10, 12]
        assert all(math.isnan(value) for value in coarse.history["validation_loss"])


def test_models_that_share_tokens_may_each_have_a_mask():
    members, tokens = parameters(4, 4), normal("x", 7, 5, 3)
    mask, y = normal("mask", 2, 7, 5) > -0.5, normal("y", 2, 7)
    mask[..., 2] = True
    arguments = {"query": "last", "mask": mask}
    losses, _ = stacked_loss_and_gradients(stack(members), tokens, y, **arguments)
    for s, phi in enumerate(members):
        one = shallow.loss(phi, tokens, y[s], query="last", mask=mask[s])
        torch.testing.assert_close(losses[s], one, rtol=1e-12, atol=0)
    # What one launch on a GPU would see.
    seen = stacked._Problems(
        [prepare(tokens, "last", own, dimension=3) for own in mask], y, get_activation("tanh"),
        [1.0, 1.0], (4, 4), stacked._shared(tokens, mask), "auto",
    )._data  # fmt: skip
    assert torch.equal(seen.mask, mask)
    assert torch.equal(seen.tokens[1], tokens.masked_fill(~mask[1][..., None], 0))


def test_parameters_of_another_dtype_are_refused():
    tokens, y = normal("x", 7, 5, 3).float(), normal("y", 2, 7).float()
    with pytest.raises(TypeError, match="stacked: has dtype"):
        stacked_loss_and_gradients(stack(parameters(4, 4)), tokens, y, query="last")
