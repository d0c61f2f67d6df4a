r"""Sequence length: training, gradients and tangent kernel as T grows from 4 to 4096.

For each length T, law of the tokens and kind of query, a student of m paired heads is trained on a
multi-anchor teacher, with the same step size and number of steps for every T. Recorded are the
loss, raw and over the variance of the targets; the gradients of the samples; the trace of the
softmax covariance; the tangent kernel of the student, what gradient descent of the tangent model
makes of it, and what a fit of one number does (:func:`one_number`).

All lengths of a seed have one teacher: its anchors have a length of their own, so that the target
is one function of sequences of any length. And the samples are coupled: a sequence of T tokens is
the end of a longer one, so that all lengths share last token and sequence mean, and each by itself
has the law it should have. Setting: arXiv 2601.16514 (v2); the design is ours. The bands come from
theory and were fixed before any run with these seeds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from attention_dynamics.data import generator
from attention_dynamics.experiments._nested_problem import (
    LAWS,
    NestedLaw,
    NestedProblem,
    QueryKind,
    nested_problem,
)
from attention_dynamics.experiments.estimates import (
    Band,
    Estimate,
    Profile,
    slope_estimate,
    slope_table,
)
from attention_dynamics.experiments.shape import columns_of, rows_of
from attention_dynamics.models import shallow
from attention_dynamics.models.attention import head_features
from attention_dynamics.models.parameters import Parameters, symmetric_initialisation
from attention_dynamics.models.shallow import ShallowTransformer
from attention_dynamics.theory.bounds import input_bounds, network_constants
from attention_dynamics.theory.kernel_flow import kernel_descent
from attention_dynamics.theory.kernels import empirical_kernel_total, spectrum
from attention_dynamics.theory.transport import TransportNorms
from attention_dynamics.training.descent import (
    DescentConfig,
    DescentResult,
    projected_gradient_descent,
)
from attention_dynamics.training.projection import Radii

NAME = "sequence_length"
SCHEMA = 1
AGAINST = "length"
SLOPE_FROM = 64  # the rates in 1/T are those of long sequences


@dataclass(frozen=True)
class Config:
    r"""Sizes of one cell; only ``length`` (T) has no default.

    ``query`` is ``"fixed"`` (one unit vector) or ``"last"`` (the last token); ``anchor_length`` is
    the number of tokens of an anchor of the teacher; ``step_scale`` is :math:`\eta\sqrt\tau`;
    ``transport_norm`` and ``projection_radius`` are :math:`\nu` and :math:`\rho`, the same for the
    three blocks.
    """

    length: int
    token_law: NestedLaw = "sequence_means"
    query: QueryKind = "fixed"
    samples: int = 1000
    heads: int = 64
    dimension: int = 8
    activation: str = "tanh"
    anchors: int = 16
    anchor_length: int = 16
    teacher_heads: int = 8192
    transport_norm: float = 3.0
    projection_radius: float = 3.0
    steps: int = 500
    step_scale: float = 1.75

    @property
    def case(self) -> str:
        """One of ``CASES``, the end of the name of every quantity."""
        return f"{self.token_law.removeprefix('sequence_')}_{self.query}"

    @property
    def step_size(self) -> float:
        r""":math:`\eta`, the same for every T."""
        return self.step_scale / math.sqrt(self.steps)


COLUMNS = columns_of(Config)
CASES = ("means_fixed", "means_last", "iid_fixed", "iid_last")
_LENGTHS = (4, 16, 64, 256, 1024, 4096)


def _configs(base: Config, fixed: tuple[int, ...], last: tuple[int, ...]) -> tuple[Config, ...]:
    lengths: dict[QueryKind, tuple[int, ...]] = {"fixed": fixed, "last": last}
    return tuple(
        replace(base, length=length, token_law=law, query=query)
        for query in lengths
        for law in LAWS
        for length in lengths[query]
    )


_SMOKE = Config(length=1, samples=16, heads=8, dimension=3, anchors=4, teacher_heads=128, steps=20)
_BOOK = Config(length=1, samples=40, heads=32, teacher_heads=512, steps=80)
PROFILES = {
    "smoke": Profile(_configs(_SMOKE, (4, 64, 256), (4, 64, 256)), seeds=(100, 101, 102)),
    "book": Profile(_configs(_BOOK, _LENGTHS, _LENGTHS[:-1]), seeds=tuple(range(8))),
    "paper": Profile(_configs(Config(length=1), _LENGTHS, _LENGTHS), seeds=tuple(range(10))),
}

_FREE = "the theorem contains no T; an exponent of 0.05 is a factor 1.4 in three decades"
_BOUNDED = "a gradient is at most G, which contains no T"
_AVERAGE = "samples differ by averages of T tokens"
_DIFFER = "samples differ at every length, up to 1/T"
BANDS = {
    "relative_loss_averaged_means_fixed": Band(None, 0.05, _FREE),
    "relative_loss_averaged_means_last": Band(None, 0.05, _FREE),
    "relative_loss_means_fixed": Band(None, 0.05, _FREE),
    "relative_loss_means_last": Band(None, 0.05, _FREE),
    **{f"gradient_{case}": Band(None, 0.05, _BOUNDED) for case in CASES},
    "relative_loss_means_fixed_late": Band(-0.05, 0.05, _DIFFER),
    "relative_loss_means_last_late": Band(-0.05, 0.05, _DIFFER),
    "relative_loss_iid_last_late": Band(None, 0.05, _FREE),
    "target_variance_means_fixed_late": Band(-0.1, 0.1, _DIFFER),
    "target_variance_iid_last_late": Band(-0.1, 0.1, _DIFFER),
    "target_variance_iid_fixed_late": Band(-1.15, -0.85, _AVERAGE),
    "loss_centred_iid_fixed_late": Band(-1.15, -0.85, "a share of the variance of the targets"),
    "top_means_fixed_late": Band(-0.1, 0.1, _DIFFER),
    "top_iid_last_late": Band(-0.1, 0.1, _DIFFER),
    "top_iid_fixed_late": Band(-1.15, -0.85, _AVERAGE),
    "beyond_iid_fixed_late": Band(-1.15, -0.85, "the tangent model learns one number, up to 1/T"),
}
r"""Log-log slopes over all T, or over T from ``SLOPE_FROM`` on where a name ends in ``_late``."""


def run(config: Config, seed: int, device: str = "cpu") -> pd.DataFrame:
    r"""Rows (quantity, value) of one length, law, query and seed; a pure function of these.

    Every name ends in the case. Raises ValueError if m is odd or another field is out of its range.
    """
    given, initial = problem(config, seed, device)
    result = descend(config, given, initial)
    quantities = {
        **_losses(config, given, result),
        **_gradients(config, given, result),
        **_kernel(config, given, result),
        **_traces(given, initial),
    }
    named = {f"{name}_{config.case}": value for name, value in quantities.items()}
    return rows_of(NAME, config, seed, named)


def estimate(frame: pd.DataFrame, quantity: str) -> Estimate:
    r"""The slope of a quantity against T with its interval, over the lengths its name speaks of."""
    name = quantity.removesuffix("_late")
    used = frame if name == quantity else frame[frame[AGAINST] >= SLOPE_FROM]
    return slope_estimate(used, name, AGAINST)


def summarise(frame: pd.DataFrame) -> pd.DataFrame:
    """Log-log slopes against the length, mean and 95 % t-interval over seeds, and their bands."""
    return slope_table(BANDS, lambda quantity: estimate(frame, quantity))


def problem(config: Config, seed: int, device: str = "cpu") -> tuple[NestedProblem, Parameters]:
    """Tokens, targets and query of one length; the student, which all lengths share."""
    given = nested_problem(
        NAME, seed, samples=config.samples, length=config.length, dimension=config.dimension,
        token_law=config.token_law, query=config.query, activation=config.activation,
        anchors=config.anchors, anchor_length=config.anchor_length,
        teacher_heads=config.teacher_heads, norms=_norms(config), device=device,
    )  # fmt: skip
    stream = generator(seed, NAME, "student")
    return given, symmetric_initialisation(
        config.heads, config.dimension, generator=stream, device=device
    )


def descend(config: Config, given: NestedProblem, initial: Parameters) -> DescentResult:
    r"""Projected gradient descent with :math:`\eta` and :math:`\tau` of the configuration."""
    descent = DescentConfig(
        steps=config.steps, step_size=config.step_size, radii=_radii(config),
        transport_norms=_norms(config),
    )  # fmt: skip
    model = ShallowTransformer(initial, query=given.query, activation=config.activation)
    return projected_gradient_descent(model, given.tokens, given.targets, descent)


def one_number(
    kernel: Float[Tensor, "n n"], targets: Float[Tensor, " n"], steps: int, step_size: float
) -> Float[Tensor, " n"]:
    r"""
    .. math:: g_j = \bigl(1 - (1 - 2\eta\bar\kappa)^k\bigr)\, \bar y\, \frac{\bar k_j}{\bar\kappa},
        \qquad \bar k_j = \frac1n \sum_l K_{jl}, \quad \bar\kappa = \frac1n \sum_j \bar k_j:

    k steps of gradient descent of the tangent model along the mean gradient alone, (n,) in
    float64. Of the targets it knows the mean. Derived in the chapter on sequence length.
    """
    rows = kernel.double().mean(dim=1)
    size = rows.mean()
    fitted = 1 - (1 - 2 * step_size * size) ** steps
    return fitted * targets.double().mean() * rows / size


def _losses(config: Config, given: NestedProblem, result: DescentResult) -> dict[str, float]:
    variance = _variance(given.targets)
    averaged = float((_output(config, given, result.averaged) - given.targets).square().mean())
    return {
        "target_variance": variance,
        "target_square": float(given.targets.double().square().mean()),
        "loss": result.best_loss,
        "loss_averaged": averaged,
        "relative_loss": result.best_loss / variance,
        "relative_loss_averaged": averaged / variance,
        "active_heads": float(result.history[[f"active_{b}" for b in "cUW"]].to_numpy().max()),
    }


def _gradients(config: Config, given: NestedProblem, result: DescentResult) -> dict[str, float]:
    squares = _tangent_kernel(config, given, result.final).diagonal()
    constants = network_constants(
        result.initial, _radii(config), activation=config.activation,
        inputs=input_bounds(given.tokens, given.query),
    )  # fmt: skip
    return {
        "gradient": float(squares.max().sqrt()),
        "gradient_rms": float(squares.mean().sqrt()),
        "gradient_bound": math.sqrt(constants.gradient_squared),
    }


def _kernel(config: Config, given: NestedProblem, result: DescentResult) -> dict[str, float]:
    y, variance = given.targets.double(), _variance(given.targets)
    K = _tangent_kernel(config, given, result.initial).double()
    centred = K - K.mean(dim=0) - K.mean(dim=1, keepdim=True) + K.mean()
    tangent = kernel_descent(K, y, config.steps, config.step_size)[-1]
    single = one_number(K, y, config.steps, config.step_size)
    trained = _output(config, given, result.final)
    return {
        "top": float(torch.linalg.eigvalsh(centred)[-1]) / len(y),
        "effective_rank": spectrum(K).effective_rank,
        "loss_centred": _variance(trained - y),
        "relative_centred": _variance(trained - y) / variance,
        "relative_centred_tangent": _variance(tangent - y) / variance,
        "relative_centred_one_number": _variance(single - y) / variance,
        "beyond": math.sqrt(_variance(tangent - single) / variance),
        "beyond_network": math.sqrt(_variance(trained - single) / variance),
    }


def _traces(given: NestedProblem, initial: Parameters) -> dict[str, float]:
    r""":math:`\mathrm{tr}\, M = \sum_t \alpha_t \|x_t\|^2 - \|\mu\|^2` over samples and heads.

    The squares travel as one more coordinate, which no query and no value direction sees.
    """
    heads = initial.half()
    squares = given.tokens.square().sum(dim=-1, keepdim=True)
    query = given.query if isinstance(given.query, str) else pad(given.query, (0, 1))
    pooled = head_features(
        torch.cat((given.tokens, squares), dim=-1), pad(heads.W, (0, 1, 0, 1)),
        pad(heads.U, (0, 1)), query,
    ).a  # fmt: skip
    traces = pooled[..., -1] - pooled[..., :-1].square().sum(dim=-1)
    return {"trace": float(traces.mean()), "trace_largest": float(traces.max())}


def _output(config: Config, given: NestedProblem, phi: Parameters) -> Tensor:
    values = shallow.forward(phi, given.tokens, query=given.query, activation=config.activation)
    return values.double()


def _tangent_kernel(config: Config, given: NestedProblem, phi: Parameters) -> Tensor:
    sigma = config.activation
    return empirical_kernel_total(phi, given.tokens, query=given.query, activation=sigma)


def _variance(values: Tensor) -> float:
    return float(values.double().var(correction=0))


def _norms(config: Config) -> TransportNorms:
    return TransportNorms(*(config.transport_norm,) * 3)


def _radii(config: Config) -> Radii:
    return Radii(*(config.projection_radius,) * 3)
