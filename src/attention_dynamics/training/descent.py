r"""Projected gradient descent (ProjGD, ProjSGD) with its averaged, best and final iterates."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attention_dynamics.data.streams import generator as named_generator
from attention_dynamics.models.parameters import Parameters
from attention_dynamics.models.shallow import ShallowTransformer
from attention_dynamics.training.objective import Objective
from attention_dynamics.training.projection import ProjectionSet, Radii, require_radii
from attention_dynamics.training.tracking import BestIterate, History, RunningAverage
from attention_dynamics.validation import require_integer, require_number

Held = tuple[Float[Tensor, "n T d"], Float[Tensor, " n"]]
HeldMasked = tuple[Float[Tensor, "n T d"], Float[Tensor, " n"], Bool[Tensor, "n T"]]


class BlockSizes(Protocol):
    r""":math:`(\nu_c, \nu_u, \nu_w)`: anything with one number a block, such as TransportNorms."""

    @property
    def c(self) -> float: ...
    @property
    def U(self) -> float: ...
    @property
    def W(self) -> float: ...


@dataclass(frozen=True)
class DescentConfig:
    r"""
    .. math:: \phi_{k+1} = \Pi_{\Omega_\rho}\bigl(\phi_k - \eta\, g_k\bigr), \quad
        k = 0..\tau - 1, \qquad \eta = 1/\sqrt\tau \text{ unless given.}

    - ``steps``: :math:`\tau`; ``step_size``: :math:`\eta`, None for :math:`1/\sqrt\tau`;
    - ``radii``: :math:`\rho`, None for no projection at all;
    - ``batch_size``: None for ProjGD, :math:`g_k = \nabla L_n(\phi_k)`; a number for ProjSGD,
      :math:`g_k` the gradient over that many samples drawn uniformly *with replacement*, so that
      :math:`\mathbb E[g_k \mid \phi_k] = \nabla L_n(\phi_k)`; ``seed`` fixes the draws;
    - ``transport_norms``: :math:`\nu` of the target; training warns where :math:`\rho < \nu`;
    - ``patience``: stop after this many steps without an improvement of the monitored loss by more
      than the fraction ``relative_improvement`` of its value; None never stops;
    - ``record_every``: steps between two rows of the history.

    Raises ValueError naming the field when a value is out of its range, TypeError when it is of
    another type.
    """

    steps: int
    step_size: float | None = None
    radii: Radii | None = None
    batch_size: int | None = None
    seed: int = 0
    transport_norms: BlockSizes | None = None
    patience: int | None = None
    relative_improvement: float = 1e-4
    record_every: int = 1

    def __post_init__(self) -> None:
        require_integer("steps", self.steps, minimum=1, remedy="one step is the least one can take")
        require_integer("record_every", self.record_every, minimum=1)
        for name in ("batch_size", "patience"):
            value = getattr(self, name)
            if value is not None:
                require_integer(name, value, minimum=1, remedy="pass None to switch it off")
        if self.radii is not None:
            require_radii(self.radii)
        if self.step_size is not None:
            require_number(
                "step_size", self.step_size, positive=True, remedy="pass None for 1/sqrt(steps)"
            )
        if not 0.0 <= self.relative_improvement < 1.0:
            raise ValueError(
                f"relative_improvement: expected a fraction in [0, 1), got "
                f"{self.relative_improvement}; 1e-4 asks for an improvement of 0.01 %"
            )

    @property
    def eta(self) -> float:
        r""":math:`\eta`: the given step size, or :math:`1/\sqrt\tau`."""
        return self.steps**-0.5 if self.step_size is None else self.step_size


@dataclass(frozen=True)
class DescentResult:
    r"""
    .. math:: \phi_0,\quad \phi_\tau,\quad \bar\phi = \frac1\tau \sum_{k<\tau} \phi_k,
        \quad \phi_{k^\star}, \qquad k^\star = \text{best\_step}.

    ``initial``, ``final``, ``averaged`` and ``best`` are :class:`Parameters`; :math:`\tau` is the
    number of steps taken. ``best`` has the smallest monitored loss (validation loss if there is a
    validation set, training loss otherwise) of all iterates at which that loss was evaluated, step
    0 and the final one among them; ``best_step`` is its number, ``best_loss`` its value.

    ``history`` has one row for each recorded iterate: ``step``, ``loss`` (training),
    ``validation_loss`` (NaN without a validation set), ``gradient_c/U/W`` (norms of the blocks of
    :math:`\nabla L_n`), ``distance_c/U/W`` (:math:`\sqrt m \max_i \|\phi_i - \phi_{0,i}\|`, to
    be compared with :math:`\rho`) and ``active_c/U/W`` (heads that the step to this iterate took
    out of their ball and the projection brought back).
    """

    initial: Parameters
    final: Parameters
    averaged: Parameters
    best: Parameters
    best_step: int
    best_loss: float
    steps_taken: int
    stopped_early: bool
    step_size: float
    history: pd.DataFrame


def projected_gradient_descent(
    model: ShallowTransformer,
    tokens: Float[Tensor, "n T d"],
    targets: Float[Tensor, " n"],
    config: DescentConfig,
    *,
    validation: Held | HeldMasked | None = None,
    mask: Bool[Tensor, "n T"] | None = None,
    progress: bool = False,
) -> DescentResult:
    r"""
    .. math:: \phi_{k+1} = \Pi_{\Omega_\rho}\bigl(\phi_k - \eta \nabla L_n(\phi_k)\bigr), \qquad
        L_n(\phi) = \frac1n \sum_j \bigl(f(X_j; \phi) - y_j\bigr)^2.

    ``tokens`` (n, T, d), ``targets`` (n,), ``mask`` (n, T) True = keep; ``validation`` is (tokens,
    targets) or (tokens, targets, mask). Everything is checked once, before the first step. The
    centre of :math:`\Omega_\rho` is the model as it comes in, and the model is left at the final
    iterate; ``progress`` shows a tqdm bar.

    With a validation set, and for ProjSGD, the monitored loss is evaluated at recorded steps only;
    for ProjGD without one it comes with each gradient, hence at every step. For ProjSGD ``loss``
    and ``gradient_*`` of the history are those of the whole training set, so a row costs a pass:
    raise ``record_every``.

    Tokens may have any norm: the descent needs none. The theory does, so with ``transport_norms``
    it warns (UserWarning) when a radius is below the transport norm of its block or a token is
    longer than 1. Raises ValueError
    or TypeError for wrong shapes, dtypes, NaN or infinity, FloatingPointError when the loss stops
    being finite; the model is then as it came in. Source: arXiv 2601.16514, ProjGD and ProjSGD.
    """
    training = Objective.of(model, tokens, targets, mask)
    held = None if validation is None else _held(model, validation)
    radii = Radii(None, None, None) if config.radii is None else config.radii
    if config.transport_norms is not None:
        _warn_small_radii(radii, config.transport_norms)
        _warn_long_tokens(training.tokens)
    initial = model.snapshot()
    region = ProjectionSet(initial, radii)
    batches = None if config.batch_size is None else _batches(training, config)

    every_step = batches is None and held is None  # the monitored loss comes with the gradient
    history, average = History(region), RunningAverage(initial)
    best = BestIterate(config.patience, config.relative_improvement)
    phi, moved, stopped = initial, initial.minus(initial).block_norms(), False
    for k in _steps(config, progress):
        objective = training if batches is None else next(batches)
        loss, gradients = objective.loss_and_gradients(phi)
        value = _finite(loss, "loss", k, config)
        recorded = k == config.steps or k % config.record_every == 0
        if recorded or every_step:
            row_gradients = gradients
            if batches is not None:
                loss, row_gradients = training.loss_and_gradients(phi)
                value = _finite(loss, "loss", k, config)
            held_value = None
            if held is not None:
                held_value = _finite(held.loss(phi), "validation loss", k, config)
            best.update(k, value if held_value is None else held_value, phi)
            stopped = best.exhausted and k < config.steps
            if recorded or stopped:
                history.record(k, value, held_value, row_gradients, moved)
        if k == config.steps or stopped:
            break
        average.add(phi)
        candidate = phi.zip(gradients, lambda p, g: torch.sub(p, g, alpha=config.eta))
        phi, moved = region.project_with_norms(candidate)

    model.load(phi)
    assert best.parameters is not None  # step 0 is always evaluated
    return DescentResult(
        initial=initial,
        final=phi,
        averaged=average.mean(),
        best=best.parameters,
        best_step=best.step,
        best_loss=best.loss,
        steps_taken=k,
        stopped_early=stopped,
        step_size=config.eta,
        history=history.frame(),
    )


def _steps(config: DescentConfig, progress: bool) -> Iterable[int]:
    """Yield 0..steps: the iterate with number ``steps`` is evaluated and not stepped from."""
    numbers = range(config.steps + 1)
    if not progress:
        return numbers
    from tqdm.auto import tqdm

    return tqdm(numbers, desc="projected gradient descent", unit="step")


def _batches(training: Objective, config: DescentConfig) -> Iterator[Objective]:
    stream = named_generator(config.seed, "projected gradient descent", "batches")
    samples, device = training.targets.shape[0], training.targets.device
    while True:
        index = torch.randint(samples, (config.batch_size,), generator=stream)  # type: ignore[arg-type]
        yield training.rows(index.to(device))


def _held(model: ShallowTransformer, validation: Held | HeldMasked) -> Objective:
    if not isinstance(validation, tuple | list) or len(validation) not in (2, 3):
        raise TypeError(
            "validation: expected (tokens, targets) or (tokens, targets, mask), got "
            f"{type(validation).__name__}"
            + (f" of {len(validation)}" if isinstance(validation, tuple | list) else "")
        )
    return Objective.of(model, *validation, name="validation")


def _finite(loss: Tensor, name: str, step: int, config: DescentConfig) -> float:
    value = float(loss)
    if not math.isfinite(value):
        remedy = (
            "the descent diverged: reduce step_size, or bound the parameters with radii"
            if step
            else "it overflows before the first step: rescale the targets, or use float64"
        )
        raise FloatingPointError(
            f"{name}: {value} at step {step} with step_size = {config.eta:.4g}; {remedy}"
        )
    return value


def _warn_long_tokens(tokens: Tensor) -> None:
    longest = float(torch.linalg.vector_norm(tokens, dim=-1, dtype=torch.float64).max())
    if longest > 1 + 8 * torch.finfo(tokens.dtype).eps:
        warnings.warn(
            f"tokens: norms reach {longest:.6g}, and the convergence bound for transport_norms is "
            "stated for norms <= 1; divide the tokens with rescale_tokens, or take the constants "
            "for a larger ball, input_bounds(tokens, query, token_bound=b)",
            UserWarning,
            stacklevel=3,
        )


def _warn_small_radii(radii: Radii, norms: BlockSizes) -> None:
    for block in ("c", "U", "W"):
        radius, norm = getattr(radii, block), getattr(norms, block)
        if radius is not None and radius < norm:
            warnings.warn(
                f"radii.{block} = {radius:g} is below transport_norms.{block} = {norm:g}: the "
                f"target may lie outside of the projection set and the convergence bound does not "
                f"apply; raise radii.{block} to at least {norm:g}, or pass None to leave it free",
                UserWarning,
                stacklevel=3,
            )
