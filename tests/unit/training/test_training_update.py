"""One projected step on preallocated memory: C++ and torch against the projection set."""

import logging
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention_dynamics.models.engines import native
from attention_dynamics.models.parameters import Parameters, independent_initialisation
from attention_dynamics.training import ProjectionSet, Radii, update
from attention_dynamics.training.update import FusedUpdate, Update, update_for

# The C++ needs a compiler; the suite runs without one too.
KINDS = ["torch", *(["fused"] if update._functions("float64") else [])]
EPS = {torch.float32: 2.0**-23, torch.float64: 2.0**-52}
RADIUS = st.one_of(st.none(), st.just(0.0), st.floats(1e-3, 5.0))


def problem(m, d, dtype, seed=0, size=1.0):
    """A centre, a point near it, and a gradient."""
    generator = torch.Generator().manual_seed(seed)
    centre, moved, gradient = (
        independent_initialisation(m, d, generator=generator, dtype=dtype) for _ in range(3)
    )
    return centre, centre.plus(moved.scaled(0.1)), gradient.scaled(size)


def made(kind, region, eta, slots=3):
    if kind == "torch":
        return Update(region.centre, region.limits(), eta, slots)
    fused = update_for(region.centre, region.limits(), eta, slots)
    assert isinstance(fused, FusedUpdate)
    return fused


def put(own, slot, parameters):
    for block, value in zip(own.iterates[slot], parameters, strict=True):
        block.copy_(value)


@given(
    m=st.integers(1, 9),
    d=st.integers(1, 9),
    radii=st.builds(Radii, RADIUS, RADIUS, RADIUS),
    eta=st.floats(1e-3, 2.0),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**31 - 1),
)
def test_a_step_is_the_projection_of_the_gradient_step(m, d, radii, eta, dtype, kind, seed):
    centre, phi, g = problem(m, d, dtype, seed)
    region = ProjectionSet(centre, radii)
    own = made(kind, region, eta)
    put(own, 1, phi)
    own.step(1, 2, g)
    candidate = phi.zip(g, lambda p, h: torch.sub(p, h, alpha=eta))
    expected, norms = region.project_with_norms(candidate)
    for block, want, inside, size, limit in zip(
        own.iterates[2], expected, candidate, norms, region.limits(), strict=True
    ):
        # Rounding is relative to the numbers that are added: centre, phi, and eta g.
        scale = float(candidate.W.abs().max() + candidate.U.abs().max() + 2)
        assert torch.allclose(block, want, rtol=0, atol=16 * EPS[dtype] * scale)
        if limit is None:
            assert torch.equal(block, inside)
        else:
            kept = size < limit * (1 - 1e-5)
            assert torch.equal(block[kept], inside[kept])
    if radii.W == 0.0:
        assert torch.equal(own.iterates[2].W, centre.W)
    (report,) = own.report([2])
    for b, (size, limit) in enumerate(zip(norms, region.limits(), strict=True)):
        assert report[3 + b] == pytest.approx(float(size.max()), rel=64 * EPS[dtype])
        if limit is None:
            assert report[6 + b] == 0
        else:
            surely = int((size > limit * (1 + 1e-5)).sum())
            assert surely <= report[6 + b] <= int((size > limit * (1 - 1e-5)).sum())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("radius", [None, 0.0, 0.05, 2.0])
def test_500_steps_stay_with_the_projection_set(kind, dtype, radius):
    m, d, steps = 8, 5, 500
    centre, _, _ = problem(m, d, dtype)
    region = ProjectionSet(centre, Radii(radius, radius, radius))
    own, phi, total = made(kind, region, 0.05, slots=2), centre, centre.to(dtype=torch.float64)
    total = total.scaled(0.0)
    generator = torch.Generator().manual_seed(1)
    for k in range(steps):
        g = independent_initialisation(m, d, generator=generator, dtype=dtype)
        own.accumulate(k % 2)
        own.step(k % 2, 1 - k % 2, g)
        total = total.plus(phi.to(dtype=torch.float64).minus(centre.to(dtype=torch.float64)))
        phi = region.project(phi.zip(g, lambda p, h: torch.sub(p, h, alpha=0.05)))
    tolerance = 1e-12 if dtype == torch.float64 else 2e-4
    mean = centre.to(dtype=torch.float64).plus(total.scaled(1 / steps))
    for ours, theirs in ((own.iterates[0], phi), (own.mean(steps), mean.to(dtype=dtype))):
        for block, want in zip(ours, theirs, strict=True):
            assert torch.allclose(block, want, rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_any_layout_are_read_as_they_are_meant(kind):
    centre, phi, g = problem(4, 3, torch.float64)
    region = ProjectionSet(centre, Radii(None, 0.1, 0.1))
    strided = Parameters(
        torch.stack((g.c, g.c), dim=1)[:, 0], g.U.mT.contiguous().mT, g.W.mT.contiguous().mT
    )
    assert not any(block.is_contiguous() for block in strided)
    own = made(kind, region, 0.5)
    put(own, 0, phi)
    own.step(0, 1, g)
    own.step(0, 2, strided)
    own.measure(1, g)
    own.measure(2, strided)
    assert all(torch.equal(a, b) for a, b in zip(*own.iterates[1:], strict=True))
    assert own.report([1]) == own.report([2])
    norms = [float(torch.linalg.vector_norm(block)) for block in g]
    assert own.report([1])[0][:3] == pytest.approx(norms, rel=1e-14)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_so_and_in_its_head(kind, bad):
    centre, phi, g = problem(4, 3, torch.float64, size=0.01)
    own = made(kind, ProjectionSet(centre, Radii(5.0, 5.0, 5.0)), 1.0)
    put(own, 0, phi)
    g.U[1, 2] = bad
    own.step(0, 1, g)
    assert not own.iterates[1].U[1].isfinite().all()
    assert own.iterates[1].U[[0, 2, 3]].isfinite().all()
    assert not math.isfinite(own.report([1])[0][4])
    own.measure(1, g)
    assert not math.isfinite(own.report([1])[0][1])


@pytest.mark.parametrize("kind", KINDS)
def test_the_mean_is_summed_in_float64(kind):
    # 2^-30 - 1 is no float32, and neither is 10^4 + 2^-20: sums in float32 would lose the small.
    centre = Parameters(torch.ones(1), torch.full((1, 1), 2.0**12), torch.ones(1, 1, 1))
    own = made(kind, ProjectionSet(centre, Radii(None, 0.0, None)), 1.0)
    put(own, 1, centre._replace(c=centre.c + 2.0**-20, W=torch.full((1, 1, 1), 2.0**-30)))
    own.accumulate(1)
    assert own.mean(1).W.item() == 2.0**-30
    put(own, 2, centre._replace(c=torch.full((1,), 1e4)))
    own.accumulate(2)
    put(own, 2, centre._replace(c=torch.full((1,), 2 - 1e4)))
    own.accumulate(2)
    assert own.mean(1).c.item() == 1 + 2.0**-20
    assert own.mean(3).U.item() == 2.0**12


@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_head_at_rest_stays_and_is_not_brought_back(kind):
    centre, _, g = problem(3, 2, torch.float64)
    own = made(kind, ProjectionSet(centre, Radii(0.0, 0.0, 0.0)), 1.0)
    own.step(0, 1, g.scaled(0.0))
    assert all(torch.equal(a, b) for a, b in zip(own.iterates[1], centre, strict=True))
    assert own.report([1])[0][3:] == [0.0] * 6


@pytest.mark.parametrize("kind", KINDS)
def test_W_may_have_any_number_of_columns(kind):
    # With a fixed query W enters by W q alone, one column.
    centre, phi, g = (p._replace(W=p.W[:, :, :1].clone()) for p in problem(4, 3, torch.float64))
    limits = (0.2, 0.2, 0.2)
    own = (Update if kind == "torch" else update_for)(centre, limits, 0.5, 2)
    put(own, 0, phi)
    own.step(0, 1, g)
    delta = phi.W - 0.5 * g.W - centre.W
    size = torch.linalg.vector_norm(delta, dim=(1, 2), keepdim=True)
    assert (size > 0.2).any()
    want = centre.W + delta * (0.2 / size).clamp(max=1)
    assert torch.allclose(own.iterates[1].W, want, rtol=0, atol=1e-14)


def test_iterates_start_at_the_centre_and_share_nothing_with_it():
    centre, _, g = problem(2, 2, torch.float64)
    kept = centre.clone()
    for kind in KINDS:
        own = made(kind, ProjectionSet(centre, Radii(None, None, None)), 1.0)
        assert all(torch.equal(a, b) for a, b in zip(own.iterates[0], kept, strict=True))
        own.step(0, 1, g)
        own.step(1, 0, g)
        assert all(torch.equal(a, b) for a, b in zip(centre, kept, strict=True))


def test_without_a_compiler_torch_takes_the_steps_and_says_so_once(monkeypatch, caplog):
    def absent(source, folder=None):
        raise native.Unavailable("no C++ compiler was found")

    centre, _, _ = problem(2, 2, torch.float64)
    monkeypatch.setattr(native, "library", absent)
    update._functions.cache_clear()
    try:
        with caplog.at_level(logging.INFO, logger="attention_dynamics"):
            for _ in range(2):
                own = update_for(centre, (None, None, None), 0.1, 3)
                assert type(own) is Update
    finally:
        update._functions.cache_clear()
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        "projected steps run in torch (no C++ compiler was found); the results are the same"
    ]
