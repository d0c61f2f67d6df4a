r"""The convergence theorem as arithmetic: three errors, a step size and a number of steps in.

Let :math:`\phi^\star \in \Omega_\rho` be any comparison point, :math:`D_k = \|\phi_k -
\phi^\star\|^2` and :math:`L_k = L_n(\phi_k)`. With :math:`r` the residual at :math:`\phi_k`, a the
residual at :math:`\phi^\star` and e the remainder of the expansion of f at :math:`\phi_k`, both as
root mean squares over the samples,

.. math:: \langle\nabla L_k, \phi_k - \phi^\star\rangle = \tfrac2n \sum_j r_j(r_j - a_j + e_j)
    \ge 2 L_k - 2\sqrt{L_k}\,\epsilon, \qquad \epsilon \ge \mathrm{rms}(a - e), \\
    \|\nabla L_k\|^2 \le 4 G^2 L_k, \qquad
    D_{k+1} \le D_k - 2\eta\langle\nabla L_k, \phi_k - \phi^\star\rangle + \eta^2\|\nabla L_k\|^2.

Summed over :math:`k < \tau`, with :math:`x^2 = \frac1\tau\sum_k L_k` and :math:`\kappa = \eta G^2`:
:math:`(1-\kappa) x^2 - \epsilon x \le D_0/(4\eta\tau)`. No eigenvalue of a Gram matrix enters, and
no sequence length. For ProjSGD take conditional expectations given :math:`\phi_0` of each line:
:math:`\mathbb E\|g_k\|^2 \le 4 G^2\,\mathbb E L_k` by Jensen, and
:math:`\mathbb E\sqrt{L_k} \le \sqrt{\mathbb E L_k}`, so every constant stays. Derived here; the
shape of the argument is that of arXiv 2601.16514.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from attention_dynamics.models.activations import Activation, get_activation
from attention_dynamics.theory.bounds import InputBounds, require_inputs
from attention_dynamics.training.projection import Radii, bounded_radii
from attention_dynamics.validation import require_number

Form = Literal["fast", "paper"]


@dataclass(frozen=True)
class Ingredients:
    r"""What the theorem is made of; lengths and outputs in the units of :math:`\phi` and f.

    - ``distance_squared``: :math:`\|\phi_0 - \phi^\star\|^2 \le \|\nu\|^2`;
    - ``gradient_squared``: :math:`G^2`;
    - ``approximation``: :math:`\epsilon_{\mathrm{app}}`, how far the tangent model at
      :math:`\phi^\star` is from the targets, noise included;
    - ``linearisation``: :math:`(E_{\mathrm{lin}}(\nu) + E_{\mathrm{rem}})/\sqrt m`;
    - ``averaging``: :math:`2 E_{\mathrm{lin}}(\rho)/\sqrt m`, between the averaged iterate and the
      average of the iterates;
    - ``size``: :math:`F + Y \ge \sqrt{L_n}` on the projection set.

    Raises ValueError if one is negative or not finite, TypeError if it is no number.
    """

    distance_squared: float
    gradient_squared: float
    approximation: float
    linearisation: float
    averaging: float
    size: float

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            require_number(name, getattr(self, name))

    @property
    def epsilon(self) -> float:
        r""":math:`\epsilon`: ``approximation`` + ``linearisation``, a bound of rms(a - e)."""
        return self.approximation + self.linearisation

    def kappa(self, step_size: float) -> float:
        r""":math:`\kappa = \eta G^2`; the fast form asks for :math:`\kappa < 1`."""
        require_number("step_size", step_size, positive=True)
        return step_size * self.gradient_squared


class Decomposition(NamedTuple):
    r"""Three terms, a bound ``average`` of :math:`\frac1\tau\sum_k L_k` (hence of the smallest
    :math:`L_k`), and a bound ``total`` of :math:`L_n(\bar\phi)`, both in the unit of the loss.

    In the fast form :math:`\sqrt{\texttt{total}}` is at most the sum of the three terms, in the
    paper's form ``total`` is their sum.
    """

    optimisation: float
    approximation: float
    linearisation: float
    average: float
    total: float


def fast_form(ingredients: Ingredients, step_size: float, steps: float) -> Decomposition:
    r"""
    .. math:: x \le \frac{\epsilon + \sqrt{\epsilon^2 + (1-\kappa) D_0/(\eta\tau)}}{2(1-\kappa)},
        \qquad \tfrac1\tau\sum_{k<\tau} L_k = x^2, \quad \min_{k<\tau} L_k \le x^2, \quad
        \sqrt{L_n(\bar\phi)} \le x + 2 E_{\mathrm{lin}}(\rho)/\sqrt m.

    The terms are :math:`\sqrt{D_0/(4(1-\kappa)\eta\tau)}`,
    :math:`\epsilon_{\mathrm{app}}/(1-\kappa)` and
    :math:`(E_{\mathrm{lin}}(\nu)+E_{\mathrm{rem}})/((1-\kappa)\sqrt m)
    + 2E_{\mathrm{lin}}(\rho)/\sqrt m`, in the unit of f. In L the first is
    :math:`1/\tau` at a constant step and :math:`1/\sqrt\tau` at :math:`\eta = 1/\sqrt\tau`; the
    others leave O(1/m). ``steps`` (:math:`\tau`) may be infinite.

    Raises ValueError if :math:`\kappa \ge 1`, or a step size or number of steps is not positive.
    """
    kappa = ingredients.kappa(step_size)
    _require_steps(steps)
    if kappa >= 1.0:
        raise ValueError(
            f"step_size: expected kappa = step_size * G^2 < 1, got {kappa:.4g} with G^2 = "
            f"{ingredients.gradient_squared:.4g}; take a step_size below "
            f"{1 / ingredients.gradient_squared:.4g}, or the paper's form, which holds for any step"
        )
    left, epsilon = 1.0 - kappa, ingredients.epsilon
    head_start = ingredients.distance_squared / (step_size * steps)
    x = (epsilon + math.sqrt(epsilon**2 + left * head_start)) / (2 * left)
    return Decomposition(
        optimisation=math.sqrt(head_start / (4 * left)),
        approximation=ingredients.approximation / left,
        linearisation=ingredients.linearisation / left + ingredients.averaging,
        average=x**2,
        total=(x + ingredients.averaging) ** 2,
    )


def paper_form(ingredients: Ingredients, step_size: float, steps: float) -> Decomposition:
    r"""
    .. math:: \tfrac1\tau\sum_{k<\tau} L_k \le \frac{D_0}{4\eta\tau} + \eta G^2 S^2 + \epsilon S,
        \qquad L_n(\bar\phi) \le \tfrac1\tau\sum_{k<\tau} L_k
        + 4 S\,\frac{E_{\mathrm{lin}}(\rho)}{\sqrt m}, \qquad S = F + Y,

    for any :math:`\eta` and :math:`\tau`. The terms are the first two together,
    :math:`\epsilon_{\mathrm{app}} S`, and the rest, in the unit of the loss. With :math:`\eta =
    1/\sqrt\tau` and :math:`G^2, S^2 \sim D` they are the paper's :math:`D^2/\sqrt\tau` and
    :math:`\sqrt{D^3/m}`. The last step uses :math:`|L_n - L_{\mathrm{lin}}| \le 2 S
    E_{\mathrm{lin}}/\sqrt m` twice and the convexity of :math:`L_{\mathrm{lin}}`.

    Raises ValueError if a step size or number of steps is not positive.
    """
    kappa = ingredients.kappa(step_size)
    _require_steps(steps)
    S = ingredients.size
    optimisation = ingredients.distance_squared / (4 * step_size * steps) + kappa * S**2
    approximation = ingredients.approximation * S
    linearisation = ingredients.linearisation * S
    average = optimisation + approximation + linearisation
    averaging = 2 * S * ingredients.averaging
    return Decomposition(
        optimisation, approximation, linearisation + averaging, average, average + averaging
    )


def path_length(ingredients: Ingredients, step_size: float, steps: int) -> float:
    r""":math:`S_\tau = \eta\tau x \ge \eta \sum_{k<\tau} \sqrt{L_k}`, x of :func:`fast_form`.

    It grows with :math:`\tau`, and :math:`S_\tau \le \eta\tau\epsilon/(1-\kappa)
    + \tfrac12\sqrt{\eta\tau D_0/(1-\kappa)}`. Raises ValueError as :func:`fast_form` does.
    """
    return step_size * steps * math.sqrt(fast_form(ingredients, step_size, steps).average)


def path_length_limit(
    radii: Radii,
    heads: int,
    value_norm: float,
    *,
    inputs: InputBounds,
    coefficient: float = 1.0,
    activation: str | Activation = "tanh",
) -> float:
    r"""
    .. math:: S_{\max} = \min\Bigl(\frac{\rho_c}{2 s_0},\; \frac{\rho_u}{2 C s_1 b},\;
        \frac{\rho_w}{2 C s_1 b^2 b_q R}\Bigr), \qquad C = |c^0| + \rho_c/\sqrt m, \quad
        R = \max_i \|U_i^0\| + \rho_u/\sqrt m.

    One step moves :math:`(c_i, U_i, W_i)` by at most :math:`2\eta\sqrt{L_k/m}` times
    :math:`s_0`, :math:`C s_1 b`, :math:`C s_1 b^2 b_q R`. As long as
    :math:`\eta\sum\sqrt{L_k} \le S_{\max}` every iterate stays inside of its balls before it is
    projected: **the projection never acts**, and the descent is gradient descent.
    ``value_norm`` is :math:`\max_i\|U_i^0\|`, ``coefficient`` is :math:`\max_i|c_i^0|`.

    Raises ValueError if a radius is None or a norm negative, TypeError if ``radii`` or ``inputs``
    is something else.
    """
    rho_c, rho_U, rho_W = bounded_radii(radii, remedy="a free block never meets its projection")
    require_inputs(inputs)
    require_number("value_norm", value_norm)
    require_number("coefficient", coefficient)
    s0, s1, _ = get_activation(activation).bounds
    b, b_q = inputs
    C = coefficient + rho_c / math.sqrt(heads)
    R = value_norm + rho_U / math.sqrt(heads)
    speeds = ((rho_c, s0), (rho_U, C * s1 * b), (rho_W, C * s1 * b**2 * b_q * R))
    return min(rho / (2 * speed) if speed > 0 else math.inf for rho, speed in speeds)


def steps_without_projection(ingredients: Ingredients, step_size: float, limit: float) -> int:
    r"""
    .. math:: \tau_{\max} = \Bigl\lfloor \frac{(1-\kappa) S_{\max}^2}
        {\eta(\epsilon S_{\max} + D_0/4)} \Bigr\rfloor,

    the largest :math:`\tau` with :math:`S_\tau \le S_{\max}` (``limit``): up to there the
    projection never acts. Proof: :math:`S_\tau` grows with :math:`\tau` and solves
    :math:`(1-\kappa) S^2 = \eta\tau(\epsilon S + D_0/4)`; by induction the iterates up to k - 1 lie
    in the set, so the bound over k steps, which needs only them, keeps the k-th candidate in it.

    **Early stopping** is the corollary: gradient descent *without* a projection, stopped after
    :math:`\tau \le \tau_{\max}` steps, satisfies the theorem, and at :math:`\tau_{\max}` (not
    rounded) :math:`x = (\epsilon + D_0/(4 S_{\max}))/(1-\kappa)`.

    Returns 0 if not one step is certain. Raises ValueError if :math:`\kappa \ge 1`, OverflowError
    where the number is infinite (nothing to learn and no error).
    """
    kappa = ingredients.kappa(step_size)
    if kappa >= 1.0:
        raise ValueError(
            f"step_size: expected kappa = step_size * G^2 < 1, got {kappa:.4g}; the path has no "
            f"bound then: take a step_size below {1 / ingredients.gradient_squared:.4g}"
        )
    require_number("limit", limit)
    rate = ingredients.epsilon * limit + ingredients.distance_squared / 4
    if limit == 0.0:
        return 0
    if rate == 0.0:
        raise OverflowError(
            "ingredients: expected an error or a distance > 0, got none of both; the descent "
            "starts at an exact solution and never leaves it"
        )
    steps = math.floor((1.0 - kappa) * limit**2 / (step_size * rate))
    # The quotient rounds: return the integer at which the condition itself changes.
    while steps > 0 and path_length(ingredients, step_size, steps) > limit:
        steps -= 1
    while path_length(ingredients, step_size, steps + 1) <= limit:
        steps += 1
    return steps


def _require_steps(steps: float) -> None:
    if not steps >= 1:
        raise ValueError(f"steps: expected a number >= 1, got {steps}; count gradient steps")
