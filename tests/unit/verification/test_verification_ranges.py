"""The range of a free index is that of its own array, whatever other sums call their indices."""

from __future__ import annotations

import pytest
import sympy as sp

from attention_dynamics.verification.ranges import free_indices

m, d = sp.symbols("m d", integer=True, positive=True)


@pytest.mark.parametrize("name", ["a", "b", "c", "i", "j", "k", "s", "t"])
def test_two_sums_may_call_their_indices_alike(name):
    a, p, r = sp.symbols(f"{name} p r", integer=True, positive=True)
    U, V = sp.IndexedBase("U"), sp.IndexedBase("V")
    over_m, over_d = sp.Sum(U[a] ** 2, (a, 1, m)), sp.Sum(V[a] ** 2, (a, 1, d))
    found = free_indices([U[p] * V[r] * (over_m - over_d)])
    assert found == {p: (1, m), r: (1, d)}


def test_an_inner_sum_hides_the_index_of_an_outer_one():
    a, p, r = sp.symbols("a p r", integer=True, positive=True)
    U, V = sp.IndexedBase("U"), sp.IndexedBase("V")
    nested = sp.Sum(U[a] * sp.Sum(V[a], (a, 1, d)), (a, 1, m))
    assert free_indices([nested + U[p] + V[r]]) == {p: (1, m), r: (1, d)}
