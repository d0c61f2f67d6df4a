r"""Projected gradient descent (ProjGD, ProjSGD) with its averaged, best and final iterates."""

from __future__ import annotations

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
from attention_dynamics.training.tracking import Evaluation, History, KeptIterates, Monitor
from attention_dynamics.training.update import update_for
from attention_dynamics.validation import require_integer, require_number

_LOOK_EVERY = 64  # steps between two looks at the losses on an accelerator

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
    engine: str = "auto",
    progress: bool = False,
) -> DescentResult:
    r"""
    .. math:: \phi_{k+1} = \Pi_{\Omega_\rho}\bigl(\phi_k - \eta \nabla L_n(\phi_k)\bigr), \qquad
        L_n(\phi) = \frac1n \sum_j \bigl(f(X_j; \phi) - y_j\bigr)^2.

    ``tokens`` (n, T, d), ``targets`` (n,), ``mask`` (n, T) True = keep; ``validation`` is (tokens,
    targets) or (tokens, targets, mask). Everything is checked once, before the first step. The
    centre of :math:`\Omega_\rho` is the model as it comes in, and the model is left at the final
    iterate; ``engine`` computes losses and gradients; ``progress`` shows a tqdm bar.

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
    training = Objective.of(model, tokens, targets, mask, engine=engine)
    held = None if validation is None else _held(model, validation, engine)
    radii = Radii(None, None, None) if config.radii is None else config.radii
    if config.transport_norms is not None:
        _warn_small_radii(radii, config.transport_norms)
        _warn_long_tokens(training.tokens)
    initial = model.snapshot()
    batches = None if config.batch_size is None else _batches(training, config)

    window, limits = _window(initial), ProjectionSet(initial, radii).limits()
    update = update_for(initial, limits, config.eta, window + 2)
    kept = KeptIterates(update, window)
    history = History(update, config.steps // config.record_every + 2)
    monitor = Monitor(config, history, update.iterates)
    every_step = batches is None and held is None  # the monitored loss comes with the gradient
    for k in _steps(config, progress):
        slot, phi = kept.slot, kept.phi
        objective = training if batches is None else next(batches)
        step_loss, gradients = objective.loss_and_gradients(phi)
        loss = held_loss = None
        recorded = k == config.steps or k % config.record_every == 0
        if recorded or every_step:
            loss, whole = step_loss, gradients
            if batches is not None:
                loss, whole = training.loss_and_gradients(phi)
            if held is not None:
                held_loss = held.loss(phi)
            if recorded or config.patience is not None:
                update.measure(slot, whole)
        noted = monitor.note(Evaluation(k, slot, recorded, step_loss, loss, held_loss))
        if noted == window or k == config.steps:
            end = monitor.look()
            if end is not None or k == config.steps:
                break
            kept.settle(monitor.best_slot)
        kept.advance(gradients)

    kept.settle(monitor.best_slot, end=slot if end is None else end.slot)
    final = kept.phi.clone()
    model.load(final)
    return DescentResult(
        initial=initial,
        final=final,
        averaged=kept.mean(),
        best=update.iterates[monitor.best_slot].clone(),
        best_step=monitor.best.step,
        best_loss=monitor.best.loss,
        steps_taken=kept.steps_taken,
        stopped_early=end is not None,
        step_size=config.eta,
        history=history.frame(),
    )


def _window(parameters: Parameters) -> int:
    """Iterates between two looks at the losses: one on the CPU, where looking costs nothing.

    On an accelerator a look waits for all work before it, and the iterates since the last one are
    kept, in up to 2^26 numbers.
    """
    if parameters.U.device.type == "cpu":
        return 1
    return max(1, min(_LOOK_EVERY, 2**26 // sum(block.numel() for block in parameters)))


def _steps(config: DescentConfig, progress: bool) -> Iterable[int]:
    """Yield 0..steps: the iterate with number ``steps`` is evaluated and not stepped from."""
    numbers = range(config.steps + 1)
    if not progress:
        return numbers
    from tqdm.auto import tqdm

    return tqdm(numbers, desc="projected gradient descent", unit="step")


def _batches(training: Objective, config: DescentConfig) -> Iterator[Objective]:
    """Batches drawn with replacement; those of many steps are gathered at once, then sliced."""
    assert config.batch_size is not None
    stream = named_generator(config.seed, "projected gradient descent", "batches")
    samples, device, size = training.targets.shape[0], training.targets.device, config.batch_size
    together = max(1, min(config.steps, 64, 2**18 // (size * training.tokens[0].numel())))
    while True:
        index = torch.randint(samples, (together * size,), generator=stream, device="cpu")
        drawn = training.rows(index.to(device))
        for start in range(0, together * size, size):
            yield drawn.rows(slice(start, start + size))


def _held(model: ShallowTransformer, validation: Held | HeldMasked, engine: str) -> Objective:
    if not isinstance(validation, tuple | list) or len(validation) not in (2, 3):
        raise TypeError(
            "validation: expected (tokens, targets) or (tokens, targets, mask), got "
            f"{type(validation).__name__}"
            + (f" of {len(validation)}" if isinstance(validation, tuple | list) else "")
        )
    return Objective.of(model, *validation, name="validation", engine=engine)


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
