"""The fused kernel against the formulas: values, gradients, threads, masks, extremes."""

import itertools

import pytest
import torch
from fused_cases import (
    DIMENSIONS,
    HEADS,
    LENGTHS,
    QUERIES,
    Case,
    error,
    features_by_formula,
    gradients_by_autograd,
    slopes_by_formula,
)

from attention_dynamics.models import get_activation, symmetric_initialisation
from attention_dynamics.models._pass import Inputs
from attention_dynamics.models.engines import native
from attention_dynamics.models.engines.fused import Fused

pytestmark = pytest.mark.compiler

FUSED = Fused()
TOLERANCE = {torch.float64: 1e-12, torch.float32: 32 * torch.finfo(torch.float32).eps}
SHAPES = list(itertools.product(HEADS, DIMENSIONS))


def cases(heads, dimension, **fixed):
    """All lengths, the kinds of query and mask in turn."""
    for seed, T in enumerate(LENGTHS):
        query = QUERIES[(seed + heads + dimension) % 3]
        yield Case(
            m=heads, T=T, d=dimension, query=query, masked=bool((seed + heads) % 2), seed=seed,
            **fixed,
        )  # fmt: skip


def steepness(case):
    """The largest logit, at least 1: what float32 loses in a softmax grows with it."""
    tokens, query, _ = case.inputs
    query = query.expand(tokens.shape[0], -1)
    logits = case.scale * torch.einsum("ntd,mde,ne->nmt", tokens, case.parameters.W, query)
    return max(1.0, float(logits.abs().max()))


@pytest.fixture(autouse=True, scope="module")
def _built():
    native.library("attention.cpp")  # raises with the reason, rather than let engines fall back


@pytest.mark.parametrize(("heads", "dimension"), SHAPES)
def test_features_scores_and_slopes_are_the_formulas(heads, dimension):
    for case in cases(heads, dimension):
        for dtype, tolerance in TOLERANCE.items():
            used = case.cast(dtype)
            _, U, W = used.parameters
            s, a, r = features_by_formula(case, case.parameters.U, case.parameters.W)
            tolerance = tolerance * (1 if dtype == torch.float64 else steepness(case))
            # What s and r are rounded against: the projections s_t, and their products with x_t.
            size = float((case.parameters.U.norm() * case.inputs.tokens.norm()) / case.T**0.5)
            got = FUSED.features(used.inputs, U, W, case.scale)
            assert error(got.s, s, size) < tolerance
            assert error(got.a, a) < tolerance
            assert error(got.r, r, size * float(case.inputs.tokens.norm(dim=-1).max())) < tolerance
            assert torch.equal(FUSED.scores(used.inputs, U, W, case.scale), got.s)
            V, Z = used.tangent.U, used.tangent.W
            along, slopes = FUSED.slopes(used.inputs, U, W, V, Z, case.scale)
            assert torch.equal(along, got.s)
            expected = slopes_by_formula(case)
            assert error(slopes, expected, float(case.tangent.W.norm()) * size) < tolerance


@pytest.mark.parametrize("activation", ["tanh", "erf", "erf_plain"])
@pytest.mark.parametrize(("heads", "dimension"), SHAPES)
def test_a_step_and_a_pullback_are_the_gradients(heads, dimension, activation):
    sigma = get_activation(activation)
    for case in cases(heads, dimension):
        y = case.targets
        f, expected = gradients_by_autograd(case, sigma, lambda f, y=y: (f - y).square().mean())
        _, pulled = gradients_by_autograd(case, sigma, lambda f, y=y: f @ y)
        step = FUSED.step(case.inputs, case.parameters, sigma, case.scale, y)
        vjp = FUSED.vjp(case.inputs, case.parameters, sigma, case.scale, y)
        assert error(step[0], f, 0.1) < 1e-12
        values = FUSED.values(case.inputs, case.parameters, sigma, case.scale)
        assert torch.equal(values, step[0])
        # A saturated softmax leaves gradients in W far below the terms they are the sum of.
        floors = (0.01, 0.01, 0.01 * steepness(case))
        for got, block, floor in zip(step[1], expected, floors, strict=True):
            assert error(got, block, floor) < 1e-12
        for got, block, floor in zip(vjp, pulled, floors, strict=True):
            assert error(got, block, floor) < 1e-12


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("heads", [8, 64])
def test_a_step_in_single_precision_keeps_its_digits(heads, query):
    case = Case(m=heads, T=16, d=8, n=300, query=query)
    _, expected = gradients_by_autograd(case, "tanh", lambda f: (f - case.targets).square().mean())
    used = case.cast(torch.float32)
    sigma = get_activation("tanh")
    _, got = FUSED.step(used.inputs, used.parameters, sigma, case.scale, used.targets)
    for one, other in zip(got, expected, strict=True):
        assert error(one, other) < TOLERANCE[torch.float32] * steepness(case)


def test_sums_over_heads_are_those_of_the_tangent_map():
    for query in QUERIES:
        case = Case(m=37, T=16, d=8, n=50, query=query)
        s = features_by_formula(case, case.parameters.U, case.parameters.W).s
        sigma = torch.tanh(s)
        along = case.parameters.c * (1 - sigma * sigma) * slopes_by_formula(case)
        z = case.tangent.c * sigma + along
        total, squares = FUSED.sums(case.inputs, case.parameters, case.tangent, case.scale)
        assert error(total, z.sum(dim=-1)) < 1e-12
        assert error(squares, z.square().sum(dim=-1)) < 1e-12


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_threads_do_not_change_a_bit(query, dtype):
    case = Case(m=40, T=33, d=9, n=700, query=query, masked=True).cast(dtype)
    sigma = get_activation("tanh")
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            f, gradients = FUSED.step(case.inputs, case.parameters, sigma, case.scale, case.targets)
            pulled = FUSED.vjp(
                case.inputs, case.parameters, get_activation("erf"), case.scale, case.targets
            )
            results.append((f, *gradients, pulled.U, pulled.W))
    finally:
        torch.set_num_threads(1)
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


@pytest.mark.parametrize("heads", [2, 6, 8, 20, 64, 66])
@pytest.mark.parametrize("activation", ["tanh", "erf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_symmetric_start_is_exactly_zero(heads, activation, dtype):
    case = Case(m=heads, T=70, d=5, n=20, masked=True, size=3.0).cast(dtype)
    start = symmetric_initialisation(
        heads, 5, generator=torch.Generator().manual_seed(1), dtype=dtype
    )
    start = start._replace(c=torch.cat((start.c.chunk(2)[0] * 0.3, -start.c.chunk(2)[0] * 0.3)))
    sigma = get_activation(activation)
    f, gradients = FUSED.step(case.inputs, start, sigma, 1.0, case.targets)
    assert torch.equal(f, torch.zeros_like(f))
    assert gradients.c.abs().max() > 0
    first, second = FUSED.scores(case.inputs, start.U, start.W, 1.0).chunk(2, dim=-1)
    assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [30.0, 1e3])
def test_extreme_logits_choose_one_token(dtype, size):
    case = Case(m=17, T=200, d=4, n=6, query="free", size=size, scale=10.0)
    used = case.cast(dtype)
    s, a, _ = features_by_formula(case, case.parameters.U, case.parameters.W)
    got = FUSED.features(used.inputs, used.parameters.U, used.parameters.W, case.scale)
    if dtype == torch.float64:
        assert error(got.s, s) < 1e-12
        assert error(got.a, a) < 1e-12
    assert all(torch.isfinite(block).all() for block in got)
    # A weighted mean of tokens stays within them, and their covariance shrinks to nothing.
    assert got.a.abs().max() <= used.inputs.tokens.abs().max() * (1 + 1e-6)


def test_a_common_offset_of_the_tokens_is_taken_off():
    case = Case(m=8, T=100, d=4, n=5, query="free", scale=0.01)
    far = case.inputs._replace(tokens=case.inputs.tokens + 1e4)
    U, W = case.parameters.U, case.parameters.W
    exact = features_by_formula(case, U, W).r
    got = FUSED.features(far, U, W, case.scale).r
    # M U does not know the offset; the weights do, through logits rounded at 1e2.
    case.inputs = far
    assert error(got, features_by_formula(case, U, W).r) < 1e-6
    assert got.abs().max() < 10 * exact.abs().max()


def test_one_token_leaves_no_gradient_in_W():
    case = Case(m=9, T=1, d=3, n=40)
    sigma = get_activation("tanh")
    _, gradients = FUSED.step(case.inputs, case.parameters, sigma, 1.0, case.targets)
    assert torch.equal(gradients.W, torch.zeros_like(gradients.W))
    assert gradients.U.abs().max() > 0


def test_strided_inputs_are_read_as_they_look():
    case = Case(m=5, T=7, d=4, n=6, query="last", masked=True)
    tokens, _, mask = case.inputs
    strided = Inputs(
        tokens.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        tokens.permute(2, 0, 1).contiguous().permute(1, 2, 0)[:, -1],
        mask.mT.contiguous().mT,
    )
    U, W = case.parameters.U, case.parameters.W
    expected = FUSED.features(case.inputs, U, W, 1.0)
    got = FUSED.features(strided, U.mT.contiguous().mT, W.mT.contiguous().mT, 1.0)
    assert all(torch.equal(one, two) for one, two in zip(got, expected, strict=True))
    unaligned = torch.cat((tokens.new_zeros(1), tokens.flatten()))[1:].view_as(tokens)
    got = FUSED.features(case.inputs._replace(tokens=unaligned), U, W, 1.0)
    assert all(torch.equal(one, two) for one, two in zip(got, expected, strict=True))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_a_number_stays_visible(value):
    case = Case(m=9, T=70, d=3, n=4, query="fixed")
    case.inputs.tokens[2, 40, 1] = value
    sigma = get_activation("tanh")
    f, gradients = FUSED.step(case.inputs, case.parameters, sigma, 1.0, case.targets)
    assert torch.isnan(f).tolist() == [False, False, True, False]
    assert torch.isnan(gradients.U).all()


@pytest.mark.parametrize("field", ["c", "U", "W"])
def test_the_comparison_sees_a_wrong_kernel(field):
    """A kernel that is wrong by one part in 10^8 in one number fails the tests above."""
    case = Case(m=8, T=16, d=8)
    sigma = get_activation("tanh")
    _, expected = gradients_by_autograd(case, sigma, lambda f: (f - case.targets).square().mean())
    block = getattr(case.parameters, field).clone()
    block.view(-1)[0] *= 1 + 1e-8
    wrong = case.parameters._replace(**{field: block})
    _, got = FUSED.step(case.inputs, wrong, sigma, case.scale, case.targets)
    worst = max(error(one, two, 0.01) for one, two in zip(got, expected, strict=True))
    assert worst > 1e-12


def test_the_kernel_says_what_it_does_not_know():
    case = Case()
    assert FUSED.refusal(case.inputs, 8) is None
    half = Inputs(*(block.half() for block in case.inputs[:2]), None)
    assert FUSED.refusal(half, 8) == "the dtype is torch.float16"
    meta = Inputs(*(block.to("meta") for block in case.inputs[:2]), None)
    assert FUSED.refusal(meta, 8) == "the tokens are on meta"
