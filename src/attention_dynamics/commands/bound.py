r"""``bound``: the finite-time bound of the convergence theorem, from numbers alone."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any


def add(commands: Any) -> None:
    """Declare ``bound``."""
    bound = commands.add_parser(
        "bound", help="the finite-time bound of the convergence theorem, its three terms"
    )
    bound.set_defaults(command=show_bound)
    for flags, kind, default, meaning in (
        (("-m", "--heads"), int, 1024, "heads m, even"),
        (("-n", "--samples"), int, 1000, "samples n"),
        (("-T", "--length"), int, 16, "tokens of a sample T"),
        (("-d", "--dimension"), int, 8, "dimension of a token d"),
        (("-t", "--tau", "--steps"), int, 10_000, "steps tau"),
        (("--delta",), float, 0.05, "probability that the approximation fails"),
        (("--delta-prime",), float, 0.05, "probability that a head is too large"),
        (("--noise",), float, 0.0, "root mean square of what the targets have besides"),
    ):
        bound.add_argument(
            *flags, type=kind, default=default, help=f"{meaning} (default {default})"
        )
    for name, meaning in (
        ("rho", "radii of the projection set"),
        ("nu", "transport norms of the target, at most rho"),
    ):
        bound.add_argument(
            f"--{name}", type=float, nargs="+", default=[1.0],
            help=f"{meaning}: one number, or three for c, U, W (default 1)",
        )  # fmt: skip
    bound.add_argument("--eta", type=float, help="step size (default 1/sqrt(tau))")
    bound.add_argument("--activation", default="tanh", help="tanh (default), erf or erf_plain")
    bound.add_argument("--form", default="fast", help="fast (default) or paper")
    bound.add_argument("--descent", default="ProjGD", help="ProjGD (default) or ProjSGD")
    bound.add_argument("--error", default="rms", help="rms over the samples (default) or sup")
    bound.add_argument("--concentration", default="mean", help="mean (default) or largest head")
    bound.add_argument("--tail", default="bernstein", help="bernstein (default) or mcdiarmid")


def show_bound(options: argparse.Namespace) -> int:
    """Print the three terms, the total, whether it says anything, and that T is in none of them."""
    from attention_dynamics.theory.bounds import InputBounds
    from attention_dynamics.theory.calculator import BoundCalculator
    from attention_dynamics.theory.setting import TERMS, Setting
    from attention_dynamics.theory.transport import TransportNorms
    from attention_dynamics.training.projection import Radii

    calculator = BoundCalculator(
        form=options.form, descent=options.descent, concentration=options.concentration,
        tail=options.tail, error=options.error,
    )  # fmt: skip
    setting = Setting(
        heads=options.heads, samples=options.samples, length=options.length,
        dimension=options.dimension, steps=options.tau, step_size=options.eta,
        radii=Radii(*_blocks("rho", options.rho)),
        transport_norms=TransportNorms(*_blocks("nu", options.nu)),
        inputs=InputBounds(1.0, 1.0), delta=options.delta, delta_prime=options.delta_prime,
        activation=options.activation, noise=options.noise,
    )  # fmt: skip
    found = calculator.bound(setting)
    print(f"{found.form} form, {found.quantity}, with probability at least {found.probability:g}")
    for name in TERMS:
        print(f"  {name:<14} {getattr(found.terms, name):<12.6g} of the {found.unit}")
    print(f"  {'total':<14} {found.total:<12.6g} bounds the loss")
    print(f"  {'at the start':<14} {found.initial_loss:<12.6g} bounds the loss")
    longer = calculator.bound(replace(setting, length=2 * setting.length))
    print(
        f"sequence length T: the total is {found.total:.6g} for T = {setting.length}, "
        f"{longer.total:.6g} for T = {2 * setting.length}; T is in no term"
    )
    print(f"kappa = eta G^2 = {found.kappa:.4g}, eta = {setting.eta:.4g}")
    for flag in found.flags:
        print(f"note: {flag}")
    if found.vacuous:
        print(
            "vacuous: the total is no better than what is known of the loss before the first step"
        )
    return 0


def _blocks(name: str, values: list[float]) -> tuple[float, float, float]:
    if len(values) not in (1, 3):
        raise ValueError(f"{name}: expected one number or three, for c, U, W, got {len(values)}")
    c, U, W = values * 3 if len(values) == 1 else values
    return c, U, W
