"""Two exact savings: w = W q in place of W, and half of the heads while they are paired."""

import pytest
import torch
from model_instances import Instance

from attention_dynamics.models import Parameters, reduction, shallow, symmetric_initialisation
from attention_dynamics.training.projection import ProjectionSet, Radii


def test_500_projected_steps_on_w_are_500_projected_steps_on_W():
    instance = Instance(samples=40, length=5, dimension=4, heads=6, query_kind="fixed")
    start, q, eta = instance.parameters, 1.7 * instance.query, 0.3
    data, target = instance.tokens, instance.targets
    radii = Radii(0.5, 0.5, 0.5)
    region, phi = ProjectionSet(start, radii), start
    reduced = reduction.reduce(start, q)
    # The reduced problem as one of matrices whose first column is w, seen by the query e_1.
    unit = torch.eye(4, dtype=torch.float64)[0]
    first = torch.einsum("md,e->mde", reduced.w, unit)
    small_start = small = Parameters(reduced.c, reduced.U, first)
    small_region = ProjectionSet(
        small_start, Radii(radii.c, radii.U, radii.W * float(reduced.radius_factor))
    )
    touched = 0
    for _ in range(500):
        _, g = shallow.loss_and_gradients(phi, data, target, query=q)
        candidate = phi.minus(g.scaled(eta))
        phi = region.project(candidate)
        touched += int((phi.W != candidate.W).any())
        _, g = shallow.loss_and_gradients(small, data, target, query=unit)
        g = g._replace(W=g.W * reduced.step_factor)
        small = small_region.project(small.minus(g.scaled(eta)))
    assert touched > 100
    lifted = reduction.lift(small.c, small.U, small.W @ unit, initial=start, query=q)
    for left, right in zip(lifted, phi, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)
    assert (phi.W - start.W).abs().max() > 0.05


def test_lifting_what_was_reduced_gives_the_parameters_back():
    instance = Instance(query_kind="fixed")
    c, U, w, *_ = reduction.reduce(instance.parameters, instance.query)
    lifted = reduction.lift(c, U, w, initial=instance.parameters, query=instance.query)
    torch.testing.assert_close(tuple(lifted), tuple(instance.parameters), rtol=0, atol=1e-15)


def test_a_query_of_zeros_is_refused():
    instance = Instance()
    with pytest.raises(ValueError, match=r"query: expected a vector other than 0"):
        reduction.reduce(instance.parameters, torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("engine", ["auto", "reference", "eager"])
def test_half_of_the_heads_give_the_tangent_map_of_paired_heads(engine):
    instance = Instance(heads=8, mask_kind="padding", query_kind="last")
    start = symmetric_initialisation(
        8, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    assert start.is_symmetric()
    assert start.half().heads == 4
    gradients = shallow.per_sample_gradients(start, instance.tokens, **instance.options)
    expected = sum(
        (block * tangent).flatten(1).sum(dim=1)
        for block, tangent in zip(gradients, instance.tangent, strict=True)
    )
    actual = shallow.jvp(
        start, instance.tokens, instance.tangent, **instance.options, engine=engine
    )
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)


def test_half_of_the_heads_give_the_tangent_kernel_of_paired_heads():
    instance = Instance(samples=5)
    start = symmetric_initialisation(
        6, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )

    def kernel(parameters):
        blocks = shallow.per_sample_gradients(parameters, instance.tokens, query=instance.query)
        return sum(block.flatten(1) @ block.flatten(1).mT for block in blocks)

    torch.testing.assert_close(kernel(start.half()), kernel(start), rtol=1e-13, atol=1e-13)


def test_heads_that_are_not_paired_are_told_and_not_halved():
    start = symmetric_initialisation(6, 3, generator=torch.Generator().manual_seed(2))
    bent = start._replace(U=start.U + torch.eye(6)[:, :3] * 1e-6)
    odd = Instance(heads=5).parameters
    assert not bent.is_symmetric()
    assert not odd.is_symmetric()
    with pytest.raises(ValueError, match="parameters: expected paired heads"):
        bent.half()
