"""Integrals inside identities, and starts of every shape in an attack."""

import pytest
import sympy as sp
import torch

from attention_dynamics.verification import check
from attention_dynamics.verification.attack import projected_ascent
from attention_dynamics.verification.record import CheckFailed

x, s = sp.symbols("x s", positive=True)
laplace = sp.Integral(sp.sqrt(2) * sp.exp(-sp.sqrt(2) * x) * sp.cos(s * x), (x, 0, sp.oo))


def test_an_integral_is_proved_and_typeset_as_an_integral():
    record = check.identity("eq-laplace", laplace, 1 / (1 + s**2 / 2), wrong=1 / (1 + s**2))
    assert record.kind == "proved"
    assert r"\int" in record.statement


def test_a_wrong_value_of_an_integral_fails_with_a_witness():
    with pytest.raises(CheckFailed, match=r"differ at s = "):
        check.identity("eq-laplace", laplace, 1 / (1 + s**2), wrong=1 / (1 + s**2 / 2))


def test_attack_takes_one_number_a_start():
    starts = torch.tensor([0.2, -0.4], dtype=torch.float64)
    attack = projected_ascent(
        lambda point: 1 - point**2, starts, lambda point: point.clamp(-1, 1), steps=60
    )
    assert attack.values.min() > 0.999
