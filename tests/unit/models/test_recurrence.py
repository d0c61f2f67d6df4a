"""The closed back-propagation through time, each engine against automatic differentiation."""

import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention_dynamics.models import ERF, TANH, Activation, IndRNN, indrnn, recurrence
from attention_dynamics.models.engines import native, selection
from attention_dynamics.models.engines import recurrence as engines
from attention_dynamics.models.places import find_places
from attention_dynamics.models.recurrence import RecurrentParameters

ENGINES = ("reference", "eager", "fused")
CLOSED = ("eager", "fused")


def problem(n, T, m, d, seed=0, dtype=torch.float64, largest_u=1.5):
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64)

    u = largest_u * (2 * torch.rand(m, generator=g, dtype=torch.float64) - 1)
    parameters = RecurrentParameters(draw(m, d), u, draw(m))
    tokens, targets = draw(n, T, d), draw(n)
    return parameters.map(lambda block: block.to(dtype)), tokens.to(dtype), targets.to(dtype)


def by_hand(parameters, tokens, targets, activation="tanh"):
    """Autograd through a loop that shares no code with the library's formula."""
    sigma = indrnn.get_activation(activation)
    w, u, c = (block.clone().requires_grad_() for block in parameters)
    h = torch.zeros(tokens.shape[0], w.shape[0], dtype=tokens.dtype)
    for t in range(tokens.shape[1]):
        h = sigma.value(tokens[:, t] @ w.T + u * h)
    f = h @ c / w.shape[0] ** 0.5
    loss = (f - targets).square().mean()
    return f.detach(), loss.detach(), torch.autograd.grad(loss, (w, u, c))


def assert_near(found, expected, tolerance, absolute=0.0):
    """Norm-wise: block by block, relative to the norm of the block."""
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        assert (a - b).norm() <= tolerance * b.norm() + absolute


def rounding(parameters, tokens, targets, eps):
    """How far rounding may move the gradients of a problem in float64: 32 eps, magnified.

    A state's error grows with the products of u tanh' until the last step, and it moves the slopes
    1 - h^2 by as much, so it counts against gradients in which they are 1.
    """
    w, u, c = parameters
    h = torch.zeros(tokens.shape[0], w.shape[0], dtype=tokens.dtype)
    growth = worst = torch.ones_like(h)
    for x in tokens.unbind(1):
        h = torch.tanh(x @ w.T + u * h)
        growth = 1 + growth * (u * (1 - h * h)).abs()
        worst = torch.maximum(worst, growth)
    scale = c.shape[0] ** -0.5
    residual = (h @ c * scale - targets).abs() + scale * c.abs().sum()
    unsaturated = 2 * residual.mean() * scale * c.norm() * (1 + tokens.norm(dim=-1).max())
    return (32 * eps * worst.max() ** 2 * (unsaturated + residual.max() ** 2)).item()


@pytest.mark.parametrize("engine", ENGINES)
@given(
    st.integers(1, 9),
    st.integers(1, 200),
    st.integers(1, 20),
    st.integers(1, 18),
    st.integers(0, 9999),
)
def test_the_closed_form_is_autograd_in_float64(engine, n, T, m, d, seed):
    parameters, tokens, targets = problem(n, T, m, d, seed)
    f, loss, expected = by_hand(parameters, tokens, targets)
    found, gradients = recurrence.loss_and_gradients(parameters, tokens, targets, engine=engine)
    noise = rounding(parameters, tokens, targets, torch.finfo(torch.float64).eps)
    assert_near((found, *gradients), (loss, *expected), 1e-12, noise)
    assert_near((recurrence.forward(parameters, tokens, engine=engine),), (f,), 1e-12, noise)


@pytest.mark.parametrize("engine", CLOSED)
@pytest.mark.parametrize("activation", ["erf", "erf_plain", ERF])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (7, 23, 5, 3), (9, 60, 20, 18)])
def test_other_activations(engine, activation, shape):
    parameters, tokens, targets = problem(*shape, largest_u=1.0)
    f, loss, expected = by_hand(parameters, tokens, targets, activation)
    options = {"activation": activation, "engine": engine}
    found, gradients = recurrence.loss_and_gradients(parameters, tokens, targets, **options)
    assert_near((found, *gradients), (loss, *expected), 1e-12)
    assert_near((recurrence.forward(parameters, tokens, **options),), (f,), 1e-12)


@pytest.mark.parametrize("engine", ENGINES)
@given(st.integers(1, 9), st.integers(1, 60), st.integers(1, 40), st.integers(1, 18), st.integers())
def test_float32_is_as_good_as_its_rounding(engine, n, T, m, d, seed):
    parameters, tokens, targets = problem(n, T, m, d, seed % 10_000, torch.float32, 1.0)
    double = [block.double() for block in (*parameters, tokens, targets)]
    exact = RecurrentParameters(*double[:3])
    _, loss, expected = by_hand(exact, *double[3:])
    found, gradients = recurrence.loss_and_gradients(parameters, tokens, targets, engine=engine)
    assert found.dtype == gradients.w.dtype == torch.float32
    eps = torch.finfo(torch.float32).eps
    noise = rounding(exact, *double[3:], eps)
    doubled = [block.double() for block in (found, *gradients)]
    assert_near(doubled, (loss, *expected), 32 * eps, noise)


@pytest.mark.parametrize("engine", CLOSED)
def test_chunks_do_not_change_the_result(engine):
    parameters, tokens, targets = problem(9, 12, 5, 3)
    whole = recurrence.loss_and_gradients(parameters, tokens, targets, engine=engine)
    for chunk in (1, 2, 4, 100):
        loss, gradients = recurrence.loss_and_gradients(
            parameters, tokens, targets, engine=engine, chunk=chunk
        )
        assert_near((loss, *gradients), (whole[0], *whole[1]), 1e-13)
        values = recurrence.forward(parameters, tokens, engine=engine, chunk=chunk)
        assert_near((values,), (by_hand(parameters, tokens, targets)[0],), 1e-13)


def test_three_hundred_steps_agree_between_engines():
    ends = []
    for engine in ENGINES:
        parameters, tokens, targets = problem(40, 12, 10, 3, largest_u=0.5)
        losses = []
        for _ in range(300):
            loss, gradients = recurrence.loss_and_gradients(
                parameters, tokens, targets, engine=engine, validate=False
            )
            parameters = parameters.minus(gradients.scaled(0.05))
            losses.append(loss)
        assert losses[-1] < 0.5 * losses[0]
        ends.append(parameters)
    for other in ends[1:]:
        assert_near(other, ends[0], 1e-10)


def test_the_gradient_is_a_limit_of_differences():
    parameters, tokens, targets = problem(4, 9, 3, 2)
    _, gradients = recurrence.loss_and_gradients(parameters, tokens, targets, engine="fused")
    direction = RecurrentParameters(*(torch.randn_like(block) for block in parameters))

    def loss(step):
        moved = parameters.minus(direction.scaled(-step))
        return (recurrence.forward(moved, tokens, engine="eager") - targets).square().mean()

    slope = (loss(1e-5) - loss(-1e-5)) / 2e-5
    inner = sum((a * b).sum() for a, b in zip(gradients, direction, strict=True))
    torch.testing.assert_close(inner, slope, rtol=1e-7, atol=1e-9)


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_bit_depends_on_the_number_of_threads(dtype):
    parameters, tokens, targets = problem(301, 20, 20, 5, dtype=dtype)
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(
                recurrence.loss_and_gradients(parameters, tokens, targets, engine="fused")
            )
    finally:
        torch.set_num_threads(1)
    for loss, gradients in results[1:]:
        assert torch.equal(loss, results[0][0])
        assert all(torch.equal(a, b) for a, b in zip(gradients, results[0][1], strict=True))


@pytest.mark.parametrize("engine", ENGINES)
def test_what_overflows_is_not_hidden(engine):
    # h stays 0 with w orthogonal to the tokens, so delta grows like 1.5^T: beyond float32.
    w, u, c = torch.tensor([[0.0, 1.0]]), torch.tensor([1.5]), torch.tensor([1.0])
    x = torch.zeros(2, 400, 2)
    x[..., 0] = 1.0
    parameters, targets = RecurrentParameters(w, u, c), torch.ones(2)
    _, gradients = recurrence.loss_and_gradients(parameters, x, targets, engine=engine)
    assert gradients.w[0, 0] == -torch.inf
    assert gradients.w[0, 1].isnan()  # infinity times a coordinate 0
    assert gradients.u.isnan().all()  # infinity times a state 0
    _, gradients = recurrence.loss_and_gradients(parameters, x[:, :100], targets, engine=engine)
    # delta_t = -2 1.5^{T-t}, summed over t: a geometric series.
    assert gradients.w[0, 0].item() == pytest.approx(-2 * (1.5**100 - 1) / 0.5, rel=1e-4)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("size", [1e-30, 1e-8, 1e8, 1e30])
def test_tiny_and_huge_drives(engine, size):
    parameters, tokens, targets = problem(5, 4, 6, 3, dtype=torch.float32)
    tokens = tokens * size
    double = RecurrentParameters(*(block.double() for block in parameters))
    _, _, expected = by_hand(double, tokens.double(), targets.double())
    _, gradients = recurrence.loss_and_gradients(parameters, tokens, targets, engine=engine)
    for a, b in zip(gradients, expected, strict=True):
        assert (a.double() - b).norm() <= 1e-5 * b.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_long_sequences_are_cut_without_a_trace(dtype):
    # 7000 steps of 40 units exceed the states that the kernel keeps, so it recomputes.
    parameters, tokens, targets = problem(5, 7000, 40, 2, dtype=dtype, largest_u=0.9)
    found = recurrence.loss_and_gradients(parameters, tokens, targets, engine="fused")
    expected = recurrence.loss_and_gradients(parameters, tokens, targets, engine="eager")
    assert_near((found[0], *found[1]), (expected[0], *expected[1]), 1e4 * torch.finfo(dtype).eps)


@pytest.mark.compiler
@pytest.mark.parametrize("options", [("-O1", "-DBYTES=64"), ("-O1", "-DBYTES=16")])
def test_other_widths_of_vectors(options, monkeypatch, tmp_path):
    monkeypatch.setenv("ATTENTION_DYNAMICS_CACHE", str(tmp_path))
    monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, *options))
    clear()
    try:
        for shape in ((1, 1, 1, 1), (9, 31, 20, 7), (18, 5, 40, 18)):
            parameters, tokens, targets = problem(*shape)
            _, loss, expected = by_hand(parameters, tokens, targets)
            found = recurrence.loss_and_gradients(parameters, tokens, targets, engine="fused")
            assert_near((found[0], *found[1]), (loss, *expected), 1e-12)
        tokens[..., 1:] = tokens[:1, :, 1:]
        _, loss, expected = by_hand(parameters, tokens, targets)
        found = recurrence.loss_and_gradients(
            parameters, tokens, targets, engine="fused", places=find_places(tokens)
        )
        assert_near((found[0], *found[1]), (loss, *expected), 1e-12)
        assert engines._kernel(8)[1] == 2 * int(options[1][-2:]) // 8
    finally:
        monkeypatch.undo()
        clear()


def clear():
    for cached in (native.library, getattr(native, "_attempt", None), engines._kernel):
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()
    selection.report.cache_clear()


@pytest.fixture
def _no_compiler(monkeypatch):
    clear()
    monkeypatch.setattr(native, "compiler", lambda: None)
    yield
    monkeypatch.undo()
    clear()


@pytest.mark.usefixtures("_no_compiler")
def test_without_a_compiler_eager_serves_and_says_so(caplog):
    parameters, tokens, targets = problem(6, 8, 4, 3)
    _, loss, expected = by_hand(parameters, tokens, targets)
    with caplog.at_level(logging.INFO, "attention_dynamics"):
        for engine in ("fused", "auto", "fused"):
            found = recurrence.loss_and_gradients(parameters, tokens, targets, engine=engine)
            assert_near((found[0], *found[1]), (loss, *expected), 1e-12)
    # Where the suite is run with another engine forced, that engine has a line of its own.
    lines = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    warnings = [line for line in lines if "engine fused" in line]
    assert len(warnings) == 1
    assert "no C++ compiler" in warnings[0]


@pytest.mark.compiler
def test_the_choice_of_an_engine(monkeypatch):
    parameters, tokens, _ = problem(2, 3, 4, 2)
    monkeypatch.delenv(selection.ENVIRONMENT, raising=False)
    assert engines.choose("auto", tokens, TANH, *parameters) is engines.fused
    assert engines.choose("auto", tokens, ERF, *parameters) is engines.eager
    assert engines.choose("triton", tokens, TANH, *parameters) is engines.eager
    attached = parameters.w.clone().requires_grad_()
    assert engines.choose("fused", tokens, TANH, attached) is engines.reference
    monkeypatch.setenv(selection.ENVIRONMENT, "eager")
    assert engines.choose("auto", tokens, TANH, *parameters) is engines.eager
    with pytest.raises(ValueError, match="engine: expected one of"):
        engines.choose("fastest", tokens, TANH)


def test_a_custom_activation_is_not_taken_for_tanh():
    mine = Activation(
        "half", lambda x: 0.5 * torch.tanh(x), lambda x: 0.5 / torch.cosh(x) ** 2,
        lambda x: -torch.tanh(x) / torch.cosh(x) ** 2, (0.5, 0.5, 0.39),
    )  # fmt: skip
    parameters, tokens, targets = problem(6, 8, 4, 3)
    _, loss, expected = by_hand(parameters, tokens, targets, mine)
    found = recurrence.loss_and_gradients(parameters, tokens, targets, activation=mine)
    assert_near((found[0], *found[1]), (loss, *expected), 1e-12)


def test_transforms_see_the_formula():
    parameters, tokens, targets = problem(5, 6, 4, 3)
    _, _, expected = by_hand(parameters, tokens, targets)

    def loss(phi):
        return (recurrence.forward(phi, tokens, engine="fused") - targets).square().mean()

    assert_near(torch.func.grad(loss)(parameters), expected, 1e-12)
    attached = RecurrentParameters(*(block.clone().requires_grad_() for block in parameters))
    _, gradients = recurrence.loss_and_gradients(attached, tokens, targets)
    second = torch.autograd.grad(gradients.w.square().sum(), attached.u)
    assert second[0].abs().max() > 0


def test_layouts_and_half_precision():
    parameters, tokens, targets = problem(6, 7, 5, 3)
    _, loss, expected = by_hand(parameters, tokens, targets)
    columns = tokens.transpose(1, 2).contiguous().transpose(1, 2)
    spread = torch.stack((targets, targets), dim=1)[:, 0]
    assert not columns.is_contiguous()
    assert not spread.is_contiguous()
    for engine in CLOSED:
        found = recurrence.loss_and_gradients(parameters, columns, spread, engine=engine)
        assert_near((found[0], *found[1]), (loss, *expected), 1e-12)
    half = [block.bfloat16() for block in (*parameters, tokens, targets)]
    found, gradients = recurrence.loss_and_gradients(RecurrentParameters(*half[:3]), *half[3:])
    assert found.dtype == gradients.u.dtype == torch.float32


def test_the_module_has_the_closed_form():
    g = torch.Generator().manual_seed(3)
    model = IndRNN(6, 3, recurrent_init=1.0, generator=g, dtype=torch.float64)
    _, tokens, targets = problem(7, 5, 6, 3)
    loss, gradients = model.loss_and_gradients(tokens, targets)
    assert not loss.requires_grad
    assert model.w.grad is None
    (model(tokens) - targets).square().mean().backward()
    assert_near(gradients, (model.w.grad, model.u.grad, model.c.grad), 1e-12)
    kept = model.snapshot()
    model.load(kept.minus(gradients.scaled(0.1)))
    assert model.loss_and_gradients(tokens, targets)[0] < loss
    assert kept.w.data_ptr() != model.w.data_ptr()
    assert model.snapshot(copy=False).w.data_ptr() == model.w.data_ptr()
    assert (kept.units, kept.dimension, kept.dtype) == (6, 3, torch.float64)
    with pytest.raises(ValueError, match=r"parameters\.u: expected shape \(6,\), got \(5,\)"):
        model.load(kept._replace(u=kept.u[:5]))


def test_bad_input_is_named():
    parameters, tokens, targets = problem(4, 5, 3, 2)
    with pytest.raises(ValueError, match=r"c: .* m = 3, got \(2,\)"):
        recurrence.forward(parameters._replace(c=parameters.c[:2]), tokens)
    with pytest.raises(ValueError, match=r"targets: .* n = 4, got \(3,\)"):
        recurrence.loss_and_gradients(parameters, tokens, targets[:3])
    with pytest.raises(ValueError, match=r"targets: .* got nan"):
        recurrence.loss_and_gradients(parameters, tokens, targets / 0 * 0)
    with pytest.raises(TypeError, match=r"u: has dtype torch\.float32"):
        recurrence.forward(parameters._replace(u=parameters.u.float()), tokens)
    with pytest.raises(ValueError, match="chunk"):
        recurrence.forward(parameters, tokens, chunk=0)


@given(st.integers(1, 24), st.floats(-1.6, 1.6), st.integers(0, 999))
def test_the_geometric_bound_holds_for_every_engine(length, u, seed):
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randn((1, length, 3), generator=g, dtype=torch.float64)
    tokens = tokens / tokens.norm(dim=-1, keepdim=True)
    w = torch.randn((1, 3), generator=g, dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    parameters = RecurrentParameters(w, u * one, one)
    value = recurrence.forward(parameters, tokens)
    in_w, in_u = indrnn.final_state_gradients(w[0], u, tokens)
    for engine in CLOSED:
        # g = 1 at targets f - 1/2, so the gradient of the loss is that of the last state.
        _, gradients = recurrence.loss_and_gradients(parameters, tokens, value - 0.5, engine=engine)
        torch.testing.assert_close(gradients.w, in_w, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(gradients.u, in_u, rtol=1e-11, atol=1e-12)
        assert gradients.w.norm() <= sum(abs(u) ** k for k in range(length)) * (1 + 1e-12)
        assert gradients.u.abs() <= sum(abs(u) ** k for k in range(length - 1)) * (1 + 1e-12)
