r"""Other ways to compute the same network: torch's fused attention and its multi-head module.

``scaled_dot_product_attention`` takes the m heads as m queries on one set of keys and values, with
scale 1: the model exactly. ``nn.MultiheadAttention`` fits where its projections are given the
weights of the model: keys and values are the tokens, one query a head, the output s.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from attention_dynamics.models import shallow
from attention_dynamics.models.parameters import Parameters
from benchmarks import plain
from benchmarks.instances import instance
from benchmarks.table import Case, Point, Row, Settings, agreement, timed_row
from benchmarks.timing import Side, race

GROUP = "peers"


class FusedAttention(nn.Module):
    """The shallow Transformer on torch's fused attention, differentiated by autograd."""

    def __init__(self, parameters: Parameters, query: Tensor | None) -> None:
        super().__init__()
        self.c, self.U, self.W = (nn.Parameter(block.clone()) for block in parameters)
        self.query = query

    def forward(self, tokens: Tensor) -> Tensor:
        """Values (n,)."""
        if self.query is None:
            queries = torch.einsum("mde,ne->nmd", self.W, tokens[:, -1])
        else:
            queries = (self.W @ self.query).expand(tokens.shape[0], -1, -1)
        pooled = scaled_dot_product_attention(
            queries[:, None], tokens[:, None], tokens[:, None], scale=1.0
        )[:, 0]
        return torch.tanh((pooled * self.U).sum(-1)) @ self.c / self.c.shape[0] ** 0.5


class MultiHeadModule(nn.Module):
    r"""The same values through ``nn.MultiheadAttention``: one query a head is one target position.

    A module of one head with embedding d attends from the m rows :math:`\sqrt d\, W_i q` to the
    tokens; its four projections are the identity, which it multiplies with all the same.
    """

    def __init__(self, parameters: Parameters, query: Tensor) -> None:
        super().__init__()
        d = parameters.dimension
        self.attention = nn.MultiheadAttention(d, 1, bias=False, batch_first=True)
        with torch.no_grad():
            self.attention.in_proj_weight.copy_(torch.eye(d).repeat(3, 1))
            self.attention.out_proj.weight.copy_(torch.eye(d))
        for parameter in self.attention.parameters():
            parameter.requires_grad_(False)
        self.c, self.U, self.W = (nn.Parameter(block.clone()) for block in parameters)
        self.query = query

    def forward(self, tokens: Tensor) -> Tensor:
        """Values (n,)."""
        queries = (self.W @ self.query) * self.query.shape[0] ** 0.5
        pooled, _ = self.attention(
            queries.expand(tokens.shape[0], -1, -1), tokens, tokens, need_weights=False
        )
        return torch.tanh((pooled * self.U).sum(-1)) @ self.c / self.c.shape[0] ** 0.5


def cases(settings: Settings) -> list[Case]:
    """Loss with gradients, and values alone, short and long sequences."""
    shapes = ((8, 16, 64, 4000), (17, 97, 64, 4000), (8, 2**12, 64, 32))
    return [
        Case(f"d={d} T={T} m={m} n={n}", _case(d, T, m, n, settings))
        for d, T, m, n in (((4, 8, 4, 32),) if settings.quick else shapes)
    ]


def _case(d: int, T: int, m: int, n: int, settings: Settings) -> Callable[[], list[Row | Point]]:
    return lambda: measure(d, T, m, n, settings)


def measure(d: int, T: int, m: int, n: int, settings: Settings) -> list[Row | Point]:
    """Ours against both, for loss with gradients and for values alone."""
    problem = instance(d, T, m, n, query="fixed", paired=False)
    tokens, targets = problem.data.tokens, problem.data.targets
    query, initial = problem.query, problem.initial
    assert isinstance(query, Tensor)
    peers = {
        "fused attention": FusedAttention(initial, query),
        "nn.MultiheadAttention": MultiHeadModule(initial, query),
        "plain": plain.PlainTransformer(initial, query),
    }

    def gradients(model: nn.Module) -> Side:
        def side() -> tuple[Tensor, ...]:
            model.zero_grad()
            loss = ((model(tokens) - targets) ** 2).mean()
            loss.backward()
            return loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)

        return side

    def values(model: nn.Module) -> Side:
        def side() -> Tensor:
            with torch.inference_mode():
                return model(tokens)

        return side

    def ours() -> tuple[Tensor, ...]:
        loss, found = shallow.loss_and_gradients(
            initial, tokens, targets, query=query, validate=False
        )
        return loss, *found

    def our_values() -> Tensor:
        with torch.no_grad():
            return shallow.forward(initial, tokens, query=query, validate=False)

    rows: list[Row | Point] = []
    for what, build, own in (
        ("loss and gradients", gradients, ours),
        ("values", values, our_values),
    ):
        sides: dict[str, Side] = {name: build(model) for name, model in peers.items()}
        differences = {name: agreement(side(), own(), 1e-4) for name, side in sides.items()}
        times = race({**sides, "ours": own}, settings.pace)
        rows += [
            timed_row(
                times, name, "ours", group=GROUP, what=what, sizes=f"d={d} T={T} m={m} n={n}",
                malloc=settings.malloc, difference=differences[name], tolerance=1e-4,
            )
            for name in sides
        ]  # fmt: skip
    return rows
