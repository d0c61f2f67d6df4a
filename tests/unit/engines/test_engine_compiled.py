"""The compiled engine: the same results, and a compilation a shape that no limit ends."""

import pytest
import torch
from torch._dynamo.utils import counters

from attention_dynamics.models import Parameters, independent_initialisation
from attention_dynamics.models._pass import Inputs, prepare
from attention_dynamics.models.activations import TANH
from attention_dynamics.models.engines import selection
from attention_dynamics.models.engines.compiled import Compiled
from attention_dynamics.models.engines.reference import Reference

PROBE = Inputs(torch.zeros(2, 2, 2), torch.zeros(2), None)


def _problem(heads, query):
    g = torch.Generator().manual_seed(heads)
    tokens = torch.randn(5, 4, 3, generator=g, dtype=torch.float64)
    mask = torch.tensor([[True, True, True, False], [True] * 4]).repeat(3, 1)[:5]
    q = query if query == "last" else torch.randn(3, generator=g, dtype=torch.float64)
    inputs = prepare(tokens, q, mask if query == "last" else None, dimension=3)
    phi = independent_initialisation(heads, 3, generator=g, dtype=torch.float64)
    return inputs, phi, torch.randn(5, generator=g, dtype=torch.float64)


@pytest.fixture
def compiled():
    engine = Compiled()
    if (reason := engine.refusal(PROBE, 2)) is not None:  # then auto and the caller get eager
        assert selection.choose("compiled", PROBE, 2).name == "eager", reason
        return selection.get("eager")
    return engine


@pytest.mark.parametrize("query", ["fixed", "last"])
def test_compiled_agrees_with_the_reference(query, compiled):
    inputs, phi, y = _problem(6, query)
    tangent = Parameters(phi.c, phi.U.flip(0), phi.W.flip(0))
    for engine_results in zip(
        _results(compiled, inputs, phi, tangent, y),
        _results(Reference(), inputs, phi, tangent, y),
        strict=True,
    ):
        torch.testing.assert_close(*engine_results, rtol=1e-12, atol=1e-14)


def _results(engine, inputs, phi, tangent, y):
    f, gradient = engine.step(inputs, phi, TANH, 0.7, y)
    return (
        *engine.features(inputs, phi.U, phi.W, 0.7),
        engine.scores(inputs, phi.U, phi.W, 0.7),
        *engine.slopes(inputs, phi.U, phi.W, tangent.U, tangent.W, 0.7),
        f,
        *gradient,
        *engine.vjp(inputs, phi, TANH, 0.7, y),
    )


def test_a_sweep_of_widths_is_compiled_whatever_the_limit(compiled):
    # torch's own way to set them: undone by monkeypatch, they would be gone for good
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        widths = (3, 5, 7)
        before = counters["stats"]["unique_graphs"]
        for heads in widths:
            inputs, phi, _ = _problem(heads, "fixed")
            for _ in range(2):
                scores = compiled.scores(inputs, phi.U, phi.W, 1.0)
            expected = Reference().scores(inputs, phi.U, phi.W, 1.0)
            torch.testing.assert_close(scores, expected, rtol=1e-12, atol=1e-14)
        if isinstance(compiled, Compiled):
            assert counters["stats"]["unique_graphs"] - before == len(widths)
