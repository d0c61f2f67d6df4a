r"""Forecasting an autoregressive series: windows, a split in time that shares nothing, tokens.

.. math:: x_t = \alpha\, x_{t-L} + \epsilon_t, \qquad \epsilon_t \sim \mathcal N(0, s^2).

A window that starts at a holds :math:`x_a, \dots, x_{a+T-1}`; its target is the next value,
:math:`x_{a+T} = \alpha\, x_{a+T-L} + \epsilon_{a+T}`. The informative value is the L-th from the
end of the window: the first token at T = L, the second at T = L + 1. A shorter window lacks it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from attention_dynamics.data.streams import generator as named_generator
from attention_dynamics.data.tokens import rescale_tokens
from attention_dynamics.data.windows import Split, Windows, split_windows
from attention_dynamics.validation import (
    require_cpu_generator,
    require_finite,
    require_floating,
    require_integer,
    require_number,
    require_shape,
)


def autoregressive_series(
    length: int,
    lag: int,
    *,
    generator: torch.Generator,
    coefficient: float = 0.9,
    innovation_variance: float = 0.1,
) -> Float[Tensor, " N"]:
    r"""
    .. math:: x_t = \alpha\, x_{t-L} + \epsilon_t, \qquad
        x_1, \dots, x_L \sim \mathcal N\Bigl(0, \frac{s^2}{1 - \alpha^2}\Bigr).

    The L residue classes of t modulo L are independent chains of order one, so independent starts
    from the stationary law of a chain make the whole series stationary: there is no burn-in, and
    no bias of one. ``coefficient`` is :math:`\alpha`, ``innovation_variance`` :math:`s^2`. Returns
    (length,) in float64 on the CPU. Raises ValueError for a length or lag below 1, a coefficient
    outside of (-1, 1), a variance that is not positive, a generator not on the CPU.
    """
    require_integer("length", length, minimum=1)
    require_integer("lag", lag, minimum=1)
    require_cpu_generator(generator)
    variance = stationary_variance(coefficient, innovation_variance)
    rounds = -(-length // lag)
    values = torch.randn((rounds, lag), generator=generator, dtype=torch.float64, device="cpu")
    values[0] *= math.sqrt(variance)
    values[1:] *= math.sqrt(innovation_variance)
    for before, now in pairwise(values):
        now += coefficient * before
    return values.reshape(-1)[:length].clone()


def stationary_variance(coefficient: float = 0.9, innovation_variance: float = 0.1) -> float:
    r""":math:`\operatorname{Var} x_t = s^2/(1 - \alpha^2)`.

    Raises ValueError for a coefficient outside of (-1, 1) or a variance that is not positive.
    """
    require_number("innovation_variance", innovation_variance, positive=True)
    if not -1.0 < coefficient < 1.0:
        raise ValueError(
            f"coefficient: expected a number in (-1, 1), got {coefficient}; no other series of "
            "this kind is stationary"
        )
    return innovation_variance / (1.0 - coefficient**2)


def position_features(
    length: int, *, pairs: int = 8, base_period: float = 32.0
) -> Float[Tensor, "T 2p"]:
    r"""
    .. math:: (\sin\omega_k t)_{k<p},\; (\cos\omega_k t)_{k<p}, \qquad
        \omega_k = \frac{2\pi}{\tau_0\,2^k}, \quad t = 0, \dots, T-1.

    Fixed features of the place in the window, of norm :math:`\sqrt p`; ``pairs`` is p,
    ``base_period`` :math:`\tau_0`. Returns (T, 2p) in float64. Raises ValueError for a length
    below 1, fewer than 0 pairs or a period that is not positive.
    """
    require_integer("length", length, minimum=1)
    require_integer("pairs", pairs, minimum=0)
    require_number("base_period", base_period, positive=True)
    place = torch.arange(length, dtype=torch.float64, device="cpu")
    powers = torch.arange(pairs, dtype=torch.float64, device="cpu")
    angle = place[:, None] * (2.0 * math.pi / (base_period * 2.0**powers))
    return torch.cat((angle.sin(), angle.cos()), dim=1)


@dataclass(frozen=True)
class Forecasting:
    r"""Tokens and targets of both sides, and what made them.

    ``tokens`` (n, T, d) and ``targets`` (n,) are for training, ``held_tokens`` and ``held_targets``
    for validation. Tokens are the raw value and its place, over :math:`b`; targets are
    :math:`(x_{a+T} - \bar y)/\hat\sigma` with ``mean`` :math:`\bar y` and ``deviation``
    :math:`\hat\sigma` of the *training* targets alone. ``values`` (n, T) and ``held_values`` hold
    the raw windows in float64, for baselines.
    """

    tokens: Float[Tensor, "n T d"]
    targets: Float[Tensor, " n"]
    held_tokens: Float[Tensor, "v T d"]
    held_targets: Float[Tensor, " v"]
    values: Float[Tensor, "n T"]
    held_values: Float[Tensor, "v T"]
    windows: Windows
    mean: float
    deviation: float

    def standardise(self, values: Tensor) -> Tensor:
        r""":math:`(x - \bar y)/\hat\sigma`, the scale of the targets."""
        return (values - self.mean) / self.deviation


def forecasting_task(
    series: Float[Tensor, " N"],
    length: int,
    lag: int,
    windows: Windows,
    *,
    token_bound: float | None = None,
    pairs: int = 8,
    base_period: float = 32.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Forecasting:
    r"""
    .. math:: X_{a,t} = \frac1b\bigl(x_{a+t},\, p_t\bigr), \qquad
        y_a = \frac{x_{a+T} - \bar y}{\hat\sigma}, \qquad t = 0, \dots, T-1,

    with the places :math:`p_t` of :func:`position_features`, for the ``windows`` of
    :func:`~attention_dynamics.data.windows.split_windows`. ``token_bound`` b divides the tokens
    and promises that none is longer than b; None leaves them as they are, of norm
    :math:`\sqrt{p + x^2}`, outside of the unit ball of the theory.

    Raises ValueError where T is shorter than the lag (the windows do not hold what predicts the
    target), a window leaves the series, the series is not finite, training targets are all equal,
    or a token is longer than b.
    """
    require_shape("series", series, ("N",))
    require_floating("series", series)
    require_finite("series", series)
    require_integer("lag", lag, minimum=1)
    require_integer(
        "length", length, minimum=lag,
        remedy=f"x[t - {lag}] predicts x[t], and a window of {length!r} tokens does not hold it",
    )  # fmt: skip
    for name, starts in windows._asdict().items():
        if not starts.numel() or int(starts.min()) < 0 or int(starts.max()) + length >= len(series):
            raise ValueError(
                f"windows.{name}: expected starts in 0..{len(series) - length - 1} for windows of "
                f"{length} tokens and a target in a series of {len(series)}, got "
                + (f"{int(starts.min())}..{int(starts.max())}" if starts.numel() else "none")
                + "; make the series longer"
            )
    series = series.detach().to(device="cpu", dtype=torch.float64)
    cut = series.unfold(0, length + 1, 1)
    (values, after), (held_values, held_after) = (
        (cut[starts, :length], cut[starts, length]) for starts in windows
    )
    mean, deviation = float(after.mean()), float(after.std(correction=0))
    if not deviation > 0:
        raise ValueError(
            f"series: expected training targets that differ, got {len(after)} equal to {mean}; "
            "take more training windows"
        )
    places = position_features(length, pairs=pairs, base_period=base_period)

    def tokens(raw: Tensor) -> Tensor:
        whole = torch.cat((raw[..., None], places.expand(len(raw), -1, -1)), dim=-1)
        if token_bound is not None:
            whole = rescale_tokens(whole, token_bound)
        return whole.to(dtype=dtype, device=device)

    def standard(raw: Tensor) -> Tensor:
        return ((raw - mean) / deviation).to(dtype=dtype, device=device)

    return Forecasting(
        tokens(values), standard(after), tokens(held_values), standard(held_after),
        values, held_values, windows, mean, deviation,
    )  # fmt: skip


def autoregressive_task(
    lag: int,
    samples: int,
    *,
    seed: int,
    split: Split,
    length: int | None = None,
    validation_fraction: float = 0.2,
    coefficient: float = 0.9,
    innovation_variance: float = 0.1,
    token_bound: float | None = None,
    pairs: int = 8,
    base_period: float = 32.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Forecasting:
    r"""The task of the published comparison: one series, ``samples`` windows of T = L + 1 tokens.

    ``length`` is T, None for L + 1. Both splits read the same series of a ``seed``, so that their
    difference is that of the split. Errors are those of the functions it is made of:
    :func:`autoregressive_series`, :func:`~attention_dynamics.data.windows.split_windows`,
    :func:`forecasting_task`.
    """
    require_integer("lag", lag, minimum=1)
    length = lag + 1 if length is None else length
    dealer = named_generator(seed, "autoregressive", "split", lag)
    windows = split_windows(
        samples, length, split=split, validation_fraction=validation_fraction,
        generator=dealer if split == "random" else None,
    )  # fmt: skip
    series = autoregressive_series(
        samples + 2 * length, lag, generator=named_generator(seed, "autoregressive", "series", lag),
        coefficient=coefficient, innovation_variance=innovation_variance,
    )  # fmt: skip
    return forecasting_task(
        series, length, lag, windows, token_bound=token_bound, pairs=pairs,
        base_period=base_period, dtype=dtype, device=device,
    )  # fmt: skip
