"""What the Triton kernels must do; test_triton_kernel.py runs this in processes of its own.

Triton decides when it is imported whether it interprets its kernels, so a process that has been
told to can do nothing else with Triton. ``TRITON_DEVICE`` says where the tensors lie.
"""

import os

import pytest
import torch

from attention_dynamics.data.streams import generator
from attention_dynamics.models import shallow
from attention_dynamics.models._pass import Inputs
from attention_dynamics.models.activations import ERF_PLAIN, TANH, Activation, get_activation
from attention_dynamics.models.engines import triton_launch
from attention_dynamics.models.engines.triton import Triton
from attention_dynamics.models.engines.triton_launch import Stack
from attention_dynamics.models.parameters import Parameters, symmetric_initialisation
from attention_dynamics.models.shallow import ShallowTransformer
from attention_dynamics.training.descent import DescentConfig, projected_gradient_descent
from attention_dynamics.training.projection import Radii
from attention_dynamics.training.stacked import (
    stack,
    stacked_loss_and_gradients,
    stacked_projected_gradient_descent,
)

DEVICE = os.environ["TRITON_DEVICE"]
ENGINE = Triton()
SCALE = 0.7
#: The same function under another name: the kernels do not know it, and take two passes.
OWN = Activation("own", TANH.value, TANH.first, TANH.second, TANH.bounds)

# n, T, d, m: single tokens, coordinates and heads; heads that no power of two fits; one block of
# tokens, several, a last one that is not full; d on both sides of what one pass holds.
SHAPES = [(3, 1, 1, 1), (4, 5, 3, 20), (9, 16, 8, 8), (2, 13, 8, 5), (2, 13, 17, 4), (2, 18, 1, 2)]


def problem(shape, *, fixed, masked=False, dtype=torch.float64, size=1.0):
    samples, length, dimension, heads = shape
    stream = generator(3, *shape)

    def normal(*sizes):
        return torch.randn(*sizes, generator=stream, dtype=torch.float64).to(DEVICE, dtype)

    mask = None
    if masked:
        mask = torch.rand(samples, length, generator=stream) < 0.5
        mask[torch.arange(samples), torch.arange(samples) % length] = True
        mask = mask.to(DEVICE)
    tokens = normal(samples, length, dimension)
    if masked:
        tokens = tokens.masked_fill(~mask[..., None], 0)
    query = normal(dimension) if fixed else normal(samples, dimension)
    parameters = Parameters(
        normal(heads), normal(heads, dimension), size * normal(heads, dimension, dimension)
    )
    return Inputs(tokens, query, mask), parameters, normal(samples)


def heads_of(inputs, U, W):
    """Weights (n, m, T) and s (n, m), from the formulas."""
    query = inputs.query.expand(len(inputs.tokens), -1)
    logits = SCALE * torch.einsum("ntk,mkl,nl->nmt", inputs.tokens, W, query)
    if inputs.mask is not None:
        logits = logits.masked_fill(~inputs.mask[:, None], -torch.inf)
    alpha = torch.softmax(logits, dim=-1)
    return alpha, torch.einsum("nmt,ntk,mk->nm", alpha, inputs.tokens, U)


def value(inputs, parameters, sigma):
    s = heads_of(inputs, parameters.U, parameters.W)[1]
    return (parameters.c * sigma.value(s)).sum(dim=-1) * parameters.heads**-0.5


def gradient(inputs, parameters, sigma, cotangent):
    live = parameters.map(lambda block: block.clone().requires_grad_())
    f = value(inputs, live, sigma)
    return f.detach(), Parameters(*torch.autograd.grad(f, list(live), cotangent(f.detach())))


def assert_close(found, expected, tolerance):
    assert found.shape == expected.shape
    assert torch.isfinite(found).all()
    assert float((found - expected).norm()) <= tolerance * float(expected.norm()) + 1e-300


def assert_step(inputs, parameters, sigma, y, tolerance, exact=None):
    """Compare a step with autograd, of ``exact`` in double precision if given."""
    f, found = ENGINE.step(inputs, parameters, sigma, SCALE, y)
    exact_inputs, exact_parameters = exact or (inputs, parameters)
    expected_f, expected = gradient(
        exact_inputs, exact_parameters, sigma, lambda f: 2 / len(f) * (f - y.to(f.dtype))
    )
    assert_close(f.to(expected_f.dtype), expected_f, tolerance)
    for block, expected_block in zip(found, expected, strict=True):
        assert_close(block.to(expected_block.dtype), expected_block, tolerance)


@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "per-sample"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_steps_are_those_of_autograd(shape, fixed):
    inputs, parameters, y = problem(shape, fixed=fixed)
    assert_step(inputs, parameters, TANH, y, 1e-12)


@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "per-sample"])
@pytest.mark.parametrize("shape", [(5, 7, 3, 6), (2, 21, 9, 4)], ids=str)
def test_masked_tokens_are_not_there(shape, fixed):
    inputs, parameters, y = problem(shape, fixed=fixed, masked=True)
    assert_step(inputs, parameters, TANH, y, 1e-12)


@pytest.mark.parametrize("sigma", [get_activation("erf"), ERF_PLAIN, OWN], ids=lambda a: a.name)
def test_every_activation(sigma):
    inputs, parameters, y = problem((4, 5, 3, 6), fixed=False)
    assert_step(inputs, parameters, sigma, y, 1e-12)


def test_tanh_keeps_its_digits_where_it_is_small():
    inputs, parameters, y = problem((4, 5, 3, 6), fixed=False)
    for size in (1e-9, 1e-3, 0.05, 0.2):
        small = parameters._replace(U=size * parameters.U)
        f, _ = ENGINE.step(inputs, small, TANH, SCALE, y)
        assert_close(f, value(inputs, small, TANH), 1e-12)


@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "per-sample"])
@pytest.mark.parametrize("shape", [(9, 16, 8, 8), (2, 13, 9, 4)], ids=str)
def test_single_precision_is_right_to_its_rounding(shape, fixed):
    inputs, parameters, y = problem(shape, fixed=fixed, dtype=torch.float32)
    exact = (
        Inputs(inputs.tokens.double(), inputs.query.double(), None),
        parameters.to(dtype=torch.float64),
    )
    query = exact[0].query.expand(len(y), -1)
    logits = SCALE * torch.einsum("ntk,mkl,nl->nmt", exact[0].tokens, exact[1].W, query)
    tolerance = 32 * torch.finfo(torch.float32).eps * max(1.0, float(logits.abs().max()))
    assert_step(inputs, parameters, TANH, y, tolerance, exact)


@pytest.mark.parametrize("size", [1e3, 1e5])
@pytest.mark.parametrize("length", [3, 35])
def test_logits_of_any_size(size, length):
    inputs, parameters, y = problem((4, length, 3, 4), fixed=False, size=size)
    # One token wins, hence a and s are exact and r is 0 but for ties of rounding.
    s = heads_of(inputs, parameters.U, parameters.W)[1]
    assert_close(ENGINE.scores(inputs, parameters.U, parameters.W, SCALE), s, 1e-16 * size * 10)
    f, gradients = ENGINE.step(inputs, parameters, TANH, SCALE, y)
    expected_f, expected = gradient(inputs, parameters, TANH, lambda f: 2 / len(f) * (f - y))
    assert_close(f, expected_f, 1e-15 * size)
    assert_close(gradients.c, expected.c, 1e-15 * size)
    assert_close(gradients.U, expected.U, 1e-15 * size)
    assert float((gradients.W - expected.W).norm()) <= 1e-15 * size * float(expected.U.norm())


def test_a_large_common_offset_costs_no_more_than_in_the_formulas():
    inputs, parameters, _ = problem((4, 35, 3, 4), fixed=True)
    inputs = inputs._replace(tokens=inputs.tokens + 1e3, query=1e-3 * inputs.query)
    found = ENGINE.features(inputs, parameters.U, parameters.W, SCALE)
    alpha, s = heads_of(inputs, parameters.U, parameters.W)
    along = torch.einsum("ntk,mk->nmt", inputs.tokens, parameters.U)
    a, r = alpha @ inputs.tokens, (alpha * (along - s[..., None])) @ inputs.tokens
    # r is a difference of numbers |U| |x|^2 = 1e6; and so is it in the formulas.
    assert_close(found.s, s, 1e-12)
    assert_close(found.a, a, 1e-12)
    assert float((found.r - r).abs().max()) < 1e-15 * 1e6 * 16


@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "per-sample"])
@pytest.mark.parametrize("shape", [(4, 5, 3, 20), (3, 7, 9, 4)], ids=str)
def test_features_scores_and_slopes(shape, fixed):
    inputs, (_, U, W), _ = problem(shape, fixed=fixed, masked=True)
    alpha, s = heads_of(inputs, U, W)
    found = ENGINE.features(inputs, U, W, SCALE)
    along = torch.einsum("ntk,mk->nmt", inputs.tokens, U)
    assert_close(found.s, s, 1e-12)
    assert_close(found.a, alpha @ inputs.tokens, 1e-12)
    assert_close(found.r, (alpha * (along - s[..., None])) @ inputs.tokens, 1e-12)
    assert_close(ENGINE.scores(inputs, U, W, SCALE), s, 1e-12)
    V, Z = torch.cos(U), torch.sin(W)
    slope = torch.func.jvp(lambda U, W: heads_of(inputs, U, W)[1], (U, W), (V, Z))[1]
    found_s, found_slope = ENGINE.slopes(inputs, U, W, V, Z, SCALE, chunk=2)
    assert_close(found_s, s, 1e-12)
    assert_close(found_slope, slope, 1e-12)


@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "per-sample"])
@pytest.mark.parametrize("shape", [(4, 5, 3, 6), (2, 7, 9, 4)], ids=str)
def test_pull_back_of_any_weights(shape, fixed):
    inputs, parameters, g = problem(shape, fixed=fixed)
    found = ENGINE.vjp(inputs, parameters, TANH, SCALE, g)
    for block, expected in zip(
        found, gradient(inputs, parameters, TANH, lambda f: g)[1], strict=True
    ):
        assert_close(block, expected, 1e-12)


def test_the_products_for_w_may_leave_in_several_parts(monkeypatch):
    inputs, parameters, g = problem((5, 3, 9, 2), fixed=False)
    whole = ENGINE.vjp(inputs, parameters, TANH, SCALE, g)
    monkeypatch.setattr(triton_launch, "_SCRATCH", 2 * 9 * 2)
    for block, expected in zip(ENGINE.vjp(inputs, parameters, TANH, SCALE, g), whole, strict=True):
        assert_close(block, expected, 1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("heads", "dimension"), [(2, 8), (20, 3), (6, 9)])
def test_the_symmetric_start_is_exactly_zero(heads, dimension, dtype):
    parameters = symmetric_initialisation(
        heads, dimension, generator=torch.Generator().manual_seed(0), dtype=dtype, device=DEVICE
    )
    inputs, _, y = problem((3, 4, dimension, heads), fixed=False, dtype=dtype)
    for size, sigma in ((1.0 / 3.0, TANH), (1.0, OWN)):
        scaled = parameters._replace(c=size * parameters.c)
        f, gradients = ENGINE.step(inputs, scaled, sigma, SCALE, y)
        assert torch.count_nonzero(f) == 0
        assert torch.count_nonzero(gradients.U) > 0


def test_repeated_steps_are_equal_bit_by_bit():
    inputs, parameters, y = problem((40, 5, 3, 6), fixed=False, dtype=torch.float32)
    f, first = ENGINE.step(inputs, parameters, TANH, SCALE, y)
    again, second = ENGINE.step(inputs, parameters, TANH, SCALE, y)
    assert torch.equal(f, again)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_arrays_need_not_be_contiguous():
    inputs, parameters, y = problem((4, 5, 3, 6), fixed=False)
    tokens, query, _ = inputs
    strided = Inputs(tokens.mT.contiguous().mT, torch.stack((query, query), dim=1)[:, 0], None)
    reversed_W = parameters._replace(W=parameters.W.mT.contiguous().mT)
    targets = torch.stack((y, y), dim=1)[:, 0]
    f, found = ENGINE.step(strided, reversed_W, TANH, SCALE, targets)
    expected_f, expected = ENGINE.step(inputs, parameters, TANH, SCALE, y)
    assert torch.equal(f, expected_f)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", ["shared", "own", "fixed", "large"])
def test_a_stack_is_its_members(kind):
    dimension = 9 if kind == "large" else 3
    members = [
        problem((3, 4, dimension, 6), fixed=kind == "fixed", masked=True, size=size)
        for size in (0.5, 2.0)
    ]
    # Members of one shape come from one stream: let them differ.
    inputs = [
        Inputs(tokens * (1 + s), query * (1 - s / 4), mask)
        for s, ((tokens, query, mask), _, _) in enumerate(members)
    ]
    if kind == "shared":
        inputs = inputs[:1]
    y = torch.stack([y + s for s, (_, _, y) in enumerate(members)])
    together = Parameters(*map(torch.stack, zip(*(p for _, p, _ in members), strict=True)))
    stacked = Stack(*(torch.stack(column) for column in zip(*inputs, strict=True)))
    f, gradients = triton_launch.step(stacked, together, TANH, SCALE, y)
    for s, (_, parameters, _) in enumerate(members):
        own = inputs[0 if kind == "shared" else s]
        expected_f, expected = ENGINE.step(own, parameters, TANH, SCALE, y[s])
        assert_close(f[s], expected_f, 1e-13)
        for block, one in zip(gradients, expected, strict=True):
            assert_close(block[s], one, 1e-13)


def test_widths_are_stacked_by_heads_that_add_nothing():
    tokens = torch.randn(6, 5, 3, dtype=torch.float64, generator=generator(0, "x")).to(DEVICE)
    y = torch.randn(3, 6, dtype=torch.float64, generator=generator(0, "y")).to(DEVICE)
    models = [
        ShallowTransformer.symmetric(m, 3, query="last", seed=m, logit_exponent=-0.5,
                                     dtype=torch.float64, device=DEVICE).snapshot()
        for m in (2, 6, 4)
    ]  # fmt: skip
    scales = [model.heads**-0.5 for model in models]
    losses, gradients = stacked_loss_and_gradients(
        stack(models), tokens, y, query="last", scale=scales, engine="triton"
    )
    assert torch.equal(losses, y.square().mean(dim=1))  # f is exactly 0
    for s, (model, found) in enumerate(zip(models, gradients.unstack(), strict=True)):
        loss, expected = shallow.loss_and_gradients(
            model, tokens, y[s], query="last", scale=scales[s], engine="reference"
        )
        assert_close(losses[s], loss, 1e-12)
        for block, one in zip(found, expected, strict=True):
            assert_close(block, one, 1e-12)


def test_descents_together_are_those_one_by_one():
    tokens = torch.randn(5, 4, 2, dtype=torch.float64, generator=generator(1, "x")).to(DEVICE)
    y = torch.randn(5, dtype=torch.float64, generator=generator(1, "y")).to(DEVICE)

    def models():
        return [
            ShallowTransformer.symmetric(
                m, 2, query="last", seed=m, dtype=torch.float64, device=DEVICE
            )
            for m in (2, 4)
        ]

    config = DescentConfig(steps=4, step_size=0.5, radii=Radii(c=0.5, U=0.2, W=0.3))
    found = stacked_projected_gradient_descent(
        models(), tokens, y, config, engine="triton", together=True
    )
    for model, result in zip(models(), found, strict=True):
        one = projected_gradient_descent(model, tokens, y, config, engine="reference")
        assert result.best_step == one.best_step
        for name in ("final", "averaged", "best"):
            for block, expected in zip(getattr(result, name), getattr(one, name), strict=True):
                assert_close(block, expected, 1e-12)
        assert (result.history["active_U"] == one.history["active_U"]).all()


def test_what_the_kernels_do_not_serve_is_named():
    tokens = torch.zeros(1, 2, triton_launch.MAX_DIMENSION + 1, device=DEVICE)
    assert f"d = {triton_launch.MAX_DIMENSION + 1}" in triton_launch.refusal(tokens)
    assert "float16" in triton_launch.refusal(tokens[..., :3].half())
    assert "meta" in triton_launch.refusal(tokens[..., :3].to("meta"))
    assert ENGINE.refusal(Inputs(tokens[..., :3], tokens[0, 0, :3], None), 4) is None
