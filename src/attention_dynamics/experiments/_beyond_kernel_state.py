r"""Data of one seed beyond the kernel regime, and what is measured of a descent there."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from attention_dynamics.data import generator, query_vector, unit_ball_tokens
from attention_dynamics.experiments._teacher_problem import teacher_problem
from attention_dynamics.models import shallow
from attention_dynamics.models.attention import attention_weights, logits
from attention_dynamics.models.parameters import Parameters
from attention_dynamics.models.shallow import ShallowTransformer
from attention_dynamics.theory.transport import TransportNorms
from attention_dynamics.training.descent import DescentConfig, projected_gradient_descent
from attention_dynamics.validation import require_one_of

TeacherKind = Literal["sharp", "class"]


class Problem(NamedTuple):
    """Training and held-out samples with standardised targets, and the query."""

    tokens: Tensor
    targets: Tensor
    held_tokens: Tensor
    held_targets: Tensor
    query: Tensor


def sharp_head(
    tokens: Float[Tensor, "n T d"],
    value: Float[Tensor, " d"],
    direction: Float[Tensor, " d"],
) -> Float[Tensor, " n"]:
    r"""
    .. math:: y(X) = \tanh\bigl(u \cdot X\,\mathrm{softmax}(X^\top w)\bigr),

    one head with u = ``value`` and :math:`w = W^\star q` = ``direction``. Returns (n,).
    """
    weights = torch.softmax(tokens @ direction, dim=-1)
    return torch.tanh((weights[..., None] * tokens).sum(dim=1) @ value)


@lru_cache(maxsize=64)
def problem_of(
    name: str,
    seed: int,
    *,
    teacher: TeacherKind,
    samples: int,
    held: int,
    length: int,
    dimension: int,
    value_norm: float,
    logit_norm: float,
    teacher_heads: int,
    device: str,
) -> Problem:
    r"""Sequences with a mean of their own, targets of held-out mean 0 and variance 1.

    ``teacher`` is ``"sharp"``, one head with :math:`\|u\|` = ``value_norm`` and :math:`\|w\|` =
    ``logit_norm``, or ``"class"``, a multi-anchor member of the class of the theorem. Raises
    ValueError for another one.
    """
    require_one_of("teacher", teacher, ("sharp", "class"))
    if teacher == "class":
        made = teacher_problem(
            name, seed, samples=samples + held, validation_fraction=held / (samples + held),
            length=length, dimension=dimension, token_law="sequence_means", query="fixed",
            activation="tanh", anchors=16, teacher_heads=teacher_heads,
            norms=TransportNorms(3.0, 3.0, 3.0), device=device,
        )  # fmt: skip
        assert isinstance(made.query, Tensor)
        tokens, held_tokens, query = made.tokens, made.held_tokens, made.query
        raw, held_raw = made.targets, made.held_targets
    else:
        # A stream a role: more samples go on where fewer stopped, and held-out ones stay.
        def drawn(role: str, count: int) -> Tensor:
            return unit_ball_tokens(
                count, length, dimension, law="sequence_means", device=device,
                generator=generator(seed, name, role),
            )  # fmt: skip

        def vector(role: str, norm: float = 1.0) -> Tensor:
            stream = generator(seed, name, role)
            return query_vector(dimension, generator=stream, norm=norm).to(device)

        tokens, held_tokens, query = drawn("train", samples), drawn("held", held), vector("query")
        head = vector("value", value_norm), vector("direction", logit_norm)
        raw, held_raw = sharp_head(tokens, *head), sharp_head(held_tokens, *head)
    centre, scale = held_raw.mean(), held_raw.std(correction=0)
    return Problem(tokens, (raw - centre) / scale, held_tokens, (held_raw - centre) / scale, query)


def descend(
    problem: Problem, initial: Parameters, config: DescentConfig, output_scale: float
) -> tuple[Parameters, float, float]:
    r"""Plain descent of :math:`\alpha f` with step :math:`\eta/\alpha^2`, as f on :math:`y/\alpha`.

    Returns the final iterate, :math:`\sum_{k<\tau}\sqrt{L_k}` and the largest loss, both losses of
    :math:`\alpha f`. Raises FloatingPointError if the descent diverges.
    """
    model = ShallowTransformer(initial, query=problem.query)
    targets = problem.targets / output_scale
    result = projected_gradient_descent(model, problem.tokens, targets, config)
    losses = output_scale**2 * result.history["loss"].to_numpy()
    return result.final, float(np.sqrt(losses[:-1]).sum()), float(losses.max())


def top(parameters: Parameters, problem: Problem) -> float:
    r""":math:`\lambda_1(K)/n` on the training samples; a step beyond its inverse is unstable."""
    J = jacobian(parameters, problem.tokens, problem.query)
    gram = J @ J.mT if len(J) <= J.shape[1] else J.mT @ J
    return float(torch.linalg.eigvalsh(gram.double().cpu())[-1]) / len(J)


def head_movement(initial: Parameters, final: Parameters) -> float:
    r""":math:`\bigl(\frac1m \sum_i \|\phi_i - \phi_{0,i}\|^2\bigr)^{1/2}`, all three blocks."""
    moved = final.minus(initial)
    return float((moved.inner(moved) / initial.heads).sqrt())


def jacobian(
    parameters: Parameters, tokens: Float[Tensor, "n T d"], query: Tensor
) -> Float[Tensor, "n p"]:
    r""":math:`\nabla f(X_j; \phi)`, one row a sample."""
    blocks = shallow.per_sample_gradients(parameters, tokens, query=query)
    return torch.cat([block.flatten(1) for block in blocks], dim=1)


def alignment(kernel: Float[Tensor, "n n"], targets: Float[Tensor, " n"]) -> float:
    r"""
    .. math:: \frac{y^\top H K H y}{\|H K H\|_F\, \|H y\|^2}, \qquad
        H = I - \tfrac1n \mathbf 1 \mathbf 1^\top,

    the centred alignment (CKA) of the kernel with its targets, between 0 and 1.
    """
    centred = targets - targets.mean()
    K = kernel - kernel.mean(dim=0, keepdim=True)
    K = K - K.mean(dim=1, keepdim=True)
    return float(centred @ K @ centred / (torch.linalg.matrix_norm(K) * centred.square().sum()))


def movements(
    initial: Parameters,
    final: Parameters,
    tokens: Float[Tensor, "n T d"],
    targets: Float[Tensor, " n"],
    query: Tensor,
) -> dict[str, float]:
    r"""How far a descent went, on a probe set, in float64.

    Features are the rows of the Jacobian J, the kernel is :math:`K = JJ^\top`, attention moves in
    total variation, and ``linearisation`` is :math:`\|f - f_{\mathrm{lin}}\|/\|f\|`.
    """
    start, end = (phi.to(dtype=torch.float64) for phi in (initial, final))
    X, y, q = (part.to(torch.float64) for part in (tokens, targets, query))
    before, after = (jacobian(phi, X, q) for phi in (start, end))
    K0, K = before @ before.mT, after @ after.mT
    norm = torch.linalg.norm
    attention = [attention_weights(logits(X, phi.W, q)) for phi in (start, end)]
    value = shallow.forward(end, X, query=q)
    tangent = shallow.forward(start, X, query=q)
    tangent = tangent + shallow.jvp(start, X, end.minus(start), query=q)
    return {
        "head_movement": head_movement(start, end),
        "feature_movement": float(norm(after - before) / norm(before)),
        "kernel_movement": float(norm(K - K0) / norm(K0)),
        "attention_movement": float((attention[1] - attention[0]).abs().sum(-1).mean() / 2),
        "linearisation": float(norm(value - tangent) / norm(value)),
        "alignment_initial": alignment(K0, y),
        "alignment_final": alignment(K, y),
    }
