r"""Weight decay toward the initialisation: the convergence theorem with a horizon.

Projected gradient descent on :math:`L_n + \frac\lambda2\|\phi - \phi_0\|^2` takes the step

.. math:: \phi_k - \eta\bigl(\nabla L_k + \lambda(\phi_k - \phi_0)\bigr)
    = (1-\eta\lambda)\Bigl(\phi_k - \tfrac{\eta}{1-\eta\lambda}\nabla L_k\Bigr)
    + \eta\lambda\,\phi_0,

an average of a longer step of plain descent and the start. The squared distance to
:math:`\phi^\star` is convex, so with :math:`D_k = \|\phi_k - \phi^\star\|^2`

.. math:: D_{k+1} - D_0 \le (1-\eta\lambda)(D_k - D_0)
    - 2\eta\langle\nabla L_k, \phi_k - \phi^\star\rangle
    + \tfrac{\eta^2}{1-\eta\lambda}\|\nabla L_k\|^2,

and the sum of the theorem becomes a weighted one, with weights
:math:`w_k = (1-\eta\lambda)^{\tau-1-k}` that forget what is older than :math:`1/(\eta\lambda)`
steps. Nothing else changes. Derived here; arXiv 2601.16514 has no weight decay.
"""

from __future__ import annotations

import math
from dataclasses import replace

from attention_dynamics.theory.convergence import Decomposition, Ingredients, fast_form
from attention_dynamics.validation import require_number


def effective_steps(step_size: float, steps: float, decay: float) -> float:
    r"""
    .. math:: \tau_\lambda = \sum_{k<\tau} (1-\eta\lambda)^{\tau-1-k}
        = \frac{1 - (1-\eta\lambda)^\tau}{\eta\lambda} \le \min\Bigl(\tau,
        \frac1{\eta\lambda}\Bigr),

    the sum of the weights. ``decay`` is :math:`\lambda`, 0 gives ``steps``, which may be infinite.

    Raises ValueError for :math:`\eta\lambda \ge 1`, fewer than one step or a negative number.
    """
    share = _share(step_size, decay)
    if not steps >= 1:
        raise ValueError(f"steps: expected a number >= 1, got {steps}; count gradient steps")
    if share == 0.0:
        return steps
    return -math.expm1(steps * math.log1p(-share)) / share


def decayed_form(
    ingredients: Ingredients, step_size: float, steps: float, decay: float
) -> Decomposition:
    r"""
    .. math:: x \le \frac{\epsilon + \sqrt{\epsilon^2 + (1-\kappa_\lambda) D_0/(\eta\tau_\lambda)}}
        {2(1-\kappa_\lambda)}, \qquad
        x^2 = \frac{1}{\tau_\lambda}\sum_{k<\tau} w_k L_k, \qquad
        \kappa_\lambda = \frac{\eta G^2}{1-\eta\lambda}:

    :func:`~attention_dynamics.theory.convergence.fast_form` with :func:`effective_steps`
    (:math:`\tau_\lambda`) for :math:`\tau` and :math:`\kappa_\lambda` for :math:`\kappa`.
    ``average`` bounds the weighted average of the losses, hence the smallest loss, ``total`` the
    loss of the weighted average of the iterates. After many steps :math:`D_0/(\eta\tau_\lambda)`
    is :math:`\lambda D_0`, the price of the decay; at :math:`\lambda = 0` it is the theorem.

    Raises ValueError if :math:`\kappa_\lambda \ge 1`, or as :func:`effective_steps` does.
    """
    tau = effective_steps(step_size, steps, decay)
    longer = ingredients.gradient_squared / (1 - step_size * decay)
    return fast_form(replace(ingredients, gradient_squared=longer), step_size, tau)


def decay_without_projection(ingredients: Ingredients, step_size: float, limit: float) -> float:
    r"""
    .. math:: \lambda\,(1-\kappa_\lambda)\, S_{\max}^2 \ge \epsilon S_{\max} + D_0/4,

    the smallest :math:`\lambda` that satisfies it: from there on **the projection never acts, in
    any number of steps**. ``limit`` is :math:`S_{\max}`
    (:func:`~attention_dynamics.theory.convergence.path_length_limit`). Proof: under decay a head
    is within its speed times :math:`\eta\sum_l w_l\sqrt{L_l} \le \eta\tau_\lambda x` of its
    start, which grows with :math:`\tau_\lambda \le 1/(\eta\lambda)`.

    With :math:`r = \eta(\epsilon S_{\max} + D_0/4)/S_{\max}^2` it exists if :math:`\sqrt r \le
    1 - \sqrt\kappa`, and is the smaller root of :math:`t^2 - (1 - \kappa + r)t + r = 0`,
    :math:`t = \eta\lambda`.

    Raises ValueError if there is none: the step is too long, or the limit too small.
    """
    kappa = ingredients.kappa(step_size)
    require_number("limit", limit, positive=True)
    r = step_size * (ingredients.epsilon / limit + ingredients.distance_squared / (4 * limit**2))
    if kappa >= 1.0 or math.sqrt(r) > 1.0 - math.sqrt(kappa):
        raise ValueError(
            f"step_size: expected sqrt(kappa) + sqrt(r) <= 1, got {math.sqrt(kappa):.4g} + "
            f"{math.sqrt(r):.4g}; take a smaller step_size or larger radii"
        )
    middle = 1.0 - kappa + r
    t = 2 * r / (middle + math.sqrt(max(0.0, middle**2 - 4 * r)))
    return t / step_size


def _share(step_size: float, decay: float) -> float:
    require_number("step_size", step_size, positive=True)
    require_number("decay", decay)
    share = step_size * decay
    if share >= 1.0:
        raise ValueError(
            f"decay: expected step_size * decay < 1, got {share:.4g}; the step would pass the "
            f"start: take a decay below {1 / step_size:.4g}"
        )
    return share
