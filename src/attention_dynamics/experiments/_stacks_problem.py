r"""One cell of the experiment on stacks: the problem, and what is read off a descent."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from attention_dynamics.data import generator
from attention_dynamics.experiments._nested_problem import nested_tokens
from attention_dynamics.models import shallow_stack
from attention_dynamics.models.shallow_stack import Output
from attention_dynamics.models.stack_parameters import StackParameters
from attention_dynamics.theory.stack_bounds import stack_constants
from attention_dynamics.theory.teacher import Teacher
from attention_dynamics.theory.transport import MultiAnchorTransport, TransportNorms
from attention_dynamics.training.stack_descent import StackRun

_AT_ONCE = 4096  # sequences that the teacher looks at together
_PROBED = 8  # samples whose gradients are looked at


def stack_problem(
    name: str, seed: int, config: Any, device: str
) -> tuple[Float[Tensor, "n T d"], Float[Tensor, "n ..."]]:
    r"""Tokens, sequence-level means of the law of
    :func:`~attention_dynamics.experiments._nested_problem.nested_tokens`, and targets.

    The teacher asks with the last token of an anchor and of a sample. For the outputs ``"each"``
    the target :math:`y_t` is what it says if token t asks; the last of them is the target of the
    outputs ``"last"``. All lengths of a seed share teacher, last token and sequence mean.
    """

    def tokens(role: str, count: int, size: int) -> Tensor:
        return nested_tokens(
            count, size, config.dimension, law="sequence_means", seed=seed, name=name, role=role
        ).to(device=device, dtype=torch.float32)  # fmt: skip

    normal = torch.randn(
        config.anchors, generator=generator(seed, name, "coefficients"), dtype=torch.float64
    )
    coefficients = (normal / normal.abs().sum()).to(device=device, dtype=torch.float32)
    transport = MultiAnchorTransport(
        tokens("anchors", config.anchors, config.anchor_length), coefficients,
        TransportNorms(*(config.transport_norm,) * 3), "last", config.activation,
    )  # fmt: skip
    teacher = Teacher(
        transport, generator=generator(seed, name, "teacher"), heads=config.teacher_heads
    )
    X = tokens("samples", config.samples, config.length)
    return X, config.target_scale * answers(teacher, X, config.outputs)


def answers(
    teacher: Teacher, tokens: Float[Tensor, "n T d"], outputs: Output
) -> Float[Tensor, "n ..."]:
    """What the teacher says if the last token asks, (n,), or if each does, (n, T).

    Attention does not see the order of its keys, so a token asks from the last place.
    """
    if outputs == "last":
        return teacher(tokens)
    samples, length, d = tokens.shape
    own = torch.arange(length, device=tokens.device)
    order = (own[:, None] + 1 + own) % length  # a rotation that ends with token t
    asked = tokens[:, order].reshape(samples * length, length, d)
    return torch.cat([teacher(part) for part in asked.split(_AT_ONCE)]).reshape(samples, length)


def output(config: Any, phi: StackParameters, tokens: Tensor) -> Float[Tensor, "n ..."]:
    """The outputs of the kind that is trained."""
    return shallow_stack.forward(phi, tokens, outputs=config.outputs, activation=config.activation)


def movement(config: Any, found: StackRun, tokens: Float[Tensor, "n T d"]) -> dict[str, float]:
    """How far the read-out, the layers below it, and the tokens that it reads have moved."""
    layers = range(1, config.depth + 1)
    distances = [float(found.history[f"distance_{place}"].iloc[-1]) for place in layers]
    before, after = (
        shallow_stack.hidden_tokens(phi, tokens, activation=config.activation)[-1]
        for phi in (found.initial, found.final)
    )
    below = {"moved_inner": math.hypot(*distances[:-1])} if config.depth > 1 else {}
    return {
        "moved_readout": distances[-1],
        **below,
        "moved_tokens": float((after - before).square().sum(dim=-1).mean().sqrt()),
        "longest_token": float(after.norm(dim=-1).max()),
        "active": float(found.history[[f"active_{place}" for place in layers]].to_numpy().max()),
    }


def gradients(config: Any, found: StackRun, tokens: Float[Tensor, "n T d"]) -> dict[str, float]:
    r""":math:`\|\nabla f_T(X_j)\|`, the largest of a few samples, in all and below the read-out.

    At the paired start with them the worst ratio of a layer's gradient to its bound.
    """
    tokens, quantities = tokens[:_PROBED], {}
    for when, phi in (("start", found.initial), ("end", found.final)):
        norms = shallow_stack.sample_gradient_norms(phi, tokens, activation=config.activation)
        quantities[f"gradient_{when}"] = float(norms.norm(dim=1).max())
        quantities[f"gradient_inner_{when}"] = float(norms[:, :-1].norm(dim=1).max())
    if config.start == "paired":
        constants = stack_constants(found.initial, found.final, activation=config.activation)
        bounds = torch.tensor(constants.gradients, dtype=torch.float64)
        ratios = (norms.amax(dim=0).cpu() / bounds).tolist()
        quantities["bound_ratio_readout"] = ratios[-1]
        if config.depth > 1:
            quantities["bound_ratio_inner"] = max(ratios[:-1])
    return quantities
