"""Which engine serves a call, and what is said when one can't."""

import logging
import subprocess
import sys

import pytest
import torch
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from attention_dynamics.models import ShallowTransformer, attention, shallow
from attention_dynamics.models._pass import Inputs
from attention_dynamics.models.engines import selection
from attention_dynamics.training.objective import Objective

TOKENS = torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(0))
QUERY = torch.ones(3)
INPUTS = Inputs(TOKENS, QUERY, None)


@pytest.fixture(autouse=True)
def _nothing_reported(monkeypatch):
    monkeypatch.delenv(selection.ENVIRONMENT, raising=False)
    selection.report.cache_clear()


@pytest.fixture
def no_fused(monkeypatch):
    refuse = lambda self, inputs, heads: "it was taken away"  # noqa: E731
    monkeypatch.setattr(type(selection.get("fused")), "refusal", refuse)


def test_auto_is_fused_or_else_eager(no_fused, caplog):
    with caplog.at_level(logging.INFO, "attention_dynamics"):
        assert selection.choose("auto", INPUTS, 2).name == "eager"
        assert selection.choose("auto", INPUTS, 2).name == "eager"
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "fused" in caplog.text
    assert "it was taken away" in caplog.text


def test_auto_is_fused_where_it_can_be_built():
    expected = "eager" if selection.available()["fused"] else "fused"
    assert selection.choose("auto", INPUTS, 2).name == expected


def test_an_engine_named_by_the_caller_that_refuses_is_a_warning(no_fused, caplog):
    assert selection.choose("fused", INPUTS, 2).name == "eager"
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"engine: expected one of 'auto', 'reference', 'eager'.*"):
        shallow.forward(_parameters(), TOKENS, query=QUERY, engine="fast")


def test_the_environment_replaces_auto_and_nothing_else(monkeypatch):
    monkeypatch.setenv(selection.ENVIRONMENT, "reference")
    assert selection.choose("auto", INPUTS, 2).name == "reference"
    assert selection.choose("eager", INPUTS, 2).name == "eager"
    monkeypatch.setenv(selection.ENVIRONMENT, "fastest")
    with pytest.raises(ValueError, match="got 'fastest'"):
        selection.choose("auto", INPUTS, 2)


@pytest.mark.parametrize("engine", ["auto", "eager", "fused"])
def test_what_is_differentiated_or_traced_goes_to_the_reference(engine):
    seen = []

    def look(x):
        seen.append(selection.choose(engine, INPUTS, 2, x).name)
        return (x * x).sum()

    free = torch.ones(2, requires_grad=True)
    look(free)
    grad(look)(torch.ones(2))
    vmap(look)(torch.ones(3, 2))
    torch.func.jvp(look, (torch.ones(2),), (torch.ones(2),))
    make_fx(look)(torch.ones(2))
    look(torch.ones(2, device="meta"))
    with torch.autograd.forward_ad.dual_level():
        look(torch.autograd.forward_ad.make_dual(torch.ones(2), torch.ones(2)))
    assert set(seen) == {"reference"}
    with torch.no_grad():
        assert selection.choose("eager", INPUTS, 2, free).name == "eager"


def test_every_public_function_takes_an_engine():
    phi, targets = _parameters(), torch.ones(5)
    for engine in ("reference", "eager"):
        common = {"query": QUERY, "engine": engine}
        shallow.forward(phi, TOKENS, **common)
        shallow.loss(phi, TOKENS, targets, **common)
        shallow.jvp(phi, TOKENS, phi, **common)
        shallow.vjp(phi, TOKENS, targets, **common)
        shallow.loss_and_gradients(phi, TOKENS, targets, **common)
        shallow.per_sample_gradients(phi, TOKENS, **common)
        attention.head_features(TOKENS, phi.W, phi.U, QUERY, engine=engine)
        model = ShallowTransformer(phi, query=QUERY)
        model.loss_and_gradients(TOKENS, targets, engine=engine)
        objective = Objective.of(model, TOKENS, targets, engine=engine)
        objective.rows(torch.tensor([0, 2])).loss_and_gradients(phi)


def test_the_line_for_the_reader_names_the_engine_and_the_reason(no_fused, monkeypatch):
    assert "engine eager" in selection.describe()
    assert "it was taken away" in selection.describe()
    monkeypatch.setenv(selection.ENVIRONMENT, "reference")
    assert selection.describe().startswith("engine reference")
    assert selection.ENVIRONMENT in selection.describe()
    assert set(selection.available()) == set(selection.NAMES)
    assert selection.available()["eager"] == ""


NO_COMPILER = """
import logging
logging.basicConfig(level=logging.INFO, format="LOG %(levelname)s %(message)s")
import torch
from attention_dynamics.models import independent_initialisation, shallow
from attention_dynamics.models.engines import selection

phi = independent_initialisation(4, 3, generator=torch.Generator().manual_seed(0))
tokens = torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(0))
for _ in range(3):
    loss, gradients = shallow.loss_and_gradients(phi, tokens, torch.ones(5), query="last")
    shallow.forward(phi, tokens, query="last")
same, expected = shallow.loss_and_gradients(
    phi, tokens, torch.ones(5), query="last", engine="eager"
)
assert torch.equal(loss, same)
assert all(torch.equal(left, right) for left, right in zip(gradients, expected))
assert selection.available()["compiled"]
print(selection.describe())
"""


def test_without_a_compiler_eager_serves_with_one_line_of_log(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent")
    monkeypatch.setenv("ATTENTION_DYNAMICS_CACHE", str(tmp_path))
    run = subprocess.run(
        [sys.executable, "-c", NO_COMPILER], capture_output=True, text=True, timeout=240
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("LOG") == 1, run.stderr
    assert "C++ compiler" in run.stderr
    assert run.stdout.startswith("engine eager on cpu")


def _parameters():
    from attention_dynamics.models import independent_initialisation

    return independent_initialisation(4, 3, generator=torch.Generator().manual_seed(0))
