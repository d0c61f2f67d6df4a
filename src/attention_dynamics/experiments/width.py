r"""Width: approximation, linearisation and training errors of m heads against a teacher.

For each width m and seed, with tokens, query and teacher shared by all widths of a seed:

1. a student of m paired heads, trained by projected gradient descent on the teacher's values;
2. the error of the transported function of the student's heads at initialisation, and of as many
   unpaired heads;
3. the linearisation error on the projection set, in an adversarial and in a random direction;
4. for comparison, a student of m unpaired heads, which starts from a random function in place of 0.

Setting: arXiv 2601.16514 (v2), whose sizes are the ``paper`` profile. The bands come from theory
and were fixed before any run; the ``book`` profile was cut in samples and steps for time only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from attention_dynamics.data import Law, generator
from attention_dynamics.experiments._teacher_problem import TeacherProblem, teacher_problem
from attention_dynamics.experiments.estimates import (
    Band,
    Estimate,
    Profile,
    band_table,
    geometric_interval,
    select,
    slope_estimate,
    slope_table,
)
from attention_dynamics.experiments.shape import columns_of, rows_of
from attention_dynamics.models import shallow
from attention_dynamics.models.parameters import (
    Parameters,
    independent_initialisation,
    symmetric_initialisation,
)
from attention_dynamics.models.shallow import ShallowTransformer
from attention_dynamics.theory.approximation import approximation_bound
from attention_dynamics.theory.bounds import input_bounds, network_constants
from attention_dynamics.theory.linearisation import (
    adversarial_perturbation,
    linearisation_error,
    random_perturbation,
)
from attention_dynamics.theory.transport import (
    TransportNorms,
    approximation_error,
)
from attention_dynamics.training.descent import (
    DescentConfig,
    DescentResult,
    projected_gradient_descent,
)
from attention_dynamics.training.projection import Radii

NAME = "width"
SCHEMA = 2
AGAINST = "heads"


@dataclass(frozen=True)
class Config:
    r"""The sizes of arXiv 2601.16514; only ``heads`` (m) has no default.

    ``query`` is ``"fixed"`` (one unit vector, as in the theory) or ``"last"`` (the last token, as
    in the paper's experiments). ``step_scale`` is :math:`\eta\sqrt\tau`; ``transport_norm`` and
    ``projection_radius`` are :math:`\nu` and :math:`\rho`, the same for the three blocks. The last
    ``validation_fraction`` of the ``samples`` is held out; all errors are over the others.
    """

    heads: int
    samples: int = 5000
    validation_fraction: float = 0.2
    length: int = 16
    dimension: int = 8
    token_law: Law = "iid"
    query: Literal["fixed", "last"] = "fixed"
    activation: str = "tanh"
    anchors: int = 16
    teacher_heads: int = 8192
    transport_norm: float = 3.0
    projection_radius: float = 3.0
    steps: int = 4000
    step_scale: float = 1.75
    random_draws: int = 8
    adversary_starts: int = 8
    adversary_steps: int = 30


COLUMNS = columns_of(Config)
_WIDTHS = (8, 16, 32, 64, 128, 256)
_SMOKE = Config(heads=2, samples=40, length=4, dimension=3, teacher_heads=256, anchors=4, steps=30,
                random_draws=2, adversary_starts=2, adversary_steps=5)  # fmt: skip
_BOOK = Config(heads=2, samples=250, steps=150, adversary_starts=4, adversary_steps=15)
PROFILES = {
    "smoke": Profile(tuple(replace(_SMOKE, heads=m) for m in (4, 8, 16)), seeds=(0, 1, 2)),
    "book": Profile(tuple(replace(_BOOK, heads=m) for m in _WIDTHS), seeds=tuple(range(10))),
    "paper": Profile(tuple(Config(heads=m) for m in _WIDTHS), seeds=tuple(range(10))),
}

_CLT = "a mean over m/2 independent pairs"
BANDS = {
    "approximation_sup": Band(-0.6, -0.4, _CLT),
    "approximation_rms": Band(-0.6, -0.4, _CLT),
    "linearisation_adversarial": Band(-0.6, -0.4, "all heads err with one sign"),
    "linearisation_random": Band(-1.15, -0.85, "signs cancel over independent heads"),
    "training_loss_minimum": Band(None, 0.0, "more heads help; no exponent is predicted"),
}
#: The smallest loss of unpaired heads over that of as many paired ones, a mean over widths.
UNPAIRED = "unpaired_over_paired"
UNPAIRED_BAND = Band(
    1.0, None, "a random function that is larger than the target is unlearned first"
)
CONFIDENCE_DELTA = 0.05  # delta and delta' of the bounds that are put beside the errors


def run(config: Config, seed: int, device: str = "cpu") -> pd.DataFrame:
    r"""Rows (quantity, value) of one width and seed; a pure function of its arguments.

    Raises ValueError if m is odd or another field of the configuration is out of its range.
    """
    problem = _problem(config, seed, device)
    sizes = (config.heads, config.dimension)
    initial = symmetric_initialisation(
        *sizes, generator=_stream(seed, "student", config), device=device
    )
    unpaired = independent_initialisation(
        *sizes, generator=_stream(seed, "unpaired", config), device=device
    )
    quantities = {
        "target_variance": float(problem.targets.var(correction=0)),
        "teacher_standard_error": float(problem.standard_error.square().mean().sqrt()),
        **_training(config, problem, initial),
        **_ablation(config, problem, unpaired),
        **_approximation(config, problem, initial, unpaired),
        **_linearisation(config, seed, problem, initial),
    }
    return rows_of(NAME, config, seed, quantities)


def summarise(frame: pd.DataFrame) -> pd.DataFrame:
    """Log-log slopes against the width, mean and 95 % t-interval over seeds, beside their bands;
    last the ratio of the losses of unpaired and paired heads.
    """
    slopes = slope_table(BANDS, lambda quantity: slope_estimate(frame, quantity, AGAINST))
    ratio = band_table(
        {UNPAIRED: UNPAIRED_BAND}, lambda _: unpaired_over_paired(frame), column="slope"
    )
    return pd.concat([slopes, ratio], ignore_index=True)


def unpaired_over_paired(frame: pd.DataFrame) -> Estimate:
    r""":math:`\min_k L_n` from unpaired over that from paired heads: the geometric mean over the
    widths of a seed, and its interval over seeds.
    """
    logarithms = [
        np.log(
            select(frame, f"training_loss_minimum{suffix}").set_index([AGAINST, "seed"])["value"]
        )
        for suffix in ("_unpaired", "")
    ]
    per_seed = (logarithms[0] - logarithms[1]).groupby("seed").mean()
    return geometric_interval(np.exp(per_seed))


def _problem(config: Config, seed: int, device: str) -> TeacherProblem:
    """What all widths of a seed share."""
    return teacher_problem(
        NAME, seed, samples=config.samples, validation_fraction=config.validation_fraction,
        length=config.length, dimension=config.dimension, token_law=config.token_law,
        query=config.query, activation=config.activation, anchors=config.anchors,
        teacher_heads=config.teacher_heads, norms=_norms(config), device=device,
    )  # fmt: skip


def _training(config: Config, problem: TeacherProblem, initial: Parameters) -> dict[str, float]:
    result = _descend(config, problem, initial)

    def loss(parameters: Parameters, tokens: Tensor, targets: Tensor) -> float:
        return float(
            shallow.loss(
                parameters, tokens, targets, query=problem.query, activation=config.activation
            )
        )

    history = result.history
    losses = {
        "training_loss_minimum": result.best_loss,
        "training_loss_final": float(history["loss"].iloc[-1]),
        "training_loss_averaged": loss(result.averaged, problem.tokens, problem.targets),
    }
    variance = float(problem.targets.var(correction=0))
    relative = {f"{name}_relative": value / variance for name, value in losses.items()}
    distances = {f"distance_{b}": float(history[f"distance_{b}"].max()) for b in "cUW"}
    active = int(history[[f"active_{b}" for b in "cUW"]].to_numpy().max())
    held = loss(result.final, problem.held_tokens, problem.held_targets)
    others = {"validation_loss_final": held, "active_heads": active}
    return {**losses, **relative, **others, **distances}


def _ablation(config: Config, problem: TeacherProblem, unpaired: Parameters) -> dict[str, float]:
    losses = _descend(config, problem, unpaired).history["loss"]
    return {
        "training_loss_initial_unpaired": float(losses.iloc[0]),
        "training_loss_minimum_unpaired": float(losses.min()),
    }


def _descend(config: Config, problem: TeacherProblem, initial: Parameters) -> DescentResult:
    model = ShallowTransformer(initial, query=problem.query, activation=config.activation)
    descent = DescentConfig(
        steps=config.steps,
        step_size=config.step_scale / math.sqrt(config.steps),
        radii=_radii(config),
        transport_norms=_norms(config),
    )
    return projected_gradient_descent(model, problem.tokens, problem.targets, descent)


def _approximation(
    config: Config, problem: TeacherProblem, initial: Parameters, unpaired: Parameters
) -> dict[str, float]:
    found = {}
    for suffix, heads in (("", initial), ("_unpaired", unpaired)):
        error = approximation_error(problem.targets, problem.transport, heads, problem.tokens)
        found[f"approximation_sup{suffix}"] = error.sup
        found[f"approximation_rms{suffix}"] = error.rms
    bound = approximation_bound(
        _norms(config), config.heads, config.dimension,
        delta=CONFIDENCE_DELTA, delta_prime=CONFIDENCE_DELTA, samples=len(problem.tokens),
        activation=config.activation, inputs=input_bounds(problem.tokens, problem.query),
    )  # fmt: skip
    assert bound.sup is not None  # the number of samples was given
    return {**found, "approximation_sup_bound": bound.sup, "approximation_rms_bound": bound.rms}


def _linearisation(
    config: Config, seed: int, problem: TeacherProblem, initial: Parameters
) -> dict[str, float]:
    radii, tokens = _radii(config), problem.tokens

    def errors(parameters: Parameters) -> Tensor:
        return linearisation_error(
            initial, parameters, tokens, query=problem.query, activation=config.activation
        ).abs()

    adversarial = errors(
        adversarial_perturbation(
            initial, radii, tokens, query=problem.query, activation=config.activation,
            generator=_stream(seed, "adversary", config),
            starts=config.adversary_starts, steps=config.adversary_steps,
        ).parameters
    )  # fmt: skip
    stream = _stream(seed, "random", config)
    random = torch.stack(
        [
            errors(random_perturbation(initial, radii, generator=stream))
            for _ in range(config.random_draws)
        ]
    )
    constants = network_constants(
        initial, radii, activation=config.activation, inputs=input_bounds(tokens, problem.query)
    )
    return {
        "linearisation_adversarial": float(adversarial.max()),
        "linearisation_adversarial_mean": float(adversarial.mean()),
        "linearisation_random": float(random.amax(dim=1).mean()),
        "linearisation_random_mean": float(random.mean()),
        "linearisation_bound": constants.linearisation_error,
    }


def _stream(seed: int, role: str, config: Config) -> torch.Generator:
    return generator(seed, NAME, role, config.heads)


def _norms(config: Config) -> TransportNorms:
    return TransportNorms(*(config.transport_norm,) * 3)


def _radii(config: Config) -> Radii:
    return Radii(*(config.projection_radius,) * 3)
