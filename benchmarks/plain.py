r"""The baseline: the model and its training loop as a researcher writes them, and correct.

Autograd goes through the materialised softmax. Each step does what the trainer of the paper does:
loss, backward, norms of the three gradients, step, projection of every head, and the loss on the
held-out samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from attention_dynamics.models.parameters import Parameters


class PlainTransformer(nn.Module):
    """The shallow Transformer; weights (n, m, T) and pooled tokens (n, m, d) are formed."""

    def __init__(self, parameters: Parameters, query: Tensor | None) -> None:
        super().__init__()
        self.c, self.U, self.W = (nn.Parameter(block.clone()) for block in parameters)
        self.query = query  # None for the last token

    def forward(self, tokens: Tensor) -> Tensor:
        """Values (n,)."""
        if self.query is None:
            logits = torch.einsum("mde,ne->nmd", self.W, tokens[:, -1])
            logits = torch.einsum("ntd,nmd->nmt", tokens, logits)
        else:
            logits = torch.einsum("ntd,md->nmt", tokens, self.W @ self.query)
        weights = torch.softmax(logits, dim=-1)
        pooled = torch.einsum("nmt,ntd->nmd", weights, tokens)
        values = torch.tanh(torch.einsum("nmd,md->nm", pooled, self.U))
        return values @ self.c / self.c.shape[0] ** 0.5


class PlainIndRNN(nn.Module):
    """Independent recurrent units, one time step after the other."""

    def __init__(self, w: Tensor, u: Tensor, c: Tensor) -> None:
        super().__init__()
        self.w, self.u, self.c = (nn.Parameter(block.detach().clone()) for block in (w, u, c))

    def forward(self, tokens: Tensor) -> Tensor:
        """Values (n,)."""
        state = torch.zeros(tokens.shape[0], self.c.shape[0], dtype=tokens.dtype)
        for t in range(tokens.shape[1]):
            state = torch.tanh(tokens[:, t] @ self.w.T + self.u * state)
        return state @ self.c / self.c.shape[0] ** 0.5


@dataclass(frozen=True)
class Data:
    """Training tokens and targets, and those held out."""

    tokens: Tensor
    targets: Tensor
    held_tokens: Tensor
    held_targets: Tensor


def train(
    model: nn.Module, data: Data, steps: int, step_size: float, radius: float | None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    r"""
    Run ``steps`` of projected gradient descent and look at each iterate, the last one included.

    Returns the history, (steps + 1, 5): loss, held-out loss, three gradient norms; and the final
    parameters. ``radius`` is :math:`\rho`, the same for the three blocks, None for no projection.
    """
    initial = [parameter.detach().clone() for parameter in model.parameters()]
    optimiser = torch.optim.SGD(model.parameters(), lr=step_size)
    history = []
    for step in range(steps + 1):
        optimiser.zero_grad()
        loss = ((model(data.tokens) - data.targets) ** 2).mean()
        loss.backward()
        norms = [p.grad.norm().item() for p in model.parameters() if p.grad is not None]
        with torch.no_grad():
            held = ((model(data.held_tokens) - data.held_targets) ** 2).mean()
        history.append([loss.item(), held.item(), *norms])
        if step == steps:
            break
        optimiser.step()
        if radius is not None:
            project(list(model.parameters()), initial, radius)
    return torch.tensor(history), tuple(parameter.detach() for parameter in model.parameters())


@torch.no_grad()
def project(parameters: list[nn.Parameter], initial: list[Tensor], radius: float) -> None:
    r"""Move each head back into its ball of radius :math:`\rho/\sqrt m`, block by block."""
    for parameter, start in zip(parameters, initial, strict=True):
        moved = parameter - start
        norms = moved.flatten(1).norm(dim=1) if moved.ndim > 1 else moved.abs()
        limit = radius / parameter.shape[0] ** 0.5
        factor = torch.clamp(limit / norms.clamp_min(1e-30), max=1.0)
        parameter.copy_(start + moved * factor.reshape(-1, *[1] * (moved.ndim - 1)))


def value(blocks: tuple[Tensor, Tensor, Tensor], tokens: Tensor, query: Tensor) -> Tensor:
    """The value at one sequence (T, d), a plain function for ``torch.func`` and autograd."""
    c, U, W = blocks
    weights = torch.softmax((W @ query) @ tokens.mT, dim=-1)
    return torch.tanh((U * (weights @ tokens)).sum(-1)) @ c / c.shape[0] ** 0.5


def kernel_by_vmap(blocks: tuple[Tensor, ...], tokens: Tensor, query: Tensor) -> Tensor:
    """The tangent kernel (n, n) from the Jacobian that ``vmap(jacrev)`` gives."""
    jacobian = torch.func.vmap(torch.func.jacrev(partial(_at, query)), (None, 0))(blocks, tokens)
    return _gram(jacobian)


def kernel_by_loop(blocks: tuple[Tensor, ...], tokens: Tensor, query: Tensor) -> Tensor:
    """The tangent kernel (n, n) from one backward pass a sample."""
    leaves = tuple(block.detach().requires_grad_() for block in blocks)
    gradients = [torch.autograd.grad(value(leaves, row, query), leaves) for row in tokens]  # type: ignore[arg-type]
    return _gram(tuple(torch.stack(block) for block in zip(*gradients, strict=True)))


def _at(query: Tensor, blocks: tuple[Tensor, Tensor, Tensor], row: Tensor) -> Tensor:
    return value(blocks, row, query)


def _gram(jacobian: tuple[Tensor, ...]) -> Tensor:
    return sum((flat @ flat.mT for flat in (b.flatten(1) for b in jacobian)), torch.zeros(()))
