r"""The heads of one large shallow Transformer, split over processes: one all-reduce a step.

Rank r of R holds m/R heads, pairs kept together. With its own sum
:math:`f_r = (m/R)^{-1/2} \sum_{i \in r} c_i\, \sigma(U_i \cdot a_i)`,

.. math:: f = R^{-1/2} \sum_r f_r, \qquad
    \nabla_r L_n = R^{-1/2} \sum_j \tfrac2n (f(X_j) - y_j)\, \nabla f_r(X_j),

so the n predictions are all that is exchanged; gradient, step and projection of a head stay where
the head is. Every rank holds all samples. From a shell::

    torchrun --nproc-per-node 2 -m attention_dynamics.commands.distributed --heads 1024

trains a student of 1024 heads on a small teacher, on CPUs with gloo, on GPUs with nccl (one rank a
GPU); ``--help`` lists the sizes. From Python, in a script that torchrun starts::

    dist.init_process_group("gloo")
    whole = symmetric_initialisation(heads, d, generator=generator(0, "student"))
    model = ShallowTransformer(own_heads(whole, dist.get_rank(), dist.get_world_size()), query=q)
    result = distributed_descent(model, tokens, targets, config)
    final = gather_heads(result.final)  # all heads, on every rank
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float
from torch import Tensor

from attention_dynamics.models.engines.base import plainly
from attention_dynamics.models.parameters import Parameters
from attention_dynamics.models.shallow import ShallowTransformer, logit_scale
from attention_dynamics.training.descent import DescentConfig
from attention_dynamics.training.objective import Objective
from attention_dynamics.training.projection import Radii
from attention_dynamics.training.tracking import KeptIterates
from attention_dynamics.training.update import update_for
from attention_dynamics.validation import require_integer

_START = "torchrun --nproc-per-node 2 -m attention_dynamics.commands.distributed"
_LOOK_EVERY = 64  # steps between two looks at the losses on an accelerator

Group = dist.ProcessGroup | None


@dataclass(frozen=True)
class DistributedResult:
    r"""
    .. math:: \phi_0,\quad \phi_\tau,\quad \bar\phi = \frac1\tau \sum_{k<\tau} \phi_k \quad
        \text{of the heads of this rank}, \qquad L_n(\phi_k),\; k = 0..\tau.

    ``losses`` (:math:`\tau + 1`,) are those of the whole network, the same on every rank, on the
    CPU in float64. :func:`gather_heads` puts heads of all ranks together.
    """

    initial: Parameters
    final: Parameters
    averaged: Parameters
    losses: Float[Tensor, " steps+1"]
    step_size: float


def own_heads(parameters: Parameters, rank: int, ranks: int) -> Parameters:
    r"""Pairs :math:`(i, i + m/2)` with :math:`i \in [\tfrac{rm}{2R}, \tfrac{(r+1)m}{2R})`.

    Heads i first, their partners after them, as in the whole: what was a symmetric initialisation
    is one on every rank. The numbers are copied. Raises ValueError if the m/2 pairs cannot be
    split evenly.
    """
    require_integer("ranks", ranks, minimum=1)
    require_integer("rank", rank, minimum=0)
    heads = parameters.heads
    if rank >= ranks:
        raise ValueError(f"rank: expected 0 to {ranks - 1} of ranks = {ranks}, got {rank}")
    if heads % 2 == 0 and ranks > heads // 2:
        raise ValueError(
            f"ranks: expected at most one a pair of heads, {heads // 2} for m = {heads}, got "
            f"{ranks}; start fewer processes, or take more heads"
        )
    if heads % (2 * ranks):
        least = max(2 * ranks, heads - heads % (2 * ranks))
        raise ValueError(
            f"heads: pairs stay together, so m must be a multiple of 2 * ranks = {2 * ranks}, got "
            f"m = {heads}; take m = {least} or m = {least + 2 * ranks}"
        )
    pairs = heads // (2 * ranks)
    first = torch.arange(rank * pairs, (rank + 1) * pairs, device=parameters.U.device)
    index = torch.cat((first, first + heads // 2))
    return parameters.map(lambda block: block.index_select(0, index))


def gather_heads(own: Parameters, group: Group = None) -> Parameters:
    r"""All m heads in the order of the whole network, on every rank: inverse of :func:`own_heads`.

    Raises RuntimeError without a process group.
    """
    ranks = dist.get_world_size(_require_group(group))

    def gathered(block: Tensor) -> Tensor:
        parts = [torch.empty_like(block) for _ in range(ranks)]
        dist.all_gather(parts, block.contiguous(), group=group)
        halves = [part.chunk(2, dim=0) for part in parts]
        return torch.cat([first for first, _ in halves] + [second for _, second in halves])

    return own.map(gathered)


@plainly
def distributed_descent(
    model: ShallowTransformer,
    tokens: Float[Tensor, "n T d"],
    targets: Float[Tensor, " n"],
    config: DescentConfig,
    *,
    mask: Bool[Tensor, "n T"] | None = None,
    engine: str = "auto",
    group: Group = None,
) -> DistributedResult:
    r"""
    .. math:: \phi_{k+1} = \Pi_{\Omega_\rho}\bigl(\phi_k - \eta \nabla L_n(\phi_k)\bigr)

    for the network of all ranks' heads: the numbers of
    :func:`~attention_dynamics.training.descent.projected_gradient_descent` to rounding.
    ``model`` has the heads of this rank (:func:`own_heads`) and is left at their final iterate; the
    radii are divided by the root of all m, and so is the logit scale by its power. ``tokens`` (n,
    T, d), ``targets`` (n,) and ``mask`` are the same on every rank.

    Raises RuntimeError without a process group, ValueError on every rank if heads, data or
    configuration of the ranks differ, or for a configuration with ``batch_size`` or ``patience``;
    FloatingPointError on every rank when the loss stops being finite, with the model as it came in.
    """
    ranks = dist.get_world_size(_require_group(group))
    for name in ("batch_size", "patience"):
        if getattr(config, name) is not None:
            raise ValueError(
                f"{name}: expected None, got {getattr(config, name)}; heads on several ranks take "
                "full gradients for a fixed number of steps"
            )
    training = Objective.of(model, tokens, targets, mask, engine=engine)
    heads = ranks * model.heads
    _require_same(training, model, config, group)
    training = replace(training, scale=logit_scale(heads, model.logit_exponent))
    initial = model.snapshot()
    update = update_for(initial, _limits(config.radii, heads), config.eta, 3)
    kept, losses = KeptIterates(update, 1), []
    look_every = 1 if initial.U.device.type == "cpu" else _LOOK_EVERY
    share = ranks**-0.5
    for k in range(config.steps + 1):
        values = training.engine.values(
            training.inputs, kept.phi, training.activation, training.scale
        )
        values = values * share
        dist.all_reduce(values, group=group)
        residual = values - training.targets
        losses.append(residual.square().mean())
        if k % look_every == 0 or k == config.steps:
            _require_finite(losses[-look_every:], k, config.eta)
        if k < config.steps:
            cotangent = residual * (2.0 * share / len(residual))
            gradients = training.engine.vjp(
                training.inputs, kept.phi, training.activation, training.scale, cotangent
            )
            kept.settle(kept.slot)
            kept.advance(gradients)
    kept.settle(kept.slot, end=kept.slot)
    final = kept.phi.clone()
    model.load(final)
    history = torch.stack(losses).double().cpu()
    return DistributedResult(initial, final, kept.mean(), history, config.eta)


def _limits(radii: Radii | None, heads: int) -> tuple[float | None, float | None, float | None]:
    if radii is None:
        return None, None, None
    c, U, W = (
        None if radius is None else radius / math.sqrt(heads)
        for radius in (radii.c, radii.U, radii.W)
    )
    return c, U, W


def _require_group(group: Group) -> Group:
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "no process group: call torch.distributed.init_process_group in a script that torchrun "
            f"starts; for the command of this module: {_START}"
        )
    return group


def _require_same(
    training: Objective, model: ShallowTransformer, config: DescentConfig, group: Group
) -> None:
    """Compare what has to be equal on all ranks; every rank raises if any differs."""
    radii = config.radii or Radii(None, None, None)
    facts = {
        "heads a rank": model.heads, "dimension": model.dimension,
        "samples": len(training.targets), "length": training.tokens.shape[1],
        "sum of the tokens": float(training.tokens.double().sum()),
        "sum of the targets": float(training.targets.double().sum()),
        "steps": config.steps, "step_size": config.eta,
        "logit_exponent": model.logit_exponent,
    } | {
        f"radii.{block}": -1.0 if (rho := getattr(radii, block)) is None else rho for block in "cUW"
    }  # fmt: skip
    mine = torch.tensor(list(facts.values()), dtype=torch.float64, device=training.targets.device)
    all_of = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_of, mine, group=group)
    table = torch.stack(all_of)
    different = (table != table[0]).any(dim=0).tolist()
    for name, column, differs in zip(facts, table.T.tolist(), different, strict=True):
        if differs:
            raise ValueError(
                f"{name}: expected the same on every rank, got {column}; draw the data from the "
                "same seed everywhere and split the heads with own_heads"
            )


def _require_finite(losses: Sequence[Tensor], step: int, eta: float) -> None:
    for back, loss in enumerate(reversed(torch.stack(list(losses)).tolist())):
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"loss: {loss} at step {step - back} with step_size = {eta:.4g}; the descent "
                "diverged: reduce step_size, or bound the parameters with radii"
            )
