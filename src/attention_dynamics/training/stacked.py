r"""S descents as one: seeds, or widths padded to the largest, advance together on an accelerator.

A step of one small model leaves a GPU idle; S of them are one launch of the Triton kernels. On a
CPU stacking brings nothing, measured, and the descents run one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attention_dynamics.models._pass import Inputs, Query, prepare
from attention_dynamics.models.activations import Activation, get_activation
from attention_dynamics.models.engines import selection, triton_launch
from attention_dynamics.models.parameters import Parameters
from attention_dynamics.models.shallow import ShallowTransformer
from attention_dynamics.training.descent import (
    DescentConfig,
    DescentResult,
    projected_gradient_descent,
)
from attention_dynamics.training.objective import Objective
from attention_dynamics.training.projection import Radii
from attention_dynamics.training.stacked_state import StackedState
from attention_dynamics.validation import require_floating, require_shape


class StackedParameters(NamedTuple):
    """Parameters c (S, M), U (S, M, d), W (S, M, d, d), and how many heads each model has.

    M is the largest number of heads, or one more. A padded head is 0 in c, U and W: it adds
    exactly 0 to f. The two halves of an even model lie in the two halves of M, so that heads
    i and i + m/2 of the symmetric initialisation remain partners.
    """

    parameters: Parameters
    heads: tuple[int, ...]

    def unstack(self) -> list[Parameters]:
        """The S parameters without their padding."""
        return [
            Parameters(*(block[s, rows.to(block.device)] for block in self.parameters))
            for s, rows in enumerate(_rows(self.heads))
        ]


def stack(models: Sequence[Parameters]) -> StackedParameters:
    r""":math:`(\phi_1, \dots, \phi_S)`, padded with heads of coefficient 0 to one width.

    Raises ValueError for an empty sequence, or for unequal d, dtypes or devices.
    """
    if not models:
        raise ValueError("models: expected at least one, got none")
    first = models[0].U
    for s, model in enumerate(models):
        if (model.dimension, model.dtype, model.U.device) != (
            first.shape[1], first.dtype, first.device
        ):  # fmt: skip
            raise ValueError(
                f"models[{s}]: expected d = {first.shape[1]}, {first.dtype} on {first.device} as "
                f"in models[0], got d = {model.dimension}, {model.dtype} on {model.U.device}; "
                "stack models of one dimension, dtype and device"
            )
    heads = tuple(model.heads for model in models)
    width = _width(heads)
    blocks = []
    for columns in zip(*models, strict=True):
        block = columns[0].new_zeros((len(models), width, *columns[0].shape[1:]))
        for s, (rows, column) in enumerate(zip(_rows(heads), columns, strict=True)):
            block[s, rows.to(block.device)] = column.detach()
        blocks.append(block)
    return StackedParameters(Parameters(*blocks), heads)


def stacked_loss_and_gradients(
    stacked: StackedParameters,
    tokens: Float[Tensor, "*S n T d"],
    targets: Float[Tensor, "S n"],
    *,
    query: Query | Sequence[Query],
    activation: str | Activation = "tanh",
    scale: float | Sequence[float] = 1.0,
    mask: Bool[Tensor, "*S n T"] | None = None,
    engine: str = "auto",
) -> tuple[Float[Tensor, " S"], StackedParameters]:
    r"""
    .. math:: L_n(\phi_s) = \frac1n \sum_j (f(X_{sj}; \phi_s) - y_{sj})^2, \qquad
        \nabla L_n(\phi_s), \qquad s = 1..S.

    ``tokens`` (S, n, T, d), or (n, T, d) if all models share them, and ``mask`` likewise; ``query``
    and ``scale`` are one for all or one a model. Returns the losses (S,) and the stacked gradients,
    0 in padded heads. Raises what :func:`~attention_dynamics.models.shallow.loss_and_gradients`
    raises.
    """
    count = len(stacked.heads)
    require_shape("targets", targets, ("S", "n"), {"S": count})
    queries = [query] * count if isinstance(query, str | Tensor) else list(query)
    scales = [scale] * count if isinstance(scale, int | float) else list(scale)
    inputs = [
        prepare(_own(tokens, 3, s), queries[s], None if mask is None else _own(mask, 2, s),
                dimension=stacked.parameters.dimension)
        for s in range(count)
    ]  # fmt: skip
    problems = _Problems(
        inputs, targets.to(inputs[0].tokens.dtype), get_activation(activation), scales,
        stacked.heads, _shared(tokens, mask), engine,
    )  # fmt: skip
    require_floating("stacked", stacked.parameters.U, problems.targets.dtype)
    phi = stacked.parameters.to(dtype=problems.targets.dtype)
    losses, gradients = problems.loss_and_gradients(phi)
    return losses, StackedParameters(gradients, stacked.heads)


def stacked_projected_gradient_descent(
    models: Sequence[ShallowTransformer],
    tokens: Float[Tensor, "*S n T d"],
    targets: Float[Tensor, "*S n"],
    config: DescentConfig,
    *,
    radii: Sequence[Radii] | None = None,
    mask: Bool[Tensor, "*S n T"] | None = None,
    engine: str = "auto",
    together: bool | None = None,
) -> list[DescentResult]:
    r"""
    .. math:: \phi^s_{k+1} = \Pi_{\Omega_{\rho_s}}\bigl(\phi^s_k - \eta \nabla L^s_n(\phi^s_k)
        \bigr), \qquad s = 1..S.

    What S calls of :func:`~attention_dynamics.training.descent.projected_gradient_descent` return,
    up to rounding. Tokens, targets and mask have a first axis S unless all models share them;
    ``radii`` are :math:`\rho_s`, else those of ``config``, over the root of each model's own m.
    ``together`` steps all models at once; None decides by the device. Losses and histories stay
    on the device until the end, but for a look every 256 steps whether all is finite.

    Raises ValueError for models of unequal d, activation, dtype or device, and for a configuration
    with ``batch_size`` or ``patience``, which would part the descents; else as the single descent.
    """
    if config.batch_size is not None or config.patience is not None:
        raise ValueError(
            f"config: expected batch_size and patience to be None, got {config.batch_size} and "
            f"{config.patience}; they part the descents: run projected_gradient_descent one by one"
        )
    count = len(models)
    start = stack([model.snapshot() for model in models])
    if any(model.activation != models[0].activation for model in models):
        raise ValueError("models: expected one activation; stack models of equal activation")
    radii = [config.radii or Radii(None, None, None)] * count if radii is None else list(radii)
    if len(radii) != count:
        raise ValueError(f"radii: expected one for each of {count} models, got {len(radii)}")

    data = [
        (_own(tokens, 3, s), _own(targets, 1, s), None if mask is None else _own(mask, 2, s))
        for s in range(count)
    ]
    if together is None:
        together = start.parameters.U.device.type != "cpu"
    if not together:
        return [
            projected_gradient_descent(
                model, x, y, replace(config, radii=rho), mask=keep, engine=engine
            )
            for model, (x, y, keep), rho in zip(models, data, radii, strict=True)
        ]
    objectives = [
        Objective.of(model, x, y, keep, engine=engine)
        for model, (x, y, keep) in zip(models, data, strict=True)
    ]
    problems = _Problems(
        [objective.inputs for objective in objectives],
        torch.stack([objective.targets for objective in objectives]),
        models[0].activation, [model.scale for model in models], start.heads,
        _shared(tokens, mask), engine,
    )  # fmt: skip
    state = StackedState(start.parameters, start.heads, radii, config)
    for k in range(config.steps + 1):
        losses, gradients = problems.loss_and_gradients(state.phi)
        state.note(k, losses, gradients)
        if k < config.steps:
            state.advance(gradients)
    return _results(models, start, state, config)


def _results(
    models: Sequence[ShallowTransformer],
    start: StackedParameters,
    state: StackedState,
    config: DescentConfig,
) -> list[DescentResult]:
    initial, final, averaged, best = (
        StackedParameters(phi, start.heads).unstack()
        for phi in (start.parameters, state.phi, state.mean(), state.best)
    )
    best_steps, best_losses = state.best_step.tolist(), state.best_loss.tolist()
    results = [
        DescentResult(
            initial=initial[s],
            final=final[s],
            averaged=averaged[s],
            best=best[s],
            best_step=best_steps[s],
            best_loss=best_losses[s],
            steps_taken=config.steps,
            stopped_early=False,
            step_size=config.eta,
            history=history,
        )
        for s, history in enumerate(state.histories())
    ]
    for model, result in zip(models, results, strict=True):
        model.load(result.final)
    return results


@dataclass(frozen=True)
class _Problems:
    """The data of S models: one stack where the Triton kernels serve it, else one by one."""

    inputs: Sequence[Inputs]
    targets: Float[Tensor, "S n"]
    activation: Activation
    scales: Sequence[float]
    heads: tuple[int, ...]
    shared: bool
    engine: str

    def loss_and_gradients(self, parameters: Parameters) -> tuple[Tensor, Parameters]:
        """L (S,), and the gradients of the padded parameters."""
        chosen = selection.choose(self.engine, self.inputs[0], parameters.heads, *parameters)
        if chosen.name == "triton":
            values, gradients = self._at_once(parameters)
        else:
            members = StackedParameters(parameters, self.heads).unstack()
            problems = zip(self.inputs, members, self.scales, self.targets, strict=True)
            pairs = [
                chosen.step(x, phi, self.activation, gamma, y) for x, phi, gamma, y in problems
            ]
            values = torch.stack([f for f, _ in pairs])
            gradients = stack([gradient for _, gradient in pairs]).parameters
        return (values - self.targets).square().mean(dim=1), gradients

    def _at_once(self, parameters: Parameters) -> tuple[Tensor, Parameters]:
        r"""One launch: :math:`\gamma_s` goes into W, and :math:`\sqrt{M/m}` into c."""
        (c, U, W), (norm, gamma) = parameters, self._factors
        values, gradients = triton_launch.step(
            self._data, Parameters(norm * c, U, gamma * W), self.activation, 1.0, self.targets
        )
        return values, Parameters(norm * gradients.c, gradients.U, gamma * gradients.W)

    @cached_property
    def _data(self) -> triton_launch.Stack:
        used = self.inputs[:1] if self.shared else self.inputs
        masks = [own.mask for own in used if own.mask is not None]
        return triton_launch.Stack(
            torch.stack([own.tokens for own in used]),
            torch.stack([own.query for own in self.inputs]),
            torch.stack(masks) if masks else None,
        )

    @cached_property
    def _factors(self) -> tuple[Tensor, Tensor]:
        """Return sqrt(M/m), and 0 in padded heads, (S, M); the logit scales, (S, 1, 1, 1)."""
        width = _width(self.heads)
        norm = self.targets.new_zeros((len(self.heads), width))
        for s, (m, rows) in enumerate(zip(self.heads, _rows(self.heads), strict=True)):
            norm[s, rows.to(norm.device)] = math.sqrt(width / m)
        return norm, self.targets.new_tensor(self.scales)[:, None, None, None]


def _own(data: Tensor, axes: int, s: int) -> Tensor:
    return data if data.ndim == axes else data[s]


def _shared(tokens: Tensor, mask: Tensor | None) -> bool:
    return tokens.ndim == 3 and (mask is None or mask.ndim == 2)  # own masks hide other tokens


def _width(heads: Sequence[int]) -> int:
    """M: the largest m, or one more where an even m could not lie in two halves otherwise."""
    widest = max(heads)
    return widest + widest % 2 if len(set(heads)) > 1 else widest


def _rows(heads: Sequence[int]) -> list[Tensor]:
    """Where the heads of each model lie among the M."""
    half = _width(heads) // 2
    rows = []
    for m in heads:
        row = torch.arange(m, device="cpu")
        if m % 2 == 0:
            row[m // 2 :] += half - m // 2
        rows.append(row)
    return rows
