"""Activations against autograd, and their stated suprema against a fine grid."""

import math

import pytest
import torch

from attention_dynamics.models import ERF, ERF_PLAIN, TANH, Activation, get_activation

ALL = [TANH, ERF, ERF_PLAIN]
BY_NAME = pytest.mark.parametrize("activation", ALL, ids=lambda a: a.name)


@BY_NAME
def test_derivatives_agree_with_autograd(activation):
    x = torch.linspace(-6, 6, 241, dtype=torch.float64, requires_grad=True)
    value = activation.value(x)
    (first,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(activation.first(x), first, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(activation.second(x), second, rtol=1e-12, atol=1e-14)
    pair = activation.value_and_first(x)
    torch.testing.assert_close(pair, (value, first), rtol=1e-12, atol=1e-14)


@BY_NAME
def test_the_bounds_are_the_suprema(activation):
    x = torch.linspace(-40, 40, 800_001, dtype=torch.float64)
    for function, bound in zip(
        (activation.value, activation.first, activation.second), activation.bounds, strict=True
    ):
        observed = function(x).abs().max().item()
        assert observed <= bound + 1e-15
        assert observed >= bound * (1 - 1e-8)


def test_the_two_error_functions_differ_by_the_root_of_two():
    x = torch.linspace(-3, 3, 25, dtype=torch.float64)
    torch.testing.assert_close(ERF.value(math.sqrt(2) * x), ERF_PLAIN.value(x))
    assert ERF.first(torch.zeros(())).item() == pytest.approx(math.sqrt(2 / math.pi))
    assert ERF_PLAIN.bounds[2] == pytest.approx(0.968, abs=5e-4)


@BY_NAME
def test_values_stay_finite_far_out(activation):
    x = torch.tensor([-1e30, -1e4, 0.0, 1e4, 1e30])
    for function in (activation.value, activation.first, activation.second):
        assert torch.isfinite(function(x)).all()


def test_lookup_by_name_and_by_value():
    assert [get_activation(a.name) for a in ALL] == ALL
    assert get_activation(ERF) is ERF


def test_an_unknown_name_lists_the_known_ones_and_the_way_out():
    with pytest.raises(
        ValueError, match=r"activation: .*'tanh', 'erf', 'erf_plain', got 'gelu'.*Activation\("
    ):
        get_activation("gelu")


@pytest.mark.parametrize("bounds", [(1.0, 1.0), (1.0, -1.0, 1.0), (math.inf, 1.0, 1.0)])
def test_bounds_must_be_three_finite_numbers(bounds):
    with pytest.raises(ValueError, match="bounds: expected three finite numbers"):
        Activation("bad", torch.tanh, torch.tanh, torch.tanh, bounds)
