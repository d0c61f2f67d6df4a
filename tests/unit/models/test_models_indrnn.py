"""The recurrent contrast: value, closed back-propagation, and the exponential bounds."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention_dynamics.models import ERF, TANH, IndRNN, get_activation, indrnn


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def bound_w(u, length, s1):
    """s1 ((s1|u|)^T - 1) / (s1|u| - 1), for tokens of norm at most 1."""
    return s1 * sum((s1 * abs(u)) ** k for k in range(length))


def bound_u(u, length, s0, s1):
    """s0 s1 ((s1|u|)^{T-1} - 1) / (s1|u| - 1)."""
    return s0 * s1 * sum((s1 * abs(u)) ** k for k in range(length - 1))


def alternating_tokens(x, u, length):
    """x_t = sgn(u)^{T-t} x: every step of the recurrence then pushes the same way."""
    signs = torch.tensor([(-1.0 if u < 0 else 1.0) ** (length - 1 - t) for t in range(length)])
    return signs.to(x.dtype)[:, None] * x


def test_the_value_is_the_recurrence():
    model = IndRNN(4, 3, recurrent_init="normal", generator=seeded(), dtype=torch.float64)
    tokens = torch.randn((5, 6, 3), generator=seeded(1), dtype=torch.float64)
    w, u, c = model.w.detach(), model.u.detach(), model.c.detach()
    for j in range(5):
        h = torch.zeros(4, dtype=torch.float64)
        for t in range(6):
            h = torch.stack([torch.tanh(w[i] @ tokens[j, t] + u[i] * h[i]) for i in range(4)])
        expected = sum(c[i] * h[i] for i in range(4)) / 2
        torch.testing.assert_close(model(tokens)[j].detach(), expected, rtol=1e-12, atol=1e-12)


@given(
    st.integers(1, 7),
    st.integers(1, 4),
    st.floats(-2, 2),
    st.sampled_from(["tanh", "erf", "erf_plain"]),
    st.integers(0, 10_000),
)
def test_final_state_gradients_agree_with_autograd(length, dimension, u, activation, seed):
    g = seeded(seed)
    tokens = torch.randn((3, length, dimension), generator=g, dtype=torch.float64)
    w = torch.randn(dimension, generator=g, dtype=torch.float64)
    in_w, in_u = indrnn.final_state_gradients(w, u, tokens, activation)

    def final_state(w, u, sequence):
        one = torch.ones(1, dtype=torch.float64)
        return indrnn.forward(w[None], u[None], one, sequence[None], activation)[0]

    for j in range(3):
        expected = torch.func.grad(final_state, argnums=(0, 1))(
            w, torch.tensor(u, dtype=torch.float64), tokens[j]
        )
        torch.testing.assert_close((in_w[j], in_u[j]), expected, rtol=1e-11, atol=1e-11)


@given(st.integers(1, 24), st.floats(-1.6, 1.6), st.sampled_from([TANH, ERF]), st.integers(0, 999))
def test_gradients_obey_the_geometric_bounds(length, u, activation, seed):
    g = seeded(seed)
    tokens = torch.randn((16, length, 3), generator=g, dtype=torch.float64)
    tokens = tokens / tokens.norm(dim=-1, keepdim=True)
    w = torch.randn(3, generator=g, dtype=torch.float64)
    in_w, in_u = indrnn.final_state_gradients(w, u, tokens, activation)
    s0, s1, _ = activation.bounds
    assert in_w.norm(dim=-1).max() <= bound_w(u, length, s1) * (1 + 1e-12)
    assert in_u.abs().max() <= bound_u(u, length, s0, s1) * (1 + 1e-12)


@pytest.mark.parametrize("u", [1.5, -1.5, 1.0, -1.0, 0.5])
@pytest.mark.parametrize("activation", [TANH, ERF])
@pytest.mark.parametrize("length", [1, 4, 16])
def test_the_bound_in_w_is_attained_where_the_state_stays_zero(u, activation, length):
    # w orthogonal to x keeps z_t = 0, where the slope is s1 at every step.
    x = torch.tensor([1.0, 0.0], dtype=torch.float64)
    w = torch.tensor([0.0, 2.0], dtype=torch.float64)
    tokens = alternating_tokens(x, u, length)[None]
    in_w, _ = indrnn.final_state_gradients(w, u, tokens, activation)
    bound = bound_w(u, length, activation.bounds[1])
    assert in_w.norm().item() == pytest.approx(bound, rel=1e-12)


def test_a_small_drive_approaches_the_bound_in_w_and_saturation_ends_the_growth():
    # w no longer orthogonal: the ratio tends to 1 only as the drive w.x = size tends to 0.
    x = torch.tensor([1.0], dtype=torch.float64)
    ratios = []
    for size in (1.0, 1e-2, 1e-4, 1e-6):
        w = torch.tensor([size], dtype=torch.float64)
        in_w, _ = indrnn.final_state_gradients(w, 1.5, alternating_tokens(x, 1.5, 16)[None])
        ratios.append(in_w.norm().item() / bound_w(1.5, 16, 1.0))
    assert ratios[0] < 1e-2
    assert ratios == sorted(ratios)
    assert 1 - 1e-5 < ratios[-1] < 1


def test_the_bound_in_u_is_not_attained_there():
    x, w = torch.tensor([1.0, 0.0]).double(), torch.tensor([0.0, 2.0]).double()
    _, in_u = indrnn.final_state_gradients(w, 1.5, alternating_tokens(x, 1.5, 16)[None])
    assert in_u.item() == 0.0


def test_the_bounds_have_the_printed_sizes():
    printed = {4: 8.1, 16: 1.3e3, 64: 3.7e11, 97: 2.4e17}
    for length, value in printed.items():
        assert bound_w(1.5, length, 1.0) == pytest.approx(value, rel=0.05)
    assert bound_w(1.0, 16, 1.0) == 16
    assert bound_u(1.0, 16, 1.0, 1.0) == 15


def test_recurrent_initialisation_is_an_explicit_argument():
    with pytest.raises(TypeError, match="recurrent_init"):
        IndRNN(4, 3, generator=seeded())
    signs = IndRNN(64, 3, recurrent_init=1.5, generator=seeded()).u.detach()
    assert set(signs.tolist()) == {-1.5, 1.5}
    normal = IndRNN(4096, 1, recurrent_init="normal", generator=seeded()).u.detach()
    assert abs(normal.std().item() - 1) < 0.06
    assert torch.equal(
        IndRNN(4, 3, recurrent_init=0.0, generator=seeded()).u.detach(), torch.zeros(4)
    )


@pytest.mark.parametrize("bad", ["uniform", -1.0, float("nan"), float("inf"), None])
def test_other_recurrent_initialisations_are_refused(bad):
    with pytest.raises(ValueError, match=r"recurrent_init: expected 'normal' .* got"):
        IndRNN(4, 3, recurrent_init=bad, generator=seeded())


def test_the_choice_does_not_move_the_other_parameters():
    normal = IndRNN(4, 3, recurrent_init="normal", generator=seeded(2))
    signs = IndRNN(4, 3, recurrent_init=0.5, generator=seeded(2))
    assert torch.equal(normal.w, signs.w)
    assert torch.equal(normal.c, signs.c)


def test_it_trains_with_an_optimiser_and_says_what_it_is():
    model = IndRNN(16, 3, recurrent_init=0.5, generator=seeded(), activation=ERF)
    tokens = torch.randn((20, 5, 3), generator=seeded(1))
    targets = tokens[:, -1, 0]
    optimiser = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = []
    for _ in range(40):
        optimiser.zero_grad()
        loss = (model(tokens) - targets).square().mean()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
    assert "recurrent_init=0.5" in repr(model)
    assert model.activation == get_activation("erf")


def test_bad_input_is_named():
    w, u, c = torch.zeros(2, 3), torch.zeros(2), torch.zeros(2)
    tokens = torch.zeros(4, 5, 3)
    with pytest.raises(ValueError, match=r"u: .* m = 2, got \(3,\)"):
        indrnn.forward(w, torch.zeros(3), c, tokens)
    with pytest.raises(ValueError, match=r"tokens: .* d = 3, got \(4, 5, 2\)"):
        indrnn.forward(w, u, c, tokens[..., :2])
    with pytest.raises(ValueError, match=r"tokens: .* got nan"):
        indrnn.forward(w, u, c, tokens / 0)
    with pytest.raises(ValueError, match=r"w: expected shape \(d,\) with d = 3"):
        indrnn.final_state_gradients(w, 1.0, tokens)
    with pytest.raises(ValueError, match=r"u: expected shape \(\), got \(2,\)"):
        indrnn.final_state_gradients(w[0], u, tokens)
