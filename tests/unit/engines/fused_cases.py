"""Problems for the fused kernel, and the formulas of the book in float64 under autograd."""

from dataclasses import dataclass

import torch

from attention_dynamics.models import Parameters, get_activation
from attention_dynamics.models._pass import HeadFeatures, Inputs

HEADS = (1, 3, 8, 17, 40)
LENGTHS = (1, 2, 5, 63, 64, 65, 129, 200)
DIMENSIONS = (1, 2, 3, 8, 17, 33)
QUERIES = ("fixed", "last", "free")


@dataclass
class Case:
    """Inputs, parameters, a tangent and targets in float64, all from one seed."""

    m: int = 17
    T: int = 5
    d: int = 3
    n: int = 9
    query: str = "last"
    masked: bool = False
    scale: float = 0.7
    size: float = 1.0
    seed: int = 0

    def __post_init__(self):
        g = torch.Generator().manual_seed(self.seed)

        def normal(*shape):
            return torch.randn(shape, generator=g, dtype=torch.float64)

        tokens = self.size * normal(self.n, self.T, self.d) / self.d**0.5
        mask = None
        if self.masked:
            mask = torch.rand((self.n, self.T), generator=g) < 0.5
            mask[:, self.T // 2] = True
            mask[0] = torch.arange(self.T) <= self.T // 2  # a run of tokens
        query = {"fixed": normal(self.d), "last": tokens[:, -1], "free": normal(self.n, self.d)}
        self.inputs = Inputs(tokens, query[self.query], mask)
        shapes = ((self.m,), (self.m, self.d), (self.m, self.d, self.d))
        self.parameters = Parameters(*(normal(*shape) for shape in shapes))
        self.tangent = Parameters(*(normal(*shape) for shape in shapes))
        self.targets = normal(self.n)

    def cast(self, dtype):
        """The same case with its tensors in another dtype."""
        other = Case(**{name: getattr(self, name) for name in self.__dataclass_fields__})
        tokens, query, mask = self.inputs
        other.inputs = Inputs(tokens.to(dtype), query.to(dtype), mask)
        other.parameters = self.parameters.to(dtype=dtype)
        other.tangent = self.tangent.to(dtype=dtype)
        other.targets = self.targets.to(dtype)
        return other


def features_by_formula(case, U, W):
    """(s, a, r) through the printed formulas."""
    tokens, query, mask = case.inputs
    query = query.expand(tokens.shape[0], -1)
    logits = case.scale * torch.einsum("ntd,mde,ne->nmt", tokens, W, query)
    if mask is not None:
        logits = logits.masked_fill(~mask[:, None], -torch.inf)
    alpha = torch.softmax(logits, dim=-1)
    projections = torch.einsum("ntd,md->nmt", tokens, U)
    s = (alpha * projections).sum(dim=-1)
    centred = alpha * (projections - s[..., None])
    return HeadFeatures(s, alpha @ tokens, centred @ tokens)


def slopes_by_formula(case):
    """Slopes V.a + r.(gamma Z q), (n, m)."""
    tokens, query, _ = case.inputs
    _, a, r = features_by_formula(case, case.parameters.U, case.parameters.W)
    query = query.expand(tokens.shape[0], -1)
    along = case.scale * torch.einsum("mde,ne->nmd", case.tangent.W, query)
    return (case.tangent.U * a).sum(dim=-1) + (r * along).sum(dim=-1)


def gradients_by_autograd(case, activation, outer):
    """Values f (n,) and the gradient of ``outer(f)``, from the formulas by autograd."""
    live = Parameters(*(block.clone().requires_grad_() for block in case.parameters))
    s = features_by_formula(case, live.U, live.W).s
    f = (live.c * get_activation(activation).value(s)).sum(dim=-1) * case.m**-0.5
    return f.detach(), Parameters(*torch.autograd.grad(outer(f), live))


def error(got, expected, floor=0.0):
    """Norm-wise relative error, against ``floor`` where the expected value vanishes."""
    difference = torch.linalg.vector_norm(got.double() - expected)
    size = max(float(torch.linalg.vector_norm(expected)), floor)
    return 0.0 if difference == 0 else float(difference) / size if size else float("inf")
