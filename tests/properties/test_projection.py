"""The projection set: nearest point, idempotent, nonexpansive, block by block."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_dynamics.data.streams import generator
from attention_dynamics.models.parameters import Parameters, symmetric_initialisation
from attention_dynamics.training.projection import ProjectionSet, Radii

HEADS, DIMENSION = 6, 3
RADIUS = st.one_of(st.none(), st.just(0.0), st.floats(1e-3, 10.0))
RADII = st.builds(Radii, RADIUS, RADIUS, RADIUS)
SEED = st.integers(0, 2**16)


def centre(dtype=torch.float64):
    return symmetric_initialisation(HEADS, DIMENSION, generator=generator(0), dtype=dtype)


def around(seed, size=1.0):
    noise = symmetric_initialisation(HEADS, DIMENSION, generator=generator(seed, "noise"))
    return centre().plus(noise.to(dtype=torch.float64).scaled(size))


def distance(a, b):
    return math.sqrt(sum(float((x - y).square().sum()) for x, y in zip(a, b, strict=True)))


@settings(max_examples=60, deadline=None)
@given(radii=RADII, seed=SEED, size=st.floats(1e-3, 5.0))
def test_projection_is_idempotent_and_stays_inside(radii, seed, size):
    region = ProjectionSet(centre(), radii)
    projected = region.project(around(seed, size))
    assert region.contains(projected, atol=1e-14)
    again = region.project(projected)
    for once, twice in zip(projected, again, strict=True):
        assert torch.allclose(once, twice, rtol=0, atol=1e-14)


@settings(max_examples=60, deadline=None)
@given(radii=RADII, first=SEED, second=SEED, size=st.floats(1e-3, 5.0))
def test_projection_is_nonexpansive(radii, first, second, size):
    region = ProjectionSet(centre(), radii)
    a, b = around(first, size), around(second, 1.0)
    assert distance(region.project(a), region.project(b)) <= distance(a, b) + 1e-13


@settings(max_examples=40, deadline=None)
@given(seed=SEED, other=SEED, rho=st.floats(0.01, 3.0))
def test_projection_is_the_nearest_point(seed, other, rho):
    # <phi - P phi, z - P phi> <= 0 for every z of the set
    region = ProjectionSet(centre(), Radii(rho, rho, rho))
    phi, z = around(seed, 2.0), region.project(around(other, 2.0))
    projected = region.project(phi)
    assert float(phi.minus(projected).inner(z.minus(projected))) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_projection_is_the_identity_inside_bit_by_bit(dtype):
    inside = around(1, 0.1).to(dtype=dtype)
    region = ProjectionSet(centre(dtype), Radii(10.0, 10.0, 10.0))
    for block, same in zip(inside, region.project(inside), strict=True):
        assert torch.equal(block, same)
    assert region.active(inside) == (0, 0, 0)


def test_one_head_outside_does_not_move_the_others():
    phi = around(1, 0.01)
    phi.U[2] += 5.0
    region = ProjectionSet(centre(), Radii(1.0, 1.0, 1.0))
    projected = region.project(phi)
    moved = (projected.U != phi.U).any(dim=-1)
    assert moved.tolist() == [False, False, True, False, False, False]
    limit = 1.0 / math.sqrt(HEADS)
    assert float((projected.U[2] - region.centre.U[2]).norm()) == pytest.approx(limit, rel=1e-14)
    assert region.active(projected) == (0, 1, 0)


def test_W_is_measured_in_frobenius_norm():
    phi = centre()
    phi.W[0] += torch.eye(DIMENSION, dtype=torch.float64)  # spectral norm 1, Frobenius sqrt 3
    region = ProjectionSet(centre(), Radii(None, None, 1.2 * math.sqrt(HEADS)))
    step = region.project(phi).W[0] - region.centre.W[0]
    assert float(torch.linalg.matrix_norm(step)) == pytest.approx(1.2, rel=1e-14)


def test_projection_works_for_any_stride():
    phi = around(3)
    strided = Parameters(phi.c.flip(0).flip(0), phi.U.mT.contiguous().mT, phi.W.mT.contiguous().mT)
    assert not strided.W.is_contiguous()
    region = ProjectionSet(centre(), Radii(0.1, 0.2, 0.3))
    for a, b in zip(region.project(phi), region.project(strided), strict=True):
        assert torch.equal(a, b)


def test_projection_leaves_its_argument_alone():
    phi = around(3)
    kept = phi.clone()
    ProjectionSet(centre(), Radii(0.1, 0.1, 0.1)).project(phi)
    assert all(torch.equal(a, b) for a, b in zip(phi, kept, strict=True))


def test_norms_before_the_projection_come_with_it():
    region, phi = ProjectionSet(centre(), Radii(0.1, None, 0.0)), around(3)
    projected, norms = region.project_with_norms(phi)
    expected = phi.minus(region.centre).block_norms()
    assert all(torch.allclose(a, b) for a, b in zip(norms, expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(projected, region.project(phi), strict=True))


def test_contains_sees_a_point_outside_and_a_nan():
    region = ProjectionSet(centre(), Radii(1.0, None, 1.0))
    assert region.contains(centre())
    outside = centre()
    outside.c[0] += 2.0
    assert not region.contains(outside)
    free_but_nan = centre()
    free_but_nan.U[0, 0] = math.nan
    for question in (region.contains, region.project, region.active):
        with pytest.raises(ValueError, match=r"parameters\.U: expected finite values, got nan"):
            question(free_but_nan)


@pytest.mark.parametrize("radius", [-1.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("block", ["c", "U", "W"])
def test_a_radius_is_finite_and_not_negative(block, radius):
    values = {"c": 1.0, "U": 1.0, "W": 1.0} | {block: radius}
    message = rf"radii\.{block}: expected a finite number >= 0, got .* None leaves it free"
    with pytest.raises(ValueError, match=message):
        Radii(**values)


def test_parameters_of_another_shape_are_refused():
    region = ProjectionSet(centre(), Radii(1.0, 1.0, 1.0))
    other = symmetric_initialisation(4, DIMENSION, generator=generator(0), dtype=torch.float64)
    with pytest.raises(ValueError, match=r"parameters: expected W of shape \(6, 3, 3\)"):
        region.project(other)
    with pytest.raises(ValueError, match=r"dtype torch\.float64"):
        region.contains(centre(torch.float32))
    with pytest.raises(ValueError, match=r"centre\.c"):
        ProjectionSet(Parameters(centre().c[:2], centre().U, centre().W), Radii(1.0, 1.0, 1.0))


def test_a_head_on_the_boundary_up_to_rounding_is_active():
    region = ProjectionSet(centre(), Radii(1.0, 1.0, 1.0))
    limit = 1.0 / math.sqrt(HEADS)
    for share, active in ((1 - 1e-7, HEADS), (1 - 1e-3, 0)):
        moved = centre().c + share * limit
        assert region.active(centre()._replace(c=moved)) == (active, 0, 0)


def test_what_comes_back_from_inside_shares_no_memory():
    region = ProjectionSet(centre(), Radii(10.0, 10.0, 10.0))
    phi = around(1, 0.1)
    for block, projected in zip(phi, region.project(phi), strict=True):
        assert torch.equal(block, projected)
        assert block.data_ptr() != projected.data_ptr()
