"""Inputs that broke similar software, and what the theorem and its kernel do with them."""

import math

import pytest
import torch

from attention_dynamics.data.streams import generator
from attention_dynamics.data.tokens import query_vector, unit_ball_tokens
from attention_dynamics.models import shallow
from attention_dynamics.models.parameters import symmetric_initialisation
from attention_dynamics.models.shallow import ShallowTransformer
from attention_dynamics.theory import UNIT_BALL, TransportNorms, random_multi_anchor
from attention_dynamics.theory.calculator import BoundCalculator
from attention_dynamics.theory.kernels import (
    empirical_kernel,
    empirical_kernel_total,
    kernel_vector_product,
    spectrum,
)
from attention_dynamics.theory.setting import Setting, Start
from attention_dynamics.theory.trajectory import record_trajectory
from attention_dynamics.training import DescentConfig, ProjectionSet, Radii

RHO = Radii(1.0, 1.0, 1.0)


def problem(n, T, d, m, *, tokens=None):
    query = query_vector(d, generator=generator(0, "q"), dtype=torch.float64)
    model = ShallowTransformer.symmetric(m, d, query=query, seed=0, dtype=torch.float64)
    if tokens is None:
        tokens = unit_ball_tokens(n, T, d, generator=generator(0, "t"), dtype=torch.float64)
    transport = random_multi_anchor(
        2, T, d, generator=generator(0, "a"), norms=TransportNorms(1.0, 1.0, 1.0), query=query,
        dtype=torch.float64,
    )  # fmt: skip
    initial = model.snapshot()
    star = ProjectionSet(initial, RHO).project(initial.plus(transport(initial).scaled(m**-0.5)))
    y = torch.randn(len(tokens), generator=generator(0, "y"), dtype=torch.float64)
    return model, tokens, y, transport, star


def assert_bounds_hold(model, tokens, y, transport, star, steps=40):
    """The posterior bound and the certificate, fast and in the paper's form, above what is reached.

    The targets need no relation to the transport map: its error is measured.
    """
    initial = model.snapshot()
    run = record_trajectory(model, tokens, y, DescentConfig(steps, step_size=0.02, radii=RHO), star)
    setting = Setting(
        heads=initial.heads, samples=len(tokens), length=tokens.shape[1],
        dimension=initial.dimension, steps=steps, step_size=0.02, radii=RHO,
        transport_norms=TransportNorms(1.0, 1.0, 1.0), inputs=UNIT_BALL,
    )  # fmt: skip
    start = Start.measure(initial, transport, tokens, y)
    for form in ("fast", "paper"):
        for mode, evidence in (("posterior", start), ("certificate", run)):
            bound = BoundCalculator(mode=mode, form=form).bound(setting, evidence)
            assert math.isfinite(bound.total)
            assert run.average_loss <= bound.average
            assert run.averaged_loss <= bound.total
    return run


# Case 7: the kernel of the paired initialisation is singular as soon as n exceeds its rank, and a
# Cholesky decomposition of it fails.


def test_case_7_the_bound_holds_where_the_kernel_is_singular():
    n, d, m = 200, 3, 4
    model, tokens, y, transport, star = problem(n, 5, d, m)
    K = empirical_kernel_total(model.snapshot(), tokens, query=model.query)
    found = spectrum(K)
    assert found.rank <= (m // 2) * (d**2 + d + 1) == 26 < n
    assert float(found.eigenvalues[-1]) < 1e-12 * float(found.eigenvalues[0])
    _, failed = torch.linalg.cholesky_ex(K)
    assert int(failed) > 0
    run = assert_bounds_hold(model, tokens, y, transport, star)
    assert run.final.c.isfinite().all()


def test_case_7_and_where_inputs_are_repeated_with_other_targets():
    model, tokens, y, transport, star = problem(10, 4, 3, 8)
    twice = torch.cat((tokens, tokens))
    K = empirical_kernel_total(model.snapshot(), twice, query=model.query)
    assert spectrum(K).rank <= 10
    run = assert_bounds_hold(model, twice, torch.cat((y, -y)), transport, star)
    # Two opposite targets for one input: the mean of y^2 is the least loss of all predictors.
    least = float(y.square().mean())
    assert run.history["loss"].min() >= least * (1 - 1e-12)
    assert run.certificate().average >= least * (1 - 1e-12)


# Case 9: vmap(jacrev) and jvp through fused attention.


@pytest.mark.parametrize("query", ["fixed", "last"])
def test_case_9_kernel_and_transforms_of_the_model_agree(query):
    n, d, m = 6, 3, 4
    q = query_vector(d, generator=generator(0), dtype=torch.float64) if query == "fixed" else "last"
    phi = symmetric_initialisation(m, d, generator=generator(1), dtype=torch.float64)
    tokens = unit_ball_tokens(n, 4, d, generator=generator(2), dtype=torch.float64)

    def one(c, U, W, x):
        return shallow.forward(type(phi)(c, U, W), x[None], query=q)[0]

    jacobian = torch.func.vmap(torch.func.jacrev(one, argnums=(0, 1, 2)), (None, None, None, 0))
    blocks = [block.reshape(n, -1) for block in jacobian(*phi, tokens)]
    kernel = empirical_kernel(phi, tokens, query=q)
    for block, own in zip(blocks, kernel, strict=True):
        torch.testing.assert_close(block @ block.T, own, rtol=1e-11, atol=1e-13)
    tangent = symmetric_initialisation(m, d, generator=generator(3), dtype=torch.float64)
    value, slope = torch.func.jvp(
        lambda *blocks: shallow.forward(type(phi)(*blocks), tokens, query=q),
        tuple(phi), tuple(tangent),
    )  # fmt: skip
    torch.testing.assert_close(slope, shallow.jvp(phi, tokens, tangent, query=q))
    assert torch.equal(value, torch.zeros(n, dtype=torch.float64))


# Case 10: a Jacobian of thousands of samples runs out of memory.


def test_case_10_no_jacobian_is_formed_and_blocks_change_nothing():
    n, d, m = 3000, 3, 16
    phi = symmetric_initialisation(m, d, generator=generator(1), dtype=torch.float64)
    tokens = unit_ball_tokens(n, 3, d, generator=generator(2), dtype=torch.float64)
    v = torch.randn(n, generator=generator(3), dtype=torch.float64)
    whole = kernel_vector_product(phi, tokens, v, query="last")
    some = empirical_kernel_total(phi, tokens[:40], tokens, query="last")
    torch.testing.assert_close(some @ v, whole[:40], rtol=1e-9, atol=1e-10)
    small = empirical_kernel_total(phi, tokens[:80], query="last")
    torch.testing.assert_close(small[:40], some[:, :80], rtol=1e-12, atol=1e-14)
    assert torch.equal(small, small.T)


# Case 12: all-zero tokens.


def test_case_12_zero_tokens_have_a_zero_kernel_and_a_bound_that_holds():
    n, T, d, m = 5, 4, 3, 6
    zeros = torch.zeros(n, T, d, dtype=torch.float64)
    model, tokens, y, transport, star = problem(n, T, d, m, tokens=zeros)
    kernel = empirical_kernel(model.snapshot(), tokens, query=model.query)
    for block in kernel:
        assert torch.equal(block, torch.zeros(n, n, dtype=torch.float64))
    assert spectrum(kernel).rank == 0
    run = assert_bounds_hold(model, tokens, y, transport, star)
    # sigma(0) = 0: nothing can be learned, and the certificate does not pretend otherwise.
    assert (run.history["loss"] == run.history["loss"].iloc[0]).all()
    assert (run.history["gradient_squared"] == 0).all()
    assert run.certificate().average >= float(y.square().mean()) * (1 - 1e-12)


def test_case_12_one_zero_sequence_among_others_is_no_exception():
    model, tokens, y, transport, star = problem(6, 4, 3, 6)
    tokens = tokens.clone()
    tokens[2] = 0.0
    kernel = empirical_kernel_total(model.snapshot(), tokens, query=model.query)
    assert torch.equal(kernel[2], torch.zeros(6, dtype=torch.float64))
    assert_bounds_hold(model, tokens, y, transport, star)
