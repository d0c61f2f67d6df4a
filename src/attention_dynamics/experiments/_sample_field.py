r"""The error field of head averages on a list of samples, one block at a time.

:math:`e(X) = \frac1N \sum_{i \le N} z_i(X) - \bar z(X)`, the second mean over the teacher's heads,
at several N from one draw of heads; and a Gaussian field with the covariance of z. Only running
maxima and sums over samples are kept, so that the memory does not depend on their number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from attention_dynamics.data import Law, generator, query_vector, unit_ball_tokens
from attention_dynamics.models.parameters import Parameters, independent_initialisation
from attention_dynamics.theory.teacher import Teacher
from attention_dynamics.theory.transport import (
    MultiAnchorTransport,
    TransportNorms,
    head_contributions,
    random_multi_anchor,
)

BLOCK = 128  # samples that are drawn from one stream and held at once
_SCALE_SAMPLES = 512


@dataclass(frozen=True)
class FieldSetting:
    """What defines the field; ``pairs`` are the numbers N of heads, each twice the one before."""

    name: str
    case: str
    length: int
    dimension: int
    law: Law
    pairs: tuple[int, ...]
    replicas: int
    teacher_heads: int
    anchors: int
    activation: str
    transport_norm: float
    draws: int


class Problem(NamedTuple):
    r"""What all samples of a seed share; ``scale`` is :math:`\varsigma`."""

    query: Float[Tensor, " d"]
    transport: MultiAnchorTransport
    teacher: Teacher
    teacher_direction: Parameters
    heads: Parameters
    direction: Parameters
    weights: Float[Tensor, "M draws"]
    scale: float


class Running(NamedTuple):
    """Maxima and sums over samples: errors by N, one entry a network, and the Gaussian field."""

    largest: tuple[Float[Tensor, " networks"], ...]
    squares: tuple[float, ...]  # summed over samples, mean over networks
    gaussian: Float[Tensor, " draws"]
    field_sum: Float[Tensor, " draws"]
    field_squares: Float[Tensor, " draws"]

    def joined(self, other: Running) -> Running:
        """Both lists of samples, one after the other."""
        return Running(
            tuple(map(torch.maximum, self.largest, other.largest)),
            tuple(a + b for a, b in zip(self.squares, other.squares, strict=True)),
            torch.maximum(self.gaussian, other.gaussian),
            self.field_sum + other.field_sum,
            self.field_squares + other.field_squares,
        )

    def common_share(self, samples: int) -> float:
        """The part of the Gaussian field's mean square that is the same for all samples."""
        common = (self.field_sum / samples).square().mean()
        return float(common / (self.field_squares.mean() / samples))


@lru_cache(maxsize=2)
def problem_of(setting: FieldSetting, seed: int, device: str) -> Problem:
    """Query, transport map, teacher and heads of one seed."""
    d = setting.dimension
    query = query_vector(d, generator=_stream(setting, seed, "query")).to(device)
    transport = random_multi_anchor(
        setting.anchors, setting.length, d, generator=_stream(setting, seed, "anchors"),
        norms=TransportNorms(*(setting.transport_norm,) * 3), query=query,
        activation=setting.activation, law=setting.law, device=device,
    )  # fmt: skip
    teacher = Teacher(
        transport, generator=_stream(setting, seed, "teacher"), heads=setting.teacher_heads
    )
    heads = independent_initialisation(
        setting.replicas * setting.pairs[-1], d,
        generator=_stream(setting, seed, "heads"), device=device,
    )  # fmt: skip
    sizes = (setting.teacher_heads, setting.draws)
    weights = torch.randn(sizes, generator=_stream(setting, seed, "gaussian")).to(device)
    errors = teacher.standard_error(
        sample_tokens(setting, seed, device, 0, _SCALE_SAMPLES, role="scale")
    )
    scale = math.sqrt(setting.teacher_heads * float(errors.double().square().mean()))
    return Problem(
        query, transport, teacher, transport(teacher.parameters), heads, transport(heads),
        weights, scale,
    )  # fmt: skip


@lru_cache(maxsize=64)
def running(setting: FieldSetting, seed: int, device: str, samples: int) -> Running:
    """The first ``samples`` of the list; half of a power of two was often computed before."""
    half = 2 ** ((samples - 1).bit_length() - 1)
    if half < BLOCK:
        return _block(setting, seed, device, 0, samples)
    found = running(setting, seed, device, half)
    for start in range(half, samples, BLOCK):
        found = found.joined(_block(setting, seed, device, start, min(start + BLOCK, samples)))
    return found


def sample_tokens(
    setting: FieldSetting, seed: int, device: str, start: int, stop: int, *, role: str = "tokens"
) -> Float[Tensor, "n T d"]:
    """Samples start to stop of an endless list, whose blocks have a stream each."""
    first, last = start // BLOCK, (stop - 1) // BLOCK + 1
    blocks = [
        unit_ball_tokens(
            BLOCK, setting.length, setting.dimension, law=setting.law,
            generator=_stream(setting, seed, role, block), device=device,
        )
        for block in range(first, last)
    ]  # fmt: skip
    return torch.cat(blocks)[start - first * BLOCK : stop - first * BLOCK]


def _block(setting: FieldSetting, seed: int, device: str, start: int, stop: int) -> Running:
    problem = problem_of(setting, seed, device)
    X = sample_tokens(setting, seed, device, start, stop)
    z = head_contributions(
        X, problem.transport, problem.teacher.parameters, direction=problem.teacher_direction
    )
    target = z.mean(dim=1, keepdim=True)
    G = (z - target) @ problem.weights / math.sqrt(z.shape[1])
    heads = head_contributions(X, problem.transport, problem.heads, direction=problem.direction)
    means, have, largest, squares = heads - target, 1, [], []
    for N in setting.pairs:  # means over N heads from those over N/2
        means, have = means.unflatten(1, (-1, N // have)).mean(dim=-1), N
        largest.append(means.abs().amax(dim=0))
        squares.append(float(means.double().square().mean(dim=1).sum()))
    field = G.double()
    return Running(
        tuple(largest), tuple(squares), G.abs().amax(dim=0), field.sum(dim=0),
        field.square().sum(dim=0),
    )  # fmt: skip


def _stream(setting: FieldSetting, seed: int, role: str, *more: int) -> torch.Generator:
    return generator(seed, setting.name, setting.case, role, *more)
