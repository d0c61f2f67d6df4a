"""The parameter tuple and the two random initialisations."""

import math

import pytest
import torch

from attention_dynamics.models import (
    Parameters,
    independent_initialisation,
    symmetric_initialisation,
)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def parameters():
    return independent_initialisation(5, 3, generator=seeded(), dtype=torch.float64)


def test_sizes_and_arithmetic(parameters):
    assert (parameters.heads, parameters.dimension) == (5, 3)
    assert parameters.dtype == torch.float64
    doubled = parameters.plus(parameters)
    for block, twice, scaled in zip(parameters, doubled, parameters.scaled(2.0), strict=True):
        assert torch.equal(twice, 2 * block)
        assert torch.equal(scaled, twice)
    assert all(block.abs().max() == 0 for block in parameters.minus(parameters))
    flat = torch.cat([block.flatten() for block in parameters])
    torch.testing.assert_close(parameters.inner(parameters), flat @ flat)


def test_block_norms_are_one_number_a_head(parameters):
    norms = parameters.block_norms()
    assert [n.shape for n in norms] == [(5,)] * 3
    assert norms.c[2] == parameters.c[2].abs()
    torch.testing.assert_close(norms.U[2], parameters.U[2].square().sum().sqrt())
    torch.testing.assert_close(norms.W[2], parameters.W[2].square().sum().sqrt())


def test_clone_shares_nothing_and_detach_leaves_the_graph(parameters):
    free = parameters.map(lambda block: block.clone().requires_grad_())
    assert not any(block.requires_grad for block in free.detach())
    copied = parameters.clone()
    copied.U.zero_()
    assert parameters.U.abs().max() > 0


def test_symmetric_initialisation_pairs_the_heads():
    c, U, W = symmetric_initialisation(8, 3, generator=seeded())
    assert torch.equal(c[4:], -c[:4])
    assert torch.equal(U[4:], U[:4])
    assert torch.equal(W[4:], W[:4])
    assert torch.equal(c.abs(), torch.ones(8))
    assert c.dtype == U.dtype == W.dtype == torch.float32
    assert not torch.equal(U[0], U[1])


def test_independent_initialisation_does_not_pair():
    c, U, W = independent_initialisation(8, 3, generator=seeded())
    assert (c.shape, U.shape, W.shape) == ((8,), (8, 3), (8, 3, 3))
    assert not torch.equal(U[4:], U[:4])
    assert not torch.equal(W[4:], W[:4])


@pytest.mark.parametrize("start", [symmetric_initialisation, independent_initialisation])
def test_the_laws_are_standard_gaussian_and_fair_signs(start):
    heads = 20_000
    c, U, W = start(heads, 4, generator=seeded(7), dtype=torch.float64)
    half = heads // 2
    assert set(c.tolist()) == {-1.0, 1.0}
    assert abs(c[:half].mean()) < 5 / math.sqrt(half)
    for block in (U[:half], W[:half]):
        count = block.numel()
        assert abs(block.mean()) < 5 / math.sqrt(count)
        assert abs(block.square().mean() - 1) < 5 * math.sqrt(2 / count)
        assert abs(block.pow(4).mean() - 3) < 5 * math.sqrt(96 / count)


@pytest.mark.parametrize("start", [symmetric_initialisation, independent_initialisation])
def test_one_seed_gives_the_same_heads_in_every_dtype(start):
    single = start(6, 3, generator=seeded(3), dtype=torch.float32)
    double = start(6, 3, generator=seeded(3), dtype=torch.float64)
    for low, high in zip(single, double, strict=True):
        assert torch.equal(low, high.float())
    for block in (double.U, double.W):  # float64 heads use all of their digits
        assert not torch.equal(block, block.float().double())
    other = start(6, 3, generator=seeded(4), dtype=torch.float32)
    assert not torch.equal(single.U, other.U)


@pytest.mark.parametrize("heads", [1, 0, -2, 4.0, True])
def test_too_few_or_no_integer_heads_are_refused(heads):
    with pytest.raises(ValueError, match=r"heads: expected an integer >= 2, got"):
        symmetric_initialisation(heads, 3, generator=seeded())


def test_dimension_and_generator_are_checked():
    with pytest.raises(ValueError, match=r"dimension: expected an integer >= 1, got 0"):
        independent_initialisation(4, 0, generator=seeded())
    with pytest.raises(TypeError, match=r"generator: .* got int; .*manual_seed"):
        symmetric_initialisation(4, 3, generator=5)


def test_a_tuple_of_wrong_shapes_names_the_block(parameters):
    parameters.require_valid()
    with pytest.raises(ValueError, match=r"parameters.c: .* m = 5, got \(4,\)"):
        parameters._replace(c=parameters.c[:4]).require_valid()
    with pytest.raises(ValueError, match=r"start.W: .* d = 3, got \(5, 3, 2\)"):
        parameters._replace(W=parameters.W[..., :2]).require_valid("start")
    with pytest.raises(ValueError, match=r"parameters.U: expected shape \(m, d\), got \(5,\)"):
        Parameters(parameters.c, parameters.c, parameters.W).require_valid()
    with pytest.raises(TypeError, match=r"parameters.c: has dtype torch.float32"):
        parameters._replace(c=parameters.c.float()).require_valid()
