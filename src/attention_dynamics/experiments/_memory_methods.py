r"""The ways to one gradient, or to one value, whose memory is compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from attention_dynamics.experiments import _memory_state as state
from attention_dynamics.models import recurrence, shallow
from attention_dynamics.models._pass import Inputs
from attention_dynamics.models.activations import Activation
from attention_dynamics.models.engines import recurrence as recurrent_engines
from attention_dynamics.models.engines import selection
from attention_dynamics.models.parameters import Parameters
from attention_dynamics.models.recurrence import RecurrentParameters


class Problem(NamedTuple):
    """Tokens (n, T, d), targets (n,), the query (d,) or (n, d), the parameters of both models."""

    tokens: Tensor
    targets: Tensor
    query: Tensor
    heads: Parameters
    units: RecurrentParameters
    sigma: Activation


class Method(NamedTuple):
    """A model, what is asked of it, and the function that computes it.

    ``compute(problem)`` returns loss and gradients for ``"training"``, the values (n,) for
    ``"inference"``. ``counted`` is False for compiled kernels, whose memory torch does not see.
    """

    model: Literal["transformer", "recurrent"]
    task: Literal["training", "inference"]
    compute: Callable[[Problem], Any]
    counted: bool = True


def _autograd(p: Problem) -> tuple[Tensor, tuple[Tensor, ...]]:
    leaves = p.heads.map(lambda block: block.detach().requires_grad_())
    loss = shallow.loss(leaves, p.tokens, p.targets, query=p.query, activation=p.sigma,
                        chunk=len(p.tokens), engine="reference", validate=False)  # fmt: skip
    return loss.detach(), torch.autograd.grad(loss, leaves)


def _closed(p: Problem) -> tuple[Tensor, Parameters]:
    return shallow.loss_and_gradients(
        p.heads, p.tokens, p.targets, query=p.query, activation=p.sigma, chunk=len(p.tokens),
        engine="reference", validate=False,
    )  # fmt: skip


def _blocks(p: Problem) -> tuple[Tensor, Parameters]:
    """The engine itself: the public functions give what a dispatch mode looks into to another."""
    inputs = Inputs(p.tokens, p.query, None)
    values, gradients = selection.get("eager").step(inputs, p.heads, p.sigma, 1.0, p.targets)
    return (values - p.targets).square().mean(), gradients


def _fused(p: Problem) -> tuple[Tensor, Parameters]:
    return shallow.loss_and_gradients(
        p.heads, p.tokens, p.targets, query=p.query, activation=p.sigma, engine="fused",
        validate=False,
    )  # fmt: skip


def _values(p: Problem) -> Tensor:
    return shallow.forward(p.heads, p.tokens, query=p.query, activation=p.sigma,
                           chunk=len(p.tokens), engine="reference", validate=False)  # fmt: skip


def _recurrent_autograd(p: Problem) -> tuple[Tensor, tuple[Tensor, ...]]:
    leaves = p.units.map(lambda block: block.detach().requires_grad_())
    values = recurrence.forward(
        leaves, p.tokens, activation=p.sigma, engine="reference", validate=False
    )
    loss = (values - p.targets).square().mean()
    return loss.detach(), torch.autograd.grad(loss, leaves)


def _recurrent_closed(p: Problem) -> tuple[Tensor, RecurrentParameters]:
    values, gradients = recurrent_engines.eager(
        p.units, p.tokens, p.targets, p.sigma, len(p.tokens)
    )
    assert gradients is not None
    return (values - p.targets).square().mean(), RecurrentParameters(*gradients)


def _recurrent_fused(p: Problem) -> tuple[Tensor, RecurrentParameters]:
    return recurrence.loss_and_gradients(
        p.units, p.tokens, p.targets, activation=p.sigma, engine="fused", validate=False
    )


def _recurrent_values(p: Problem) -> Tensor:
    return recurrent_engines.eager(p.units, p.tokens, None, p.sigma, len(p.tokens))[0]


METHODS: dict[str, Method] = {
    "autograd": Method("transformer", "training", _autograd),
    "closed": Method("transformer", "training", _closed),
    "streaming": Method(
        "transformer", "training",
        lambda p: state.streamed_step(p.heads, p.tokens, p.targets, p.query, p.sigma),
    ),
    "blocks": Method("transformer", "training", _blocks),
    "fused": Method("transformer", "training", _fused, counted=False),
    "values": Method("transformer", "inference", _values),
    "values_streaming": Method(
        "transformer", "inference",
        lambda p: state.streamed_values(p.heads, p.tokens, p.query, p.sigma),
    ),
    "recurrent_autograd": Method("recurrent", "training", _recurrent_autograd),
    "recurrent_closed": Method("recurrent", "training", _recurrent_closed),
    "recurrent_checkpointed": Method(
        "recurrent", "training",
        lambda p: state.checkpointed(p.units, p.tokens, p.targets, p.sigma),
    ),
    "recurrent_forward": Method(
        "recurrent", "training",
        lambda p: state.forward_sensitivities(p.units, p.tokens, p.targets, p.sigma),
    ),
    "recurrent_fused": Method("recurrent", "training", _recurrent_fused, counted=False),
    "recurrent_values": Method("recurrent", "inference", _recurrent_values),
}  # fmt: skip
