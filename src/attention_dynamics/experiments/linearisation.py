r"""Linearisation: how far a network is from its tangent, by radius, by length and after training.

Three sweeps, told apart by ``axis``; ``size`` replaces the field of that name:

1. ``"radius"``: the adversarial and the random error against :math:`\rho`;
2. ``"length"``: the adversarial error against T;
3. ``"heads"``: the error at two points that matter to training, against m: the comparator
   :math:`\phi_0 + v/\sqrt m` and the trained network, and the distance between training and
   training of the tangent model.

The exponents in m of the adversarial and the random error are those of the experiment ``width``
and are not measured again. The bands come from theory and were fixed before any run at these
profiles: a second-order error is quadratic in the radius, no bound contains T, and at a symmetric
initialisation the second-order term vanishes along tangent directions, which leaves
:math:`m\,m^{-3/2}m^{-1/2}`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import pandas as pd
import torch
from torch import Tensor

from attention_dynamics.data import Law, generator, query_vector, unit_ball_tokens
from attention_dynamics.experiments.estimates import Band, Profile, slope_estimate, slope_table
from attention_dynamics.experiments.shape import columns_of, rows_of
from attention_dynamics.models import shallow
from attention_dynamics.models.parameters import Parameters, symmetric_initialisation
from attention_dynamics.models.shallow import ShallowTransformer
from attention_dynamics.theory.bounds import input_bounds, network_constants
from attention_dynamics.theory.kernels import empirical_kernel_total
from attention_dynamics.theory.linearisation import (
    adversarial_perturbation,
    linearisation_error,
    random_perturbation,
)
from attention_dynamics.theory.teacher import Teacher
from attention_dynamics.theory.transport import TransportNorms, random_multi_anchor
from attention_dynamics.training.descent import DescentConfig, projected_gradient_descent
from attention_dynamics.training.projection import Radii

NAME = "linearisation"
SCHEMA = 1
AGAINST = "size"
Axis = Literal["radius", "length", "heads"]


@dataclass(frozen=True)
class Config:
    r"""``size`` is the value of the field that ``axis`` names; that field itself is not read.

    ``radius`` is :math:`\rho`, ``transport_norm`` is :math:`\nu`, the same for the three blocks;
    ``steps`` and ``step_size`` (constant) are those of training.
    """

    axis: Axis
    size: float
    heads: int = 64
    length: int = 16
    radius: float = 3.0
    samples: int = 64
    dimension: int = 8
    token_law: Law = "sequence_means"
    activation: str = "tanh"
    anchors: int = 16
    teacher_heads: int = 8192
    transport_norm: float = 3.0
    steps: int = 400
    step_size: float = 0.5
    random_draws: int = 8
    adversary_candidates: int = 4
    adversary_starts: int = 8
    adversary_steps: int = 30

    @property
    def effective(self) -> Config:
        """The configuration with ``size`` in its place. Raises ValueError for another axis."""
        if self.axis not in ("radius", "length", "heads"):
            raise ValueError(f"axis must be 'radius', 'length' or 'heads', got {self.axis!r}")
        changes: dict[str, Any] = {
            self.axis: self.size if self.axis == "radius" else int(self.size)
        }
        return replace(self, **changes)


COLUMNS = columns_of(Config)
SMALL_RADIUS = 0.3
r"""Slopes against :math:`\rho` are taken up to here, where m = 64 heads move by at most 0.04."""

_RADII = (0.03, 0.1, 0.3, 1.0, 3.0)
_LENGTHS = (4, 16, 64, 256, 1024, 4096)
_WIDTHS = (32, 64, 128, 256, 512)
_LAWS: tuple[Law, ...] = ("sequence_means", "iid")


def _configs(base: Config, long: Config, widths: tuple[int, ...], lengths: tuple[int, ...],
             radii: tuple[float, ...]) -> tuple[Config, ...]:  # fmt: skip
    return (
        *(replace(base, axis="radius", size=radius) for radius in radii),
        *(
            replace(long, axis="length", size=float(length), token_law=law)
            for law in _LAWS
            for length in lengths
        ),
        *(replace(base, axis="heads", size=float(width)) for width in widths),
    )


_SMOKE = Config("heads", 4, heads=4, length=4, samples=6, dimension=3, anchors=4,
                teacher_heads=256, steps=10, random_draws=2, adversary_candidates=1,
                adversary_starts=2, adversary_steps=4)  # fmt: skip
_BOOK = Config("heads", 64, samples=40, teacher_heads=2048, steps=100, adversary_candidates=2,
               adversary_starts=4, adversary_steps=15)  # fmt: skip
_BOOK_LONG = replace(_BOOK, heads=16, samples=8, adversary_candidates=1, adversary_starts=2)
_FULL = Config("heads", 64, samples=500, steps=4000)
_FULL_LONG = replace(_FULL, samples=64)
PROFILES = {
    "smoke": Profile(_configs(_SMOKE, _SMOKE, (4, 8), (4, 16), (0.1, 0.3)), seeds=(0, 1, 2)),
    "book": Profile(_configs(_BOOK, _BOOK_LONG, _WIDTHS, _LENGTHS, _RADII), seeds=tuple(range(8))),
    "paper": Profile(
        _configs(_FULL, _FULL_LONG, _WIDTHS, _LENGTHS, _RADII), seeds=tuple(range(10))
    ),
}

_TAYLOR = "the error is of second order"
_CANCELS = "the second-order term cancels within pairs of heads"
BANDS = {
    "adversarial_by_radius": Band(1.85, 2.15, _TAYLOR),
    "random_by_radius": Band(1.85, 2.15, _TAYLOR),
    "adversarial_by_length": Band(-0.1, 0.1, "no bound contains the length"),
    "adversarial_by_length_iid": Band(-0.1, 0.1, "no bound contains the length"),
    "comparator_by_heads": Band(-1.15, -0.85, _CANCELS),
    "trained_by_heads": Band(-1.15, -0.85, _CANCELS),
    "training_gap_by_heads": Band(-1.15, -0.85, _CANCELS),
}


def run(config: Config, seed: int, device: str = "cpu") -> pd.DataFrame:
    """Rows (quantity, value) of one size and seed; a pure function of its arguments.

    Raises ValueError if m is odd or another field of the configuration is out of its range.
    """
    chosen = config.effective
    stream = generator(seed, NAME, config.axis, chosen.heads, "student")
    initial = symmetric_initialisation(
        chosen.heads, chosen.dimension, generator=stream, dtype=torch.float64, device=device
    )
    measured = _trained if config.axis == "heads" else _attacked
    quantities = measured(chosen, seed, initial)
    suffix = f"_by_{config.axis}" + ("_iid" if config.token_law == "iid" else "")
    return rows_of(NAME, config, seed, {f"{key}{suffix}": x for key, x in quantities.items()})


def summarise(frame: pd.DataFrame) -> pd.DataFrame:
    r"""Log-log slopes, mean and 95 % t-interval over seeds, beside their bands.

    Slopes against the radius use the radii up to :data:`SMALL_RADIUS`.
    """
    fitted = within_range(frame)
    return slope_table(BANDS, lambda quantity: slope_estimate(fitted, quantity, AGAINST))


def within_range(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows that the slopes are fitted to: all but those of the large radii."""
    return frame[(frame["axis"] != "radius") | (frame["size"] <= SMALL_RADIUS)]


def _inputs(config: Config, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    tokens = unit_ball_tokens(
        config.samples, config.length, config.dimension, law=config.token_law,
        generator=generator(seed, NAME, "tokens"), dtype=torch.float64, device=device,
    )  # fmt: skip
    query = query_vector(
        config.dimension, generator=generator(seed, NAME, "query"), dtype=torch.float64
    )
    return tokens, query.to(device)


def _attacked(config: Config, seed: int, initial: Parameters) -> dict[str, float]:
    tokens, query = _inputs(config, seed, initial.U.device)
    radii = Radii(*(config.radius,) * 3)
    worst = adversarial_perturbation(
        initial, radii, tokens, query=query, activation=config.activation,
        generator=generator(seed, NAME, "adversary"), candidates=config.adversary_candidates,
        starts=config.adversary_starts, steps=config.adversary_steps,
    )  # fmt: skip
    stream = generator(seed, NAME, "random")
    random = [
        linearisation_error(
            initial, random_perturbation(initial, radii, generator=stream), tokens,
            query=query, activation=config.activation,
        ).abs().max()
        for _ in range(config.random_draws)
    ]  # fmt: skip
    constants = network_constants(
        initial, radii, inputs=input_bounds(tokens, query), activation=config.activation
    )
    return {
        "adversarial": worst.error,
        "random": float(torch.stack(random).mean()),
        "bound": constants.linearisation_error,
    }


def _trained(config: Config, seed: int, initial: Parameters) -> dict[str, float]:
    tokens, query = _inputs(config, seed, initial.U.device)
    norms = TransportNorms(*(config.transport_norm,) * 3)
    transport = random_multi_anchor(
        config.anchors, config.length, config.dimension, norms=norms, query=query,
        generator=generator(seed, NAME, "anchors"), activation=config.activation,
        law=config.token_law, dtype=torch.float64, device=initial.U.device,
    )  # fmt: skip
    teacher = Teacher(
        transport, generator=generator(seed, NAME, "teacher"), heads=config.teacher_heads
    )
    targets = teacher(tokens)
    step = transport(initial).scaled(config.heads**-0.5)
    model = ShallowTransformer(initial, query=query, activation=config.activation)
    radii = Radii(*(config.radius,) * 3)
    descent = DescentConfig(steps=config.steps, step_size=config.step_size, radii=radii)
    result = projected_gradient_descent(model, tokens, targets, descent)
    common: dict[str, Any] = {"query": query, "activation": config.activation}

    def error(parameters: Parameters) -> float:
        return float(linearisation_error(initial, parameters, tokens, **common).abs().max())

    output = shallow.forward(result.final, tokens, **common)
    tangent = tangent_descent(
        empirical_kernel_total(initial, tokens, **common), targets, config.step_size, config.steps
    )
    last = result.history.iloc[-1]
    bound = network_constants(
        initial, radii, inputs=input_bounds(tokens, query), activation=config.activation
    ).linearisation_error
    return {
        "comparator": error(initial.plus(step)),
        "trained": error(result.final),
        "training_gap": float((output - tangent).square().mean().sqrt()),
        "bound": bound,
        "output_rms": float(output.square().mean().sqrt()),
        "target_rms": float(targets.square().mean().sqrt()),
        "loss": float((output - targets).square().mean()),
        "tangent_loss": float((tangent - targets).square().mean()),
        **{f"distance_{block}": float(last[f"distance_{block}"]) for block in "cUW"},
    }


def tangent_descent(kernel: Tensor, targets: Tensor, step_size: float, steps: int) -> Tensor:
    r""":math:`u_{k+1} = u_k - \tfrac{2\eta}n K (u_k - y)`, :math:`u_0 = 0`: outputs after k steps.

    Gradient descent of :math:`f_{\mathrm{lin}}` on the same loss, without a projection, read off
    in the outputs. ``kernel`` (n, n), ``targets`` (n,).
    """
    u = torch.zeros_like(targets)
    for _ in range(steps):
        u = u - (2 * step_size / targets.shape[0]) * (kernel @ (u - targets))
    return u
