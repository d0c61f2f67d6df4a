"""Every engine against the reference: features, scores, slopes, step and vjp on random problems."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_dynamics.models import Parameters, independent_initialisation
from attention_dynamics.models import symmetric_initialisation as symmetric
from attention_dynamics.models._pass import Inputs, prepare
from attention_dynamics.models.activations import get_activation
from attention_dynamics.models.engines import few_heads, pooling, selection
from attention_dynamics.models.engines.reference import Reference

PROBE = Inputs(torch.zeros(2, 2, 2), torch.zeros(2), None)
REFERENCE = Reference()
PRESENT = [
    name for name in ("eager", "fused", "triton") if not selection.get(name).refusal(PROBE, 2)
]

# Units in the last place of the largest sum that enters an entry.
UNIT = {dtype: 8 * torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64)}


class Problem:
    """One random problem and the sizes that rounding errors of each result are measured by."""

    def __init__(self, n, T, d, m, *, query="fixed", mask=False, scale=1.0, amplitude=1.0,
                 offset=0.0, seed=0, dtype=torch.float64, activation="tanh"):  # fmt: skip
        g = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)

        start = independent_initialisation(m, d, generator=g, dtype=dtype)
        self.parameters = Parameters(start.c * (1 + 0.3 * normal(m)), start.U, start.W * amplitude)
        self.V, self.Z = normal(m, d), normal(m, d, d)
        tokens = normal(n, T, d) / d**0.5 + offset
        kept = None
        if mask:
            kept = torch.rand((n, T), generator=g) < 0.6
            kept[torch.arange(n), torch.randint(T, (n,), generator=g)] = True
        q = "last" if query == "last" else normal(d)
        self.inputs = prepare(tokens, q, kept, dimension=d)
        self.targets, self.scale = normal(n), scale
        self.sigma, self.dtype = get_activation(activation), dtype
        self._sizes()

    def _sizes(self):
        """Largest sums of absolute values that an entry of each result is: what it rounds like."""
        x, q, V, Z = (t.abs().double() for t in (*self.inputs[:2], self.V, self.Z))
        c, U, W = (block.abs().double() for block in self.parameters)
        q = q.expand(len(x), -1)

        def largest(equation, *factors):
            return float(torch.einsum(equation, *factors).amax())

        length, heads = x.amax(dim=(1, 2)), c.shape[0]
        projections = torch.einsum("ntd,md->nmt", x, U).amax(dim=2)
        self.logit = self.scale * largest("ntd,mde,ne->nmt", x, W, q)
        r = projections * length[:, None]
        self.size = {
            "s": float(projections.amax()), "a": float(length.amax()), "r": float(r.amax()),
            "slope": largest("ntd,md->nmt", x, V)
            + self.scale * largest("nm,mde,ne->nm", r, Z, q),
            "f": self.sigma.bounds[0] * float(c.sum()) * heads**-0.5,
        }  # fmt: skip
        slope = self.sigma.bounds[1] * c * heads**-0.5
        terms = {
            "c": torch.full_like(projections, self.sigma.bounds[0] * heads**-0.5),
            "U": slope * length[:, None],
            "W": self.scale * slope * r * q.amax(dim=1)[:, None],
        }
        y = self.targets.abs().double()
        for name, term in terms.items():
            self.size[f"step {name}"] = 2 * largest("n,nm->m", self.size["f"] + y, term) / len(x)
            self.size[f"vjp {name}"] = largest("n,nm->m", y, term)

    def results(self, engine, chunk=None):
        """Name and value of everything that an engine computes."""
        i, p, k = self.inputs, self.parameters, self.scale
        s, a, r = engine.features(i, p.U, p.W, k, chunk=chunk)
        twice, slope = engine.slopes(i, p.U, p.W, self.V, self.Z, k, chunk=chunk)
        f, step = engine.step(i, p, self.sigma, k, self.targets, chunk=chunk)
        pulled = engine.vjp(i, p, self.sigma, k, self.targets, chunk=chunk)
        scores = engine.scores(i, p.U, p.W, k, chunk=chunk)
        values = engine.values(i, p, self.sigma, k, chunk=chunk)
        gradients = [(f"step {name}", block) for name, block in zip("cUW", step, strict=True)]
        gradients += [(f"vjp {name}", block) for name, block in zip("cUW", pulled, strict=True)]
        linear = [("s", s), ("a", a), ("r", r), ("s", scores), ("s", twice), ("slope", slope)]
        return [*linear, ("f", f), ("f", values), *gradients]

    def assert_agrees(self, engine, chunk=None):
        # An error in a logit is one in the weights, hence the factor; the errors of the reference
        # itself, as large, are covered by it too.
        unit = UNIT[self.dtype] * max(1.0, self.logit)
        expected = self.results(REFERENCE)
        for (name, right), (_, left) in zip(expected, self.results(engine, chunk), strict=True):
            assert left.shape == right.shape, name
            assert left.dtype == right.dtype, name
            error = float((left.double() - right.double()).abs().amax()) / self.size[name]
            assert error <= unit, f"{name}: {error / unit:.2f} of what is allowed"


problems = st.builds(
    Problem,
    n=st.integers(1, 7), T=st.integers(1, 40), d=st.integers(1, 18), m=st.integers(1, 20),
    query=st.sampled_from(["fixed", "last"]), mask=st.booleans(),
    scale=st.sampled_from([0.25, 1.0]), amplitude=st.sampled_from([1.0, 1e3, 1e5]),
    offset=st.sampled_from([0.0, 0.0, 100.0]), seed=st.integers(0, 2**31 - 1),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    activation=st.sampled_from(["tanh", "erf"]),
)  # fmt: skip


@pytest.mark.parametrize("name", PRESENT)
def test_an_engine_agrees_with_the_reference(name):
    examples = 8 if name == "triton" else 60  # the GPU kernel is interpreted on a CPU

    @settings(max_examples=examples)
    @given(problems)
    def agrees(problem):
        problem.assert_agrees(selection.get(name))

    agrees()


@pytest.mark.parametrize("tokens_at_once", [1, 3, 16])
def test_eager_agrees_in_blocks_of_few_tokens(tokens_at_once, monkeypatch):
    monkeypatch.setattr(pooling, "BLOCK", 1)
    monkeypatch.setattr(pooling, "_LEAST_TOKENS", tokens_at_once)

    @settings(max_examples=40)
    @given(problems)
    def agrees(problem):
        problem.assert_agrees(selection.get("eager"))

    agrees()


@settings(max_examples=60)
@given(problems)
def test_eager_agrees_with_samples_innermost(problem):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(few_heads, "LEAST_SAMPLES", 1)
        patch.setattr(few_heads, "MOST_HEADS", 20)
        problem.assert_agrees(selection.get("eager"))
        problem.assert_agrees(selection.get("eager"), chunk=2)


@pytest.mark.parametrize("query", ["fixed", "last"])
@pytest.mark.parametrize("offset", [1e3, 1e6])
def test_a_common_offset_costs_eager_no_accuracy(offset, query):
    # The spread r does not depend on a common offset of tokens on a binary grid: no rounding then.
    plain = Problem(5, 12, 3, 4, query=query)
    tokens = (plain.inputs.tokens * 2**20).round() / 2**20
    W = plain.parameters.W / offset if query == "last" else plain.parameters.W
    q = plain.inputs.query
    eager = selection.get("eager")
    moved = eager.features(Inputs(tokens + offset, q, None), plain.parameters.U, W, 1.0)
    still = eager.features(Inputs(tokens, q, None), plain.parameters.U, W, 1.0)
    torch.testing.assert_close(moved.r, still.r, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(moved.a - offset, still.a, rtol=0, atol=4e-16 * offset)


@pytest.mark.parametrize("heads", [8, 20])
@pytest.mark.parametrize("query", ["fixed", "last"])
def test_eager_leaves_its_arguments_alone(heads, query):
    problem = Problem(70, 1, 1, heads, query=query)
    inputs, parameters = problem.inputs, problem.parameters
    before = [t.clone() for t in (inputs.tokens, inputs.query, *parameters, problem.targets)]
    problem.results(selection.get("eager"))
    after = (inputs.tokens, inputs.query, *parameters, problem.targets)
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("name", PRESENT)
@pytest.mark.parametrize("query", ["fixed", "last"])
def test_300_projected_steps_agree(name, query):
    from attention_dynamics.training.projection import ProjectionSet, Radii

    samples, steps = (50, 300) if name != "triton" else (7, 20)
    problem = Problem(samples, 6, 4, 8, query=query)
    start = symmetric(8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    region = ProjectionSet(start, Radii(1.0, 1.0, 1.0))

    def trained(engine):
        phi = start
        for _ in range(steps):
            _, gradient = engine.step(problem.inputs, phi, problem.sigma, 1.0, problem.targets)
            phi = region.project(phi.minus(gradient.scaled(0.5)))
        return phi

    for left, right in zip(trained(selection.get(name)), trained(REFERENCE), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", [*PRESENT, "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_symmetric_initialisation_is_exactly_zero(name, dtype):
    problem = Problem(70, 5, 3, 10, dtype=dtype)
    start = symmetric(10, 3, generator=torch.Generator().manual_seed(1), dtype=dtype)
    f, _ = selection.get(name).step(problem.inputs, start, problem.sigma, 1.0, problem.targets)
    assert torch.equal(f, torch.zeros_like(f))


MEMORY = """
import resource, sys
import torch
from attention_dynamics.models import independent_initialisation, shallow

torch.set_num_threads(1)
length, warm = int(sys.argv[1]), 2**10
phi = independent_initialisation(16, 8, generator=torch.Generator().manual_seed(0))
query = torch.ones(8)
tokens = torch.randn(4, length, 8, generator=torch.Generator().manual_seed(1))
for part in (tokens[:, :warm].clone(), tokens):
    shallow.loss_and_gradients(phi, part, torch.ones(4), query=query, engine="eager")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - tokens.nbytes)
"""


def test_the_memory_of_a_step_with_a_fixed_query_is_flat_in_the_length():
    short, long = (
        int(subprocess.run([sys.executable, "-c", MEMORY, str(2**power)], check=True,
                           capture_output=True, text=True, timeout=240).stdout)
        for power in (10, 16)
    )  # fmt: skip
    # One array over all tokens and heads would be 16.8 MB; process sizes differ by a few.
    assert long - short < 8e6
