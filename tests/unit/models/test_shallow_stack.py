"""The stack against a loop over the printed formulas, automatic differentiation and one layer."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention_dynamics.models import get_activation, shallow, shallow_stack
from attention_dynamics.models.shallow_stack import OUTPUTS
from attention_dynamics.models.stack_parameters import STARTS, stack_initialisation


@dataclass
class Problem:
    """A random stack, off its start, with tokens and targets."""

    depth: int = 3
    samples: int = 3
    length: int = 4
    dimension: int = 3
    heads: int = 4
    activation: str = "tanh"
    outputs: str = "last"
    logits: float = 1.0
    start: str = "paired"
    moved: float = 0.3
    seed: int = 0

    def __post_init__(self):
        g = torch.Generator().manual_seed(self.seed)

        def normal(*shape):
            return torch.randn(shape, generator=g, dtype=torch.float64)

        start = stack_initialisation(
            self.depth, self.heads, self.dimension, generator=g, start=self.start,
            dtype=torch.float64,
        )  # fmt: skip
        phi = start.map(lambda block: block + self.moved * normal(*block.shape))
        scaled = tuple(layer._replace(W=self.logits * layer.W) for layer in phi.inner)
        readout = phi.readout._replace(W=self.logits * phi.readout.W)
        self.parameters = phi._replace(inner=scaled, readout=readout)
        self.tokens = normal(self.samples, self.length, self.dimension) / self.dimension**0.5
        shape = (self.samples,) if self.outputs == "last" else (self.samples, self.length)
        self.targets = normal(*shape)

    @property
    def options(self):
        return {"outputs": self.outputs, "activation": self.activation}


def problems(**fixed):
    drawn = {
        "depth": st.integers(1, 4),
        "samples": st.integers(1, 4),
        "length": st.integers(1, 6),
        "dimension": st.integers(1, 4),
        "heads": st.sampled_from([2, 4, 6]),
        "activation": st.sampled_from(["tanh", "erf", "erf_plain"]),
        "outputs": st.sampled_from(OUTPUTS),
        "start": st.sampled_from(STARTS),
        "seed": st.integers(0, 2**31 - 1),
    }
    drawn.update({name: st.just(value) for name, value in fixed.items()})
    return st.builds(Problem, **drawn)


def by_loops(problem):
    """f_t(X_j) for every token, from softmax, sums and nothing else."""
    sigma = get_activation(problem.activation).value
    rows = []
    for X in problem.tokens:
        for layer in problem.parameters.layers():
            coefficients, U, W = layer
            new = []
            for q in X:
                total = 0.0
                for i in range(len(U)):
                    alpha = torch.softmax(torch.stack([x @ W[i] @ q for x in X]), dim=0)
                    a = sum(w * x for w, x in zip(alpha, X, strict=True))
                    total = total + coefficients[i] * sigma(U[i] @ a)
                step = total / len(U) ** 0.5
                new.append(q + step if coefficients.ndim == 2 else step)
            X = torch.stack(new)
        rows.append(X)
    values = torch.stack(rows)
    return values[:, -1] if problem.outputs == "last" else values


def blocks(parameters):
    return [block for layer in parameters.layers() for block in layer]


def by_autograd(problem):
    leaves = problem.parameters.map(lambda block: block.clone().requires_grad_())
    values = shallow_stack.forward(leaves, problem.tokens, **problem.options)
    loss = (values - problem.targets).square().mean()
    return loss.detach(), torch.autograd.grad(loss, blocks(leaves))


def assert_near(found, expected, tolerance=1e-12, floor=0.0):
    """Norm-wise, relative to the norm of the whole gradient."""
    size = torch.stack([block.norm() for block in expected]).norm()
    for one, two in zip(found, expected, strict=True):
        assert one.shape == two.shape
        assert (one - two).norm() <= tolerance * size + floor


@given(problems())
def test_the_value_is_that_of_the_loops(problem):
    found = shallow_stack.forward(problem.parameters, problem.tokens, **problem.options)
    torch.testing.assert_close(found, by_loops(problem), rtol=1e-12, atol=1e-12)


@given(problems())
def test_gradients_agree_with_autograd(problem):
    loss, gradients = shallow_stack.loss_and_gradients(
        problem.parameters, problem.tokens, problem.targets, **problem.options
    )
    expected_loss, expected = by_autograd(problem)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-13, atol=0)
    assert_near(blocks(gradients), expected)


@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.parametrize("logits", [30.0, 1000.0])
def test_extreme_logits(outputs, logits):
    problem = Problem(outputs=outputs, logits=logits, length=5, seed=3)
    assert_near(
        blocks(shallow_stack.loss_and_gradients(
            problem.parameters, problem.tokens, problem.targets, **problem.options
        )[1]),
        by_autograd(problem)[1],
        tolerance=1e-11,
    )  # fmt: skip


def test_one_token_leaves_the_attention_matrices_alone():
    problem = Problem(length=1, outputs="each")
    _, gradients = shallow_stack.loss_and_gradients(
        problem.parameters, problem.tokens, problem.targets, outputs="each"
    )
    for layer in gradients.layers():
        assert layer[1].norm() > 1e-3
        assert layer[2].norm() < 1e-15


@given(problems(depth=1, outputs="last"))
def test_depth_one_is_the_shallow_transformer(problem):
    one = problem.parameters.readout
    options = {"query": "last", "activation": problem.activation, "engine": "reference"}
    torch.testing.assert_close(
        shallow_stack.forward(problem.parameters, problem.tokens, activation=problem.activation),
        shallow.forward(one, problem.tokens, **options),
        rtol=1e-13, atol=1e-14,
    )  # fmt: skip
    loss, found = shallow_stack.loss_and_gradients(
        problem.parameters, problem.tokens, problem.targets, activation=problem.activation
    )
    other, expected = shallow.loss_and_gradients(one, problem.tokens, problem.targets, **options)
    torch.testing.assert_close(loss, other, rtol=1e-13, atol=0)
    assert_near(found.readout, expected, 1e-13)


@given(problems(depth=1, outputs="each"))
def test_one_layer_with_every_output_asks_with_every_token(problem):
    values = shallow_stack.forward(problem.parameters, problem.tokens, **problem.options)
    for t in range(problem.length):
        query = problem.tokens[:, t]
        expected = shallow.forward(
            problem.parameters.readout, problem.tokens, query=query,
            activation=problem.activation, engine="reference",
        )  # fmt: skip
        torch.testing.assert_close(values[:, t], expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.parametrize("logits", [1.0, 50.0])
def test_the_paired_start_is_the_identity_and_zero(dtype, outputs, logits):
    g = torch.Generator().manual_seed(1)
    phi = stack_initialisation(4, 10, 5, generator=g, dtype=dtype)
    phi = phi.map(lambda block: logits * block if block.ndim == 3 else block)
    X = torch.randn(7, 6, 5, generator=g).to(dtype)
    assert (shallow_stack.forward(phi, X, outputs=outputs) == 0).all()
    for hidden in shallow_stack.hidden_tokens(phi, X):
        assert torch.equal(hidden, X)


@pytest.mark.parametrize("outputs", OUTPUTS)
def test_at_the_paired_start_the_inner_layers_have_no_gradient(outputs):
    still = Problem(outputs=outputs, moved=0.0, heads=6)
    _, gradients = shallow_stack.loss_and_gradients(
        still.parameters, still.tokens, still.targets, outputs=outputs
    )
    for layer in gradients.inner:
        for block in layer:
            assert block.norm() < 1e-15 * gradients.readout.U.norm()
    single = still.parameters._replace(inner=())
    _, one = shallow_stack.loss_and_gradients(single, still.tokens, still.targets, outputs=outputs)
    assert_near(gradients.readout, one.readout, 1e-14)
    moved = Problem(outputs=outputs, moved=0.0, heads=6, start="unpaired")
    _, gradients = shallow_stack.loss_and_gradients(
        moved.parameters, moved.tokens, moved.targets, outputs=outputs
    )
    assert min(gradients.layer_norms()) > 1e-2


def test_mixed_starts_read_zero_from_other_tokens():
    problem = Problem(start="mixed", moved=0.0)
    hidden = shallow_stack.hidden_tokens(problem.parameters, problem.tokens)
    assert len(hidden) == problem.depth
    assert (hidden[-1] - hidden[0]).norm() > 0.1
    assert (shallow_stack.forward(problem.parameters, problem.tokens) == 0).all()


@given(problems(), st.integers(1, 5))
def test_chunks_change_nothing(problem, chunk):
    arguments = problem.parameters, problem.tokens, problem.targets
    whole, expected = shallow_stack.loss_and_gradients(*arguments, **problem.options)
    loss, found = shallow_stack.loss_and_gradients(*arguments, chunk=chunk, **problem.options)
    torch.testing.assert_close(loss, whole, rtol=1e-13, atol=1e-15)
    assert_near(blocks(found), blocks(expected), 1e-13)


@given(problems())
def test_vjp_is_linear_and_gives_the_gradient_of_the_loss(problem):
    values = shallow_stack.forward(problem.parameters, problem.tokens, **problem.options)
    cotangent = 2 * (values - problem.targets) / values.numel()
    found = shallow_stack.vjp(problem.parameters, problem.tokens, cotangent, **problem.options)
    _, expected = shallow_stack.loss_and_gradients(
        problem.parameters, problem.tokens, problem.targets, **problem.options
    )
    assert_near(blocks(found), blocks(expected), 1e-12)


@given(problems(outputs="last"), st.sampled_from([None, 1, 2]))
def test_norms_of_the_gradients_of_samples(problem, chunk):
    options = {"activation": problem.activation}
    found = shallow_stack.sample_gradient_norms(
        problem.parameters, problem.tokens, chunk=chunk, **options
    )
    one = torch.ones(1, dtype=torch.float64)
    expected = torch.stack([
        shallow_stack.vjp(problem.parameters, x[None], one, **options).layer_norms()
        for x in problem.tokens
    ])  # fmt: skip
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


def test_permuting_the_other_tokens_changes_no_last_output():
    problem = Problem(length=6)
    order = torch.tensor([3, 0, 4, 1, 2, 5])
    torch.testing.assert_close(
        shallow_stack.forward(problem.parameters, problem.tokens[:, order]),
        shallow_stack.forward(problem.parameters, problem.tokens),
    )


def test_stacks_of_one_seed_share_their_layers():
    def drawn(depth, start="paired"):
        return stack_initialisation(
            depth, 4, 3, generator=torch.Generator().manual_seed(7), start=start
        )

    short, long, single = drawn(2), drawn(4), drawn(1)
    assert all(map(torch.equal, short.inner[0], long.inner[0]))
    assert all(map(torch.equal, short.readout, long.readout))
    assert all(map(torch.equal, single.readout, long.readout))
    assert all(map(torch.equal, single.readout, drawn(1, "mixed").readout))
    assert (drawn(3, "mixed").inner[0].C.norm(dim=1) - 1).abs().max() < 1e-6
    assert long.depth == 4
    assert not drawn(1, "unpaired").readout.is_symmetric()


def test_half_precision_is_computed_in_float32():
    problem = Problem()
    half = problem.parameters.map(torch.Tensor.half)
    found = shallow_stack.forward(half, problem.tokens.half())
    assert found.dtype == torch.float32
    expected = shallow_stack.forward(problem.parameters, problem.tokens)
    torch.testing.assert_close(found.double(), expected, atol=1e-2, rtol=1e-2)


def test_errors_name_the_argument():
    problem = Problem()
    phi, X, y = problem.parameters, problem.tokens, problem.targets
    with pytest.raises(ValueError, match="outputs: expected one of"):
        shallow_stack.forward(phi, X, outputs="first")
    with pytest.raises(ValueError, match="targets: expected shape"):
        shallow_stack.loss_and_gradients(phi, X, y, outputs="each")
    with pytest.raises(ValueError, match="tokens: expected finite"):
        shallow_stack.forward(phi, X * float("nan"))
    with pytest.raises(ValueError, match="chunk"):
        shallow_stack.forward(phi, X, chunk=0)
    with pytest.raises(TypeError, match="parameters: has dtype"):
        shallow_stack.forward(phi, X.float())
    short = phi.inner[1]._replace(U=phi.inner[1].U[:, :2])
    bad = phi._replace(inner=(phi.inner[0], short))
    with pytest.raises(ValueError, match=r"inner\[1\].U: expected shape"):
        shallow_stack.forward(bad, X)
    g = torch.Generator()
    with pytest.raises(ValueError, match="must be even"):
        stack_initialisation(2, 3, 2, generator=g)
    with pytest.raises(ValueError, match="depth"):
        stack_initialisation(0, 4, 2, generator=g)
    with pytest.raises(ValueError, match="start: expected one of"):
        stack_initialisation(2, 4, 2, generator=g, start="free")
