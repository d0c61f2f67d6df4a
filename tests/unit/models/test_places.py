"""Tokens split into numbers and places: the split itself, and kernels that use it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_dynamics.data import autoregressive_task, generator
from attention_dynamics.models import ShallowTransformer, recurrence, symmetric_initialisation
from attention_dynamics.models._pass import Inputs
from attention_dynamics.models.activations import get_activation
from attention_dynamics.models.engines import native, placed, selection
from attention_dynamics.models.engines.reference import Reference
from attention_dynamics.models.parameters import Parameters, independent_initialisation
from attention_dynamics.models.places import MOST_KEPT, find_places
from attention_dynamics.models.recurrence import RecurrentParameters
from attention_dynamics.training import Objective
from attention_dynamics.training.descent import DescentConfig, projected_gradient_descent
from attention_dynamics.training.recurrent_descent import recurrent_descent

TANH = get_activation("tanh")


def split_tokens(n, T, d, own, seed=0, dtype=torch.float64, size=1.0):
    """Tokens that differ between samples in the coordinates ``own`` alone."""
    stream = generator(seed, "places")
    tokens = torch.randn(T, d, generator=stream, dtype=torch.float64).expand(n, -1, -1).clone()
    tokens[..., own] = size * torch.randn(n, T, len(own), generator=stream, dtype=torch.float64)
    return tokens.to(dtype)


def some_parameters(m, d, seed=0, dtype=torch.float64, amplitude=1.0):
    stream = generator(seed, "places", "heads")
    c, U, W = independent_initialisation(m, d, generator=stream, dtype=torch.float64)
    c = c * torch.rand(m, generator=stream, dtype=torch.float64)
    return Parameters(*(block.to(dtype) for block in (c, U, amplitude * W)))


def relative(left, right):
    """The largest difference of the blocks, each over its own largest number."""
    return max(
        float((a.double() - b.double()).abs().max() / b.double().abs().max())
        for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("own", [[0], [3], [1, 4]])
def test_numbers_and_places_make_up_the_tokens(own):
    tokens = split_tokens(7, 6, 5, own)
    found = find_places(tokens, tokens[:, -1])
    assert found.own.tolist() == own
    whole = found.places.expand(7, -1, -1).clone()
    whole[..., found.own] = found.values
    assert torch.equal(whole, tokens)
    query = found.query.expand(7, -1).clone()
    query[:, found.own] = found.zeta
    assert torch.equal(query, tokens[:, -1])
    assert found.order().tolist() == own + [i for i in range(5) if i not in own]


def test_a_query_for_all_samples_stays_whole():
    tokens, q = split_tokens(4, 3, 5, [2]), torch.arange(5.0, dtype=torch.float64)
    found = find_places(tokens, q)
    assert found.zeta is None
    assert torch.equal(found.query, q)
    assert find_places(tokens).query is None


def test_a_subset_of_the_samples_is_the_split_of_the_subset():
    tokens = split_tokens(9, 4, 6, [0, 3])
    found = find_places(tokens, tokens[:, -1])
    for index in (slice(2, 7), torch.tensor([8, 0, 0, 5])):
        part = found.rows(index)
        assert torch.equal(part.values, found.values[index])
        assert torch.equal(part.zeta, found.zeta[index])
        assert part.values.is_contiguous()


@pytest.mark.parametrize(
    "tokens",
    [
        split_tokens(7, 6, 5, [0, 1, 2]),  # too many numbers
        split_tokens(7, 6, 3, [0, 1]),  # too few shared coordinates
        split_tokens(1, 6, 5, [0]),  # one sample is all place
        split_tokens(2, 6, 5, [0])[:1].expand(4, -1, -1),  # and so are four equal ones
    ],
)
def test_no_split_where_it_does_not_pay(tokens):
    assert find_places(tokens) is None


def test_a_single_token_that_differs_is_found():
    tokens = split_tokens(200, 6, 5, [0])
    tokens[100, 3, 1:4] += 1.0
    assert find_places(tokens) is None
    tokens = split_tokens(200, 6, 5, [0])
    tokens[100, 3, 4] += 1.0
    assert find_places(tokens).own.tolist() == [0, 4]


def test_queries_that_differ_elsewhere_are_not_split():
    tokens = split_tokens(7, 6, 5, [1])
    queries = tokens[:, -1].clone()
    queries[3, 0] += 1.0
    assert find_places(tokens, queries) is None


@pytest.mark.compiler
@settings(max_examples=80, deadline=None)
@given(
    n=st.integers(2, 40), T=st.integers(1, 70), d=st.integers(3, 12), m=st.integers(1, 40),
    own=st.integers(1, 2), last=st.booleans(), seed=st.integers(0, 2**31 - 1),
    amplitude=st.sampled_from([1.0, 1e3]), scale=st.sampled_from([0.25, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]), threads=st.sampled_from([1, 3]),
)  # fmt: skip
def test_a_step_on_places_is_the_step(
    n, T, d, m, own, last, seed, amplitude, scale, dtype, threads
):
    stream = generator(seed, "which")
    own = sorted(torch.randperm(d, generator=stream)[: min(own, d - 2)].tolist())
    tokens = split_tokens(n, T, d, own, seed)
    query = tokens[:, -1] if last else torch.randn(d, generator=stream, dtype=torch.float64)
    phi = some_parameters(m, d, seed, amplitude=amplitude)
    y = torch.randn(n, generator=stream, dtype=torch.float64)
    f, expected = Reference().step(Inputs(tokens, query, None), phi, TANH, scale, y)
    found = find_places(tokens.to(dtype), query.to(dtype))
    phi, before = Parameters(*(block.to(dtype) for block in phi)), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        values, gradients = placed.step(found, phi, scale, y.to(dtype))
        assert torch.equal(placed.values(found, phi, scale), values)
    finally:
        torch.set_num_threads(before)
    largest = torch.einsum("ntd,mde,ne->nmt", tokens, phi.W.double(), query.expand(n, d))
    unit = 64 * torch.finfo(dtype).eps * max(1.0, scale * float(largest.abs().max()))
    # what the sums are made of: a saturated softmax has gradients far below their terms
    size = float(tokens.norm(dim=-1).max())
    residual = float((f - y).abs().mean()) * 2 * m**-0.5
    projection = float(phi.U.double().norm(dim=-1).max()) * size
    sizes = (m**0.5, residual, residual * size,
             residual * scale * projection * size * float(query.norm(dim=-1).max()))  # fmt: skip
    for got, exact, rounds in zip((values, *gradients), (f, *expected), sizes, strict=True):
        assert float((got.double() - exact).abs().max()) <= unit * max(rounds, 1e-3)


@pytest.mark.compiler
def test_an_objective_uses_the_split_and_agrees_with_the_reference():
    task = autoregressive_task(6, 60, seed=0, split="time", dtype=torch.float64)
    stream = generator(0, "places", "objective")
    start = symmetric_initialisation(6, 17, generator=stream, dtype=torch.float64)
    results = {}
    for engine in ("auto", "reference"):
        model = ShallowTransformer(start, query="last")
        objective = Objective.of(model, task.tokens, task.targets, engine=engine)
        assert (objective.places is not None) == (objective.engine.name == "fused")
        rows = objective.rows(torch.tensor([3, 5, 5]))
        results[engine] = (*rows.loss_and_gradients(start)[1], *projected_gradient_descent(
            model, task.tokens, task.targets, DescentConfig(steps=300, step_size=0.05),
            validation=(task.held_tokens, task.held_targets), engine=engine,
        ).final)  # fmt: skip
        assert float(objective.loss(start)) == pytest.approx(float(task.targets.square().mean()))
    assert relative(results["auto"], results["reference"]) < 1e-10


@pytest.mark.compiler
def test_twins_cancel_on_places():
    tokens = split_tokens(33, 9, 6, [2], dtype=torch.float32)
    phi = symmetric_initialisation(14, 6, generator=generator(0, "twins"))
    found = find_places(tokens, tokens[:, -1])
    f, gradients = placed.step(found, phi, 1.0, torch.ones(33))
    assert not f.any()
    for block in (gradients.U, gradients.W):
        assert torch.equal(block[:7], -block[7:])


@pytest.mark.compiler
def test_the_bits_do_not_depend_on_the_threads():
    tokens = split_tokens(4000, 12, 6, [2], dtype=torch.float32)
    phi, y = some_parameters(16, 6, dtype=torch.float32), torch.linspace(-1, 1, 4000)
    found, before = find_places(tokens, tokens[:, -1]), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(placed.step(found, phi, 1.0, y))
    finally:
        torch.set_num_threads(before)
    for f, gradients in results[1:]:
        assert torch.equal(f, results[0][0])
        assert all(map(torch.equal, gradients, results[0][1]))


@pytest.mark.compiler
def test_what_the_kernel_does_not_serve_takes_the_whole_tokens(monkeypatch):
    tokens, y = split_tokens(3, 8, 5, [1]), torch.ones(3, dtype=torch.float64)
    heads, mask = some_parameters(4, 5), torch.ones(3, 8, dtype=torch.bool)

    monkeypatch.delenv(selection.ENVIRONMENT, raising=False)  # "auto" is what is tested here

    def objective(mask=None, engine="auto", **kwargs):
        model = ShallowTransformer(heads, query="last", **kwargs)
        return Objective.of(model, tokens, y, mask, engine=engine)

    assert objective().places is not None
    assert objective(engine="eager").places is None
    assert objective(activation="erf").places is None
    assert objective(mask=mask).places is None
    assert relative(objective(mask=mask).loss_and_gradients(heads)[1],
                    objective().loss_and_gradients(heads)[1]) < 1e-12  # fmt: skip
    monkeypatch.setattr(placed, "unavailable", lambda dtype: "out of order")
    assert objective().places is None
    found = find_places(tokens)
    assert found.serve(MOST_KEPT // 8)
    assert not found.serve(MOST_KEPT // 8 + 1)


@pytest.mark.compiler
@pytest.mark.parametrize("name", ["W", "targets"])
def test_a_smaller_array_is_refused_and_not_read_past(name):
    tokens = split_tokens(3, 8, 5, [1])
    phi, y = some_parameters(4, 5), torch.ones(3, dtype=torch.float64)
    if name == "W":
        phi = phi._replace(W=phi.W[:2])
    else:
        y = y[:2]
    with pytest.raises(ValueError, match=f"{name}: expected shape"):
        placed.step(find_places(tokens, tokens[:, -1]), phi, 1.0, y)


def units(m, d, u, dtype=torch.float64):
    stream = generator(0, "places", "units")
    w, c = (torch.randn(*size, generator=stream, dtype=torch.float64) for size in ((m, d), (m,)))
    return RecurrentParameters(w, torch.full((m,), u, dtype=torch.float64), c).map(
        lambda block: block.to(dtype)
    )


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("n", "T", "d", "m", "own"),
    [(7, 1, 3, 1, [2]), (9, 13, 17, 40, [0]), (5, 70, 6, 8, [1, 4]), (4, 20_000, 3, 1, [0])],
)
def test_recurrent_gradients_on_places_are_the_gradients(n, T, d, m, own):
    tokens = split_tokens(n, T, d, own, size=0.3)
    y, phi = torch.linspace(-1, 1, n, dtype=torch.float64), units(m, d, 0.7)
    native.library("recurrence.cpp")
    found = find_places(tokens)
    assert found is not None
    assert found.serve(m)
    loss, gradients = recurrence.loss_and_gradients(phi, tokens, y, engine="fused", places=found)
    plain = "reference" if T < 1000 else "eager"
    expected_loss, expected = recurrence.loss_and_gradients(phi, tokens, y, engine=plain)
    assert abs(float(loss / expected_loss) - 1) < 1e-12
    assert relative(gradients, expected) < 1e-12
    f = recurrence.forward(phi, tokens, engine="fused", places=found)
    assert relative([f], [recurrence.forward(phi, tokens, engine="reference")]) < 1e-12


@pytest.mark.compiler
def test_a_recurrent_descent_finds_the_places(monkeypatch):
    task = autoregressive_task(6, 60, seed=0, split="time", dtype=torch.float64)
    seen = []
    true = recurrence.loss_and_gradients

    def spy(*args, places=None, **kwargs):
        seen.append(places)
        return true(*args, places=places, **kwargs)

    monkeypatch.setattr(recurrence, "loss_and_gradients", spy)
    phi, held = units(6, 17, 0.5), (task.held_tokens, task.held_targets)
    ends = [
        recurrent_descent(phi, task.tokens, task.targets, steps=200, step_size=0.02,
                          validation=held, engine=engine).final
        for engine in ("auto", "eager")
    ]  # fmt: skip
    assert all(places is not None for places in seen)
    assert relative(*ends) < 1e-10


@pytest.mark.parametrize("side", ["tokens", "validation"])
def test_tokens_of_another_shape_are_refused_by_name(side):
    tokens, y = split_tokens(4, 3, 5, [0]), torch.ones(4, dtype=torch.float64)
    whole, flat = (tokens, y), (tokens[:, 0], y)
    (data, targets), held = (flat, whole) if side == "tokens" else (whole, flat)
    with pytest.raises(ValueError, match="tokens: expected shape"):
        recurrent_descent(units(6, 5, 0.5), data, targets, steps=1, step_size=0.1, validation=held)
