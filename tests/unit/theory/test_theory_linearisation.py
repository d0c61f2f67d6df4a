"""The tangent model: its error, and the worst direction against random ones."""

import math

import numpy as np
import pytest
import torch

from attention_dynamics.data.streams import generator
from attention_dynamics.data.tokens import query_vector, unit_ball_tokens
from attention_dynamics.models import shallow
from attention_dynamics.models.parameters import Parameters, symmetric_initialisation
from attention_dynamics.theory import (
    UNIT_BALL,
    adversarial_perturbation,
    linearisation_error,
    linearised,
    network_constants,
    random_perturbation,
)
from attention_dynamics.training import ProjectionSet, Radii

d, T, n = 4, 5, 30
RADII = Radii(2.0, 1.5, 3.0)


def initial_of(heads=8, seed=0, dtype=torch.float64):
    return symmetric_initialisation(heads, d, generator=generator(seed, heads), dtype=dtype)


def inputs(query="fixed", dtype=torch.float64):
    tokens = unit_ball_tokens(n, T, d, generator=generator(0, "t"), law="sphere", dtype=dtype)
    if query == "fixed":
        query = query_vector(d, generator=generator(0, "q"), dtype=dtype)
    return tokens, query


@pytest.mark.parametrize("query", ["fixed", "last"])
def test_the_tangent_model_is_the_first_order_expansion(query):
    tokens, query = inputs(query)
    initial, phi = initial_of(), random_perturbation(initial_of(), RADII, generator=generator(1))

    def value(c, U, W):
        return shallow.forward(Parameters(c, U, W), tokens, query=query)

    f0, slope = torch.func.jvp(value, tuple(initial), tuple(phi.minus(initial)))
    found = linearised(initial, phi, tokens, query=query)
    assert torch.allclose(found, f0 + slope, rtol=1e-11, atol=1e-14)
    error = linearisation_error(initial, phi, tokens, query=query)
    assert torch.allclose(error, value(*phi) - found, rtol=0, atol=1e-14)


def test_the_error_is_of_second_order():
    tokens, query = inputs()
    initial = initial_of()
    direction = random_perturbation(initial, RADII, generator=generator(1)).minus(initial)
    sizes = [
        float(
            linearisation_error(
                initial, initial.plus(direction.scaled(h)), tokens, query=query
            ).abs().max()
        )
        for h in (1e-2, 1e-3)
    ]  # fmt: skip
    assert math.log10(sizes[0] / sizes[1]) == pytest.approx(2.0, abs=0.02)


def test_the_error_of_float32_parameters_is_not_lost_in_rounding():
    tokens, query = inputs(dtype=torch.float32)
    initial = initial_of(512, dtype=torch.float32)
    phi = random_perturbation(initial, Radii(0.05, 0.05, 0.05), generator=generator(1))
    found = linearisation_error(initial, phi, tokens, query=query)
    wide = linearisation_error(
        initial.to(dtype=torch.float64), phi.to(dtype=torch.float64), tokens.double(),
        query=query.double(),
    )  # fmt: skip
    assert found.dtype == torch.float64
    assert torch.equal(found, wide)


def test_random_perturbations_are_on_the_boundary():
    initial = initial_of()
    phi = random_perturbation(initial, RADII, generator=generator(1))
    norms = phi.minus(initial).block_norms()
    for size, rho in zip(norms, (2.0, 1.5, 3.0), strict=True):
        assert torch.allclose(size, torch.full_like(size, rho / math.sqrt(8)), rtol=1e-12)
    frozen = random_perturbation(initial, Radii(0.0, 1.0, 0.0), generator=generator(1))
    assert torch.equal(frozen.W, initial.W)
    again = random_perturbation(initial, RADII, generator=generator(1))
    assert torch.equal(again.W, phi.W)


def worst(heads, query, radii=RADII, seed=0, **options):
    tokens, query = inputs(query)
    return adversarial_perturbation(
        initial_of(heads, seed),
        radii,
        tokens,
        query=query,
        generator=generator(seed, "a"),
        **options,
    )


@pytest.mark.parametrize("query", ["fixed", "last"])
@pytest.mark.parametrize("activation", ["tanh", "erf"])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_the_adversary_is_in_the_set_below_the_bound_and_above_random(query, activation, scale):
    tokens, q = inputs(query)
    initial = initial_of(32)
    common = {"query": q, "activation": activation, "scale": scale}
    found = adversarial_perturbation(initial, RADII, tokens, generator=generator(0, "a"), **common)
    assert ProjectionSet(initial, RADII).contains(found.parameters, atol=1e-14)
    reached = found.parameters.minus(initial).block_norms().W  # the worst direction uses W fully
    assert torch.allclose(reached, torch.full_like(reached, RADII.W / math.sqrt(32)), rtol=1e-9)
    errors = linearisation_error(initial, found.parameters, tokens, **common).abs()
    assert found.error == float(errors.max())
    assert found.sample == int(errors.argmax())
    random = 0.0
    for k in range(20):
        phi = random_perturbation(initial, RADII, generator=generator(k))
        random = max(random, float(linearisation_error(initial, phi, tokens, **common).abs().max()))
    assert found.error > 3 * random
    constants = network_constants(initial, RADII, activation=activation, inputs=UNIT_BALL)
    assert found.error <= constants.linearisation_error


def test_the_adversary_finds_what_many_starts_find():
    few = worst(8, "fixed", candidates=3, starts=8, steps=30).error
    many = worst(8, "fixed", candidates=3, starts=64, steps=90).error
    assert 0.9 * many < few <= many * (1 + 1e-3)


def test_both_signs_of_the_error_are_attacked():
    # (c, delta_c) -> (-c, -delta_c) flips the error, so c and -c have the same supremum. With
    # heads of one sign, unlike with paired ones, its two signs are far apart.
    tokens, query = inputs()
    U = 0.5 + initial_of(8).U.abs()
    one_sided = Parameters(torch.ones(8).double(), U, initial_of(8).W)
    errors = [
        adversarial_perturbation(
            one_sided._replace(c=sign * one_sided.c), Radii(0.0, 2.0, 2.0), tokens.abs(),
            query=query, generator=generator(0), candidates=2, starts=24,
        ).error
        for sign in (1.0, -1.0)
    ]  # fmt: skip
    assert errors[0] == pytest.approx(errors[1], rel=0.02)


def test_more_steps_climb_higher():
    # the starts are the same, and each head keeps the best point it has seen
    heights = [worst(8, "fixed", candidates=1, starts=2, steps=k).error for k in (1, 4, 30)]
    assert heights[0] * 1.001 < heights[1] <= heights[2]


def test_every_block_can_be_attacked_alone():
    for radii in (Radii(0.0, 2.0, 0.0), Radii(0.0, 0.0, 2.0), Radii(1.0, 1.0, 0.0)):
        found = worst(16, "last", radii)
        assert found.error > 0
        assert ProjectionSet(initial_of(16), radii).contains(found.parameters, atol=1e-14)
    # f is linear in c: alone, it makes no error at all
    assert worst(16, "last", Radii(2.0, 0.0, 0.0)).error < 1e-14


def test_masked_tokens_do_not_help_the_adversary():
    tokens, query = inputs()
    mask = torch.ones(n, T, dtype=torch.bool)
    mask[:, 3:] = False
    initial = initial_of(16)
    options = {"query": query, "candidates": 2}
    found = adversarial_perturbation(
        initial, RADII, tokens, mask=mask, generator=generator(0), **options
    )
    short = adversarial_perturbation(
        initial, RADII, tokens[:, :3], generator=generator(0), **options
    )
    assert found.error == pytest.approx(short.error, rel=1e-10)


def test_the_worst_error_falls_like_the_root_of_the_width_and_random_ones_like_the_width():
    widths, tokens = (16, 64, 256), inputs()
    aligned, random = [], []
    for m in widths:
        aligned.append(
            np.mean(
                [worst(m, "fixed", seed=s, candidates=2, starts=4, steps=5).error for s in (0, 1)]
            )
        )
        squares = [
            float(
                linearisation_error(
                    initial_of(m, k),
                    random_perturbation(initial_of(m, k), RADII, generator=generator(k, "r", m)),
                    tokens[0],
                    query=tokens[1],
                ).square().mean()
            )
            for k in range(30)
        ]  # fmt: skip
        random.append(math.sqrt(np.mean(squares)))
    slope = lambda values: np.polyfit(np.log(widths), np.log(values), 1)[0]  # noqa: E731
    assert -0.7 < slope(aligned) < -0.35
    assert -1.25 < slope(random) < -0.8


@pytest.mark.parametrize("block", ["c", "U", "W"])
def test_a_free_block_is_refused(block):
    radii = Radii(**({"c": 1.0, "U": 1.0, "W": 1.0} | {block: None}))
    with pytest.raises(ValueError, match=rf"radii\.{block}: expected a number, got None"):
        worst(8, "last", radii)
    with pytest.raises(ValueError, match=rf"radii\.{block}: expected a number, got None"):
        random_perturbation(initial_of(), radii, generator=generator(0))


def test_parameters_of_another_model_are_refused():
    # One head would broadcast against eight, and the difference be meaningless.
    tokens, query = inputs()
    one = initial_of().map(lambda block: block[:1])
    message = r"parameters: expected W of shape \(8, 4, 4\), as in initial, got \(1, 4, 4\)"
    for function in (linearised, linearisation_error):
        with pytest.raises(ValueError, match=message):
            function(initial_of(), one, tokens, query=query)
    with pytest.raises(TypeError, match=r"tokens: expected a torch\.Tensor .* got ndarray"):
        linearisation_error(initial_of(), initial_of(), tokens.numpy(), query=query)


@pytest.mark.parametrize("argument", ["candidates", "starts", "steps"])
def test_counts_must_be_positive(argument):
    with pytest.raises(ValueError, match=f"{argument}: expected an integer >= 1, got 0"):
        worst(8, "last", **{argument: 0})
