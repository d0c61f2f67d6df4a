"""Certificates of the residual layer: conditions, errors, and runs that keep every promise."""

import math
from dataclasses import replace

import pytest
import torch

from attention_dynamics.data import generator
from attention_dynamics.models import residual
from attention_dynamics.models.residual import ResidualConfig
from attention_dynamics.theory.certificates import (
    ball_constants,
    certificate,
    pl_constant,
    scale_to_certify,
)
from attention_dynamics.training.residual_descent import gradient_descent

WIDE = ResidualConfig(dimension=16, key_dimension=4, hidden=16)
NARROW = ResidualConfig(dimension=4, key_dimension=3, hidden=48)


def instance(config, seed=0, samples=2, length=3, **options):
    stream = generator(seed, "residual certificates")
    X, Y = torch.randn(2, samples, length, config.dimension, generator=stream, dtype=torch.float64)
    return residual.init_parameters(config, stream, **options), X, Y


def certified(route, seed=0, config=None):
    config = config or (WIDE if route == "Z" else NARROW)
    parameters, X, Y = instance(config, seed, orthogonal_w2=route == "Z")
    return scale_to_certify(parameters, X, Y, config, route=route), X, Y, config


@pytest.mark.parametrize("route", ["Z", "H"])
@pytest.mark.parametrize("attend", [True, False])
def test_a_certified_run_keeps_every_promise(route, attend):
    config = replace(WIDE if route == "Z" else NARROW, attention_residual=attend)
    found, X, Y, config = certified(route, config=config)
    proof = found.certificate
    assert proof.ok
    assert proof.reason == "holds"
    for share in (1.0, 0.5):
        run = gradient_descent(
            found.parameters, X, Y, config, step_size=share * proof.eta, steps=200
        )
        decay = 1 - share * proof.eta * proof.mu * (2 - share)
        assert (run.losses <= decay ** run.steps.double() * run.losses[0] * (1 + 1e-12)).all()
        assert (run.distances <= proof.rho * (1 + 1e-12)).all()
        bound = proof.loss_bound(float(run.losses[0]), 200, share * proof.eta)
        assert bound == pytest.approx(decay**200 * float(run.losses[0]))
    assert proof.loss_bound(1.0, 1) == pytest.approx(proof.factor)


@pytest.mark.parametrize("route", ["Z", "H"])
def test_the_numbers_are_those_of_the_formulas(route):
    found, X, Y, config = certified(route)
    theta, proof = found.parameters, found.certificate
    passed = residual.layers(theta, X, config)
    r = torch.linalg.vector_norm(passed.F - Y).item()
    if route == "Z":
        s = torch.linalg.svdvals(passed.Z.flatten(0, 1))[5].item()
        w = torch.linalg.svdvals(theta.W2)[-1].item()
        assert proof.mu == pytest.approx(config.slope**2 * s**2 * w**2 / 16)
        assert proof.rho == pytest.approx(8 * r / (config.slope * s * w))
    else:
        s = torch.linalg.svdvals(passed.H.flatten(0, 1))[5].item()
        assert proof.mu == pytest.approx(s**2 / 4)
        assert proof.rho == pytest.approx(4 * r / s)
    assert proof.rho == pytest.approx(2 * r / math.sqrt(proof.mu))
    assert proof.eta == 1 / proof.S
    expected = ball_constants(theta, X, config, rho=proof.rho, error=r)
    assert proof.constants == pytest.approx(expected)
    # Just below the scale that was found nothing is certified.
    block = "W2" if route == "Z" else "W1"
    less = theta._replace(**{block: 0.998 * getattr(theta, block)})
    broken = certificate(less, X, Y, config, route=route)
    assert not broken.ok
    assert "fails" in broken.reason
    with pytest.raises(ValueError, match="expected one that holds"):
        broken.loss_bound(1.0, 1)


def test_in_the_limit_of_a_large_readout_the_rate_is_that_of_the_spectrum_of_Z():
    found, X, Y, config = certified("Z")
    theta = found.parameters._replace(W2=1e5 * found.parameters.W2)
    proof = certificate(theta, X, Y, config)
    expected = (config.slope * proof.smallest / proof.constants.output) ** 2 / 16
    assert proof.eta * proof.mu == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("config", [WIDE, NARROW])
def test_the_pl_inequality_holds_at_random_points(config):
    for seed in range(20):
        parameters, X, Y = instance(config, seed, scales=[1, 1, 1, 1, 0.3 + seed / 5])
        loss, gradient = residual.loss_and_gradients(parameters, X, Y, config)
        ratio = gradient.inner(gradient) / (2 * loss)
        assert ratio >= pl_constant(parameters, X, config) * (1 - 1e-10)
        assert pl_constant(parameters, X, config) > 0


def test_closed_routes_are_refused():
    parameters, X, Y = instance(NARROW)
    with pytest.raises(ValueError, match="route: 'Z' needs d >= nT and m >= d, got d = 4, nT = 6"):
        certificate(parameters, X, Y, NARROW, route="Z")
    slim = replace(WIDE, hidden=15)
    parameters, X, Y = instance(slim)
    with pytest.raises(ValueError, match="route: 'Z' needs d >= nT and m >= d, got d = 16"):
        certificate(parameters, X, Y, slim, route="Z")
    slim = replace(WIDE, hidden=5)
    parameters, X, Y = instance(slim)
    with pytest.raises(ValueError, match="route: 'H' needs m >= nT, got m = 5, nT = 6"):
        scale_to_certify(parameters, X, Y, slim, route="H")
    assert pl_constant(parameters, X, slim) == 0
    with pytest.raises(ValueError, match="route: expected one of 'Z', 'H', got 'X'"):
        certificate(parameters, X, Y, slim, route="X")


def test_what_is_singular_is_uncertifiable_and_says_so():
    parameters, X, Y = instance(WIDE)
    repeated = torch.cat((X[:, :2], X[:, :1]), dim=1)  # a token twice in each sequence
    for theta, tokens, what in (
        (parameters, repeated, "Z is singular"),
        (parameters._replace(W2=0 * parameters.W2), X, "W_2 is singular"),
    ):
        proof = certificate(theta, tokens, Y, WIDE)
        assert not proof.ok
        assert proof.reason.startswith("uncertifiable: " + what)
        assert (proof.mu, proof.eta, proof.rho, proof.S) == (0, 0, math.inf, math.inf)
        assert proof.constants is None
        assert proof.factor == 1
    proof = certificate(parameters._replace(W1=0 * parameters.W1), X, Y, WIDE, route="H")
    assert proof.reason.startswith("uncertifiable: H is singular")
    for zero in ("W1", "W2"):
        route = "H" if zero == "W1" else "Z"
        flat = parameters._replace(**{zero: torch.zeros_like(getattr(parameters, zero))})
        with pytest.raises(ValueError, match="expected a start that some scale certifies"):
            scale_to_certify(flat, X, Y, WIDE, route=route)
    with pytest.raises(ValueError, match="uncertifiable: Z is singular"):
        scale_to_certify(parameters, repeated, Y, WIDE)
    # Uniform attention without a residual: one row a sequence, rank n < nT.
    bare, pooled = (
        replace(WIDE, attention_residual=False),
        parameters._replace(Q=0 * parameters.Q, K=0 * parameters.K),
    )
    assert certificate(pooled, X, Y, bare).reason.startswith("uncertifiable: Z is singular")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_rank_lost_to_rounding_is_uncertifiable_in_either_precision(dtype):
    parameters, X, Y = instance(WIDE)
    single = residual.ResidualParameters(*(block.to(dtype) for block in parameters))
    repeated = torch.cat((X[:, :2], X[:, :1]), dim=1).to(dtype)
    proof = certificate(single, repeated, Y.to(dtype), WIDE)
    assert proof.reason.startswith("uncertifiable: Z is singular")
    assert certificate(single, X.to(dtype), Y.to(dtype), WIDE).mu > 0


def test_one_token_a_sequence_is_certified():
    parameters, X, Y = instance(WIDE, samples=5, length=1, orthogonal_w2=True)
    found = scale_to_certify(parameters, X, Y, WIDE)
    run = gradient_descent(found.parameters, X, Y, WIDE, step_size=found.certificate.eta, steps=50)
    assert run.losses[-1] <= found.certificate.loss_bound(float(run.losses[0]), 50)


def test_zero_logits_stay_zero_and_are_certified_with_a_residual():
    parameters, X, Y = instance(WIDE, scales=(0, 0, 1, 1, 1), orthogonal_w2=True)
    found = scale_to_certify(parameters, X, Y, WIDE)
    run = gradient_descent(found.parameters, X, Y, WIDE, step_size=found.certificate.eta, steps=50)
    assert (run.final.Q == 0).all()
    assert (run.final.K == 0).all()
    assert run.losses[-1] <= found.certificate.loss_bound(float(run.losses[0]), 50)


def test_correlated_tokens_need_a_larger_scale_and_get_a_slower_rate():
    config = replace(WIDE, dimension=32, hidden=32)
    parameters, X, Y = instance(config, orthogonal_w2=True)
    common = X.mean(dim=(0, 1), keepdim=True) * X[0, 0].numel() ** 0.5
    common = common / common.std()
    alike = math.sqrt(0.99) * common + math.sqrt(0.01) * X
    plain, correlated = (scale_to_certify(parameters, x, Y, config) for x in (X, alike))
    assert correlated.scale > 3 * plain.scale
    rates = [found.certificate.eta * found.certificate.mu for found in (plain, correlated)]
    assert rates[1] < 0.1 * rates[0]


def test_nothing_to_learn_is_certified_with_radius_zero():
    parameters, X, _ = instance(WIDE)
    start = parameters._replace(W1=0 * parameters.W1)
    found = scale_to_certify(parameters, X, residual.forward(start, X, WIDE), WIDE)
    assert found.certificate.ok
    assert found.certificate.rho == 0


def test_seeds_are_certified_one_by_one():
    parameters, X, Y = instance(WIDE)
    stacked = residual.stack_parameters([parameters] * 2)
    with pytest.raises(ValueError, match="expected one start without leading axes"):
        certificate(stacked, X, Y, WIDE)
    found, *_ = certified("Z")
    with pytest.raises(ValueError, match="step_size: expected at most eta"):
        found.certificate.loss_bound(1.0, 1, 1.01 * found.certificate.eta)
