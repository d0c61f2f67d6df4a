r"""Many-start projected ascent: the adversary that a stated bound has to survive."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

# One point is a tensor, or a tuple of tensors, with the starts along the first axis.
Point = Any


class Attack(NamedTuple):
    """``values (starts,)``: the best value of each start; ``points``: where it was reached."""

    values: "Tensor"
    points: Point


def projected_ascent(
    objective: Callable[..., "Tensor"],
    starts: Point,
    project: Callable[..., Point],
    *,
    steps: int = 400,
    step_size: float = 0.3,
    final_step_size: float = 1e-4,
) -> Attack:
    r""":math:`x \leftarrow \Pi(x + \eta_k\, \nabla f / \|\nabla f\|)`, the best of each start kept.

    ``starts`` is a float64 tensor ``(starts, ...)`` or a tuple of them; ``objective(*blocks)``
    returns ``(starts,)`` and must treat the starts independently; ``project(*blocks)`` returns
    the blocks moved into the set. Gradients are normalised per start and block;
    :math:`\eta_k` falls geometrically from ``step_size`` to ``final_step_size``. The projected
    starts are points too, so the result is never below them. Deterministic given the starts.

    Raises ``TypeError`` unless the starts are float64, ``ValueError`` unless the objective gives
    one finite value a start.
    """
    import torch

    single = not isinstance(starts, tuple)
    blocks = (starts,) if single else tuple(starts)
    for block in blocks:
        if block.dtype != torch.float64:
            raise TypeError(f"starts have dtype {block.dtype}: pass float64, starts.double()")

    def projected(candidate: tuple["Tensor", ...]) -> tuple["Tensor", ...]:
        moved = project(*candidate)
        return tuple(b.detach() for b in ((moved,) if isinstance(moved, torch.Tensor) else moved))

    def evaluate(candidate: tuple["Tensor", ...]) -> "Tensor":
        values = objective(*candidate)
        if values.shape != (len(blocks[0]),):
            raise ValueError(
                f"objective returned shape {tuple(values.shape)}: return one value a start, "
                f"({len(blocks[0])},)"
            )
        if not torch.isfinite(values).all():
            raise ValueError("objective returned a value that is not finite: check the projection")
        return values

    with torch.no_grad():
        current = projected(tuple(block.detach().clone() for block in blocks))
    best = tuple(block.clone() for block in current)
    best_values = evaluate(current).detach().clone()
    decay = (final_step_size / step_size) ** (1 / max(steps - 1, 1))
    for step in range(steps):
        variables = tuple(block.clone().requires_grad_() for block in current)
        gradients = torch.autograd.grad(evaluate(variables).sum(), variables)
        with torch.no_grad():
            eta = step_size * decay**step
            current = projected(
                tuple(
                    block + eta * gradient / _norms(gradient).clamp_min(1e-300)
                    for block, gradient in zip(current, gradients, strict=True)
                )
            )
            values = evaluate(current)
            better = values > best_values
            best_values = torch.where(better, values, best_values)
            best = tuple(
                torch.where(better.reshape(-1, *[1] * (block.dim() - 1)), block, kept)
                for block, kept in zip(current, best, strict=True)
            )
    return Attack(best_values, best[0] if single else best)


def _norms(gradient: "Tensor") -> "Tensor":
    norms = gradient.reshape(len(gradient), -1).norm(dim=1)
    return norms.reshape(-1, *[1] * (gradient.dim() - 1))
