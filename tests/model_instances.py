"""A formula-shaped reference of the model, and random instances to compare it on.

The reference loops over samples and heads, cuts padding off, and forms the matrix M: slow, short,
and as close to the printed formulas as code can be. Nothing here is shared with the library.
"""

from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from torch import Tensor

from attention_dynamics.models import Parameters, get_activation, independent_initialisation

QUERIES = ("fixed", "last")
MASKS = ("none", "padding", "scattered")


@dataclass
class Instance:
    """One random problem: parameters, tokens, query, mask, activation and logit scale."""

    samples: int = 3
    length: int = 4
    dimension: int = 3
    heads: int = 4
    activation: str = "tanh"
    query_kind: str = "fixed"
    mask_kind: str = "none"
    scale: float = 1.0
    seed: int = 0
    dtype: torch.dtype = torch.float64
    parameters: Parameters = field(init=False)
    tangent: Parameters = field(init=False)
    tokens: Tensor = field(init=False)
    query: Tensor | str = field(init=False)
    mask: Tensor | None = field(init=False)
    targets: Tensor = field(init=False)

    def __post_init__(self):
        g = torch.Generator().manual_seed(self.seed)

        def normal(*shape):
            return torch.randn(shape, generator=g, dtype=torch.float64).to(self.dtype)

        start = independent_initialisation(
            self.heads, self.dimension, generator=g, dtype=self.dtype
        )
        # The coefficients of the initialisation are signs only: scale them to tell c from c^2.
        self.parameters = start._replace(c=start.c * (1 + 0.3 * normal(self.heads)))
        self.tangent = Parameters(*(normal(*block.shape) for block in start))
        self.tokens = normal(self.samples, self.length, self.dimension) / self.dimension**0.5
        self.query = "last" if self.query_kind == "last" else normal(self.dimension)
        self.targets = normal(self.samples)
        self.mask = None
        if self.mask_kind != "none":
            lengths = torch.randint(1, self.length + 1, (self.samples,), generator=g)
            self.mask = torch.arange(self.length) < lengths[:, None]
        if self.mask_kind == "scattered":
            order = torch.rand((self.samples, self.length), generator=g).argsort(dim=-1)
            self.mask = self.mask.gather(-1, order)

    @property
    def options(self):
        """The keyword arguments common to the functions of the library."""
        return {
            "query": self.query,
            "activation": self.activation,
            "scale": self.scale,
            "mask": self.mask,
        }

    def sequence(self, j):
        """The tokens of sample j that the mask keeps, (T_j, d), and its query (d,)."""
        tokens = self.tokens[j] if self.mask is None else self.tokens[j][self.mask[j]]
        return tokens, tokens[-1] if self.query_kind == "last" else self.query


def instances(**fixed):
    """A strategy of instances; keyword arguments pin some of the fields."""
    drawn = {
        "samples": st.integers(1, 4),
        "length": st.integers(1, 6),
        "dimension": st.integers(1, 5),
        "heads": st.integers(1, 7),
        "activation": st.sampled_from(["tanh", "erf", "erf_plain"]),
        "query_kind": st.sampled_from(QUERIES),
        "mask_kind": st.sampled_from(MASKS),
        "scale": st.sampled_from([0.25, 1.0, 3.0]),
        "seed": st.integers(0, 2**31 - 1),
    }
    drawn.update({name: st.just(value) for name, value in fixed.items()})
    return st.builds(Instance, **drawn)


def softmax_by_formula(logits):
    """alpha_t = e^{l_t} / sum e^{l_u}, for one row of moderate logits."""
    return logits.exp() / logits.exp().sum()


def head_by_formula(X, U, W, q, scale):
    """(alpha, a, M) of one head on one sequence X (T, d): weights, pooled token, covariance."""
    alpha = softmax_by_formula(scale * torch.stack([x @ W @ q for x in X]))
    a = sum(alpha[t] * X[t] for t in range(len(X)))
    M = sum(alpha[t] * torch.outer(X[t], X[t]) for t in range(len(X))) - torch.outer(a, a)
    return alpha, a, M


def value_by_formula(instance):
    """f(X_j) = m^{-1/2} sum_i c_i sigma(U_i . a_i), (n,)."""
    sigma = get_activation(instance.activation)
    c, U, W = instance.parameters
    values = []
    for j in range(instance.samples):
        X, q = instance.sequence(j)
        total = torch.zeros((), dtype=X.dtype)
        for i in range(instance.heads):
            _, a, _ = head_by_formula(X, U[i], W[i], q, instance.scale)
            total = total + c[i] * sigma.value(U[i] @ a)
        values.append(total / instance.heads**0.5)
    return torch.stack(values)


def gradients_by_formula(instance):
    """Return d_c, d_U, d_W of f(X_j), with leading n, from the formed matrix M."""
    sigma = get_activation(instance.activation)
    c, U, W = instance.parameters
    out = instance.parameters.map(
        lambda block: torch.zeros((instance.samples, *block.shape), dtype=block.dtype)
    )
    for j in range(instance.samples):
        X, q = instance.sequence(j)
        for i in range(instance.heads):
            _, a, M = head_by_formula(X, U[i], W[i], q, instance.scale)
            s = U[i] @ a
            norm = instance.heads**-0.5
            out.c[j, i] = norm * sigma.value(s)
            out.U[j, i] = norm * c[i] * sigma.first(s) * a
            out.W[j, i] = norm * instance.scale * c[i] * sigma.first(s) * torch.outer(M @ U[i], q)
    return out
