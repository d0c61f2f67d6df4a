"""Engines under the modes of torch that a caller may be in, and at the border to C++."""

import sys

import pytest
import torch

from attention_dynamics.models import independent_initialisation, recurrence, shallow
from attention_dynamics.models._pass import Inputs
from attention_dynamics.models.activations import get_activation
from attention_dynamics.models.engines import native, selection, triton_launch
from attention_dynamics.models.engines import recurrence as recurrent_engines
from attention_dynamics.models.engines.workspace import WORKSPACE
from attention_dynamics.models.recurrence import RecurrentParameters

CPU = [name for name in ("eager", "fused") if not selection.available()[name]]
HEADS = [8, 40]  # eager has a layout for few heads
DOUBLE = torch.float64


def problem(heads=8, samples=100, dtype=DOUBLE):
    g = torch.Generator().manual_seed(0)
    phi = independent_initialisation(heads, 4, generator=g, dtype=dtype)
    tokens = torch.randn(samples, 6, 4, generator=g, dtype=dtype)
    return phi, tokens, torch.randn(samples, generator=g, dtype=dtype), {"query": tokens[0, 0]}


def recurrent(dtype=DOUBLE):
    g = torch.Generator().manual_seed(1)
    blocks = (torch.randn(*shape, generator=g, dtype=dtype) for shape in ((8, 4), (8,), (8,)))
    return RecurrentParameters(*blocks)


def flat(loss, gradients):
    return torch.cat([loss.reshape(1), *(block.flatten() for block in gradients)])


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("engine", CPU)
def test_a_call_in_inference_mode_does_not_spoil_later_ones(engine, heads):
    phi, tokens, y, options = problem(heads, 10 if heads == 40 else 100)
    expected = flat(*shallow.loss_and_gradients(phi, tokens, y, **options, engine="reference"))
    WORKSPACE._kept.clear()
    with torch.inference_mode():
        inside = shallow.loss_and_gradients(phi, tokens, y, **options, engine=engine)
    outside = shallow.loss_and_gradients(phi, tokens, y, **options, engine=engine)
    for found in (inside, outside):
        torch.testing.assert_close(flat(*found).clone(), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("engine", CPU)
def test_numbers_with_a_lazy_sign_are_read_with_it(engine):
    phi, tokens, y, options = problem()
    expected = shallow.loss_and_gradients(phi, -tokens, y, **options, engine="reference")
    lazy = torch._neg_view(tokens)
    found = shallow.loss_and_gradients(phi, lazy, y, **options, engine=engine)
    torch.testing.assert_close(flat(*found), flat(*expected), rtol=1e-11, atol=1e-11)
    expected = recurrence.loss_and_gradients(recurrent(), -tokens, y, engine="reference")
    found = recurrence.loss_and_gradients(recurrent(), lazy, y, engine=engine)
    torch.testing.assert_close(flat(*found), flat(*expected), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("activation", ["tanh", "erf"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("engine", CPU)
def test_engines_compute_in_the_dtype_of_the_tokens_under_autocast(engine, heads, activation):
    phi, tokens, y, options = problem(heads, dtype=torch.float32)
    options |= {"engine": engine, "activation": activation}
    expected = shallow.loss_and_gradients(phi, tokens, y, **options)
    start = recurrence.loss_and_gradients(recurrent(torch.float32), tokens, y, engine=engine)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = shallow.loss_and_gradients(phi, tokens, y, **options)
        again = recurrence.loss_and_gradients(recurrent(torch.float32), tokens, y, engine=engine)
    assert torch.equal(flat(*found), flat(*expected))
    assert torch.equal(flat(*again), flat(*start))


@pytest.mark.parametrize("engine", CPU)
def test_memory_is_made_where_the_tokens_are_whatever_the_default_device(engine):
    phi, tokens, y, options = problem()
    expected = shallow.loss_and_gradients(phi, tokens, y, **options, engine=engine)
    with torch.device("meta"):
        found = shallow.loss_and_gradients(phi, tokens, y, **options, engine=engine)
    assert torch.equal(flat(*found), flat(*expected))


@pytest.mark.parametrize("query", ["fixed", "one a sample"])
@pytest.mark.parametrize("heads", HEADS)
def test_eager_looks_at_no_number_off_the_cpu(heads, query):
    """On the meta device there is none to look at; an accelerator would be waited for."""
    phi, tokens, y, _ = problem(heads)
    phi, tokens, y = phi.to(device="meta"), tokens.to("meta"), y.to("meta")
    q = tokens[0, 0] if query == "fixed" else tokens[:, 0]
    mask = torch.ones(tokens.shape[:2], dtype=torch.bool, device="meta")
    eager = selection.get("eager")
    for inputs in (Inputs(tokens, q, None), Inputs(tokens, q, mask)):
        assert eager.features(inputs, phi.U, phi.W, 1.0).a.shape == (100, heads, 4)
        assert eager.scores(inputs, phi.U, phi.W, 1.0).shape == (100, heads)
        s, slope = eager.slopes(inputs, phi.U, phi.W, phi.U, phi.W, 1.0)
        assert s.shape == slope.shape
        f, gradients = eager.step(inputs, phi, get_activation("tanh"), 1.0, y)
        assert f.shape == y.shape
        assert gradients.W.shape == phi.W.shape


@pytest.mark.parametrize(
    ("field", "spoil"),
    [
        ("targets", lambda t: t[:-1]),
        ("targets", lambda t: t.half()),
        ("U", lambda t: t[:, :-1]),
        ("W", lambda t: t[:-1]),
        ("W", lambda t: t.to("meta")),
        ("query", lambda t: t[:-1]),
        ("query", lambda t: t.float()),
        ("mask", lambda t: t[:1]),
        ("mask", lambda t: t.to(torch.uint8)),
    ],
)
def test_the_kernel_is_not_called_on_memory_that_does_not_fit(field, spoil):
    phi, tokens, y, options = problem()
    data = {
        "tokens": tokens, "query": options["query"], "targets": y, "c": phi.c, "U": phi.U,
        "W": phi.W, "mask": torch.ones(tokens.shape[:2], dtype=torch.bool),
    }  # fmt: skip
    data[field] = spoil(data[field])
    inputs = Inputs(data["tokens"], data["query"], data["mask"])
    name = "given" if field == "targets" else field
    with pytest.raises(ValueError, match=rf"{name}: expected shape .* on cpu"):
        selection.get("fused").step(
            inputs, phi._replace(c=data["c"], U=data["U"], W=data["W"]), get_activation("tanh"),
            1.0, data["targets"],
        )  # fmt: skip


def test_the_recurrence_is_not_run_on_memory_that_does_not_fit():
    phi, (_, tokens, y, _), tanh = recurrent(), problem(), get_activation("tanh")
    for name, x, targets in (
        ("tokens", tokens[..., :-1], y),
        ("targets", tokens, y[:-1]),
        ("targets", tokens, y.float()),
    ):
        with pytest.raises(ValueError, match=f"{name}: expected shape"):
            recurrent_engines.fused(phi, x, targets, tanh)


def test_half_precision_of_the_recurrence_fits_single_precision_tokens():
    phi, (_, tokens, y, _) = recurrent(torch.bfloat16), problem(dtype=torch.float32)
    single = phi.map(torch.Tensor.float)
    for engine in ("reference", "eager", "auto"):
        found = recurrence.loss_and_gradients(phi, tokens, y, engine=engine)
        expected = recurrence.loss_and_gradients(single, tokens, y, engine=engine)
        assert torch.equal(flat(*found), flat(*expected))


def test_what_is_missing_is_looked_for_once(monkeypatch):
    looked_for = []
    monkeypatch.setattr(native.shutil, "which", lambda name, **_: looked_for.append(name))
    monkeypatch.setenv("CXX", "a compiler that is nowhere")
    assert native.compiler() is None
    assert native.compiler() is None
    assert looked_for == ["a compiler that is nowhere"]
    monkeypatch.setenv("CXX", "another one")  # the environment may change: then it is
    assert native.compiler() is None
    assert looked_for == ["a compiler that is nowhere", "another one"]
    native._search.cache_clear()


def test_a_missing_triton_is_looked_for_once(monkeypatch):
    imported = []

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "triton":
                imported.append(name)
                raise ImportError("there is none")

    triton_launch._missing.cache_clear()
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    reasons = {triton_launch.refusal(torch.zeros(1, 2, 2)) for _ in range(3)}
    triton_launch._missing.cache_clear()
    assert reasons == {"Triton can't be imported: there is none"}
    assert imported == ["triton"]
