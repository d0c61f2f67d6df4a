r"""Real sequences that come inside installable packages: nothing is downloaded.

- ``"digits"``: 8 x 8 images of handwritten digits (scikit-learn), 8 tokens of 8 pixels, target
  :math:`+1` for an even digit and :math:`-1` for an odd one;
- ``"co2"``: weekly carbon dioxide at Mauna Loa (statsmodels), its changes from week to week, with
  a lag of 52 weeks;
- ``"sunspots"``: yearly sunspot numbers (statsmodels), with a lag of 11 years.

Series are split in time, with a gap; images, which have no time, at random and stratified. The 13
people who wrote them are not named, so one hand may be on both sides.
Packages: ``pip install "attention-dynamics[data]"``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attention_dynamics.data.autoregressive import (
    forecasting_task,
    position_features,
)
from attention_dynamics.data.streams import generator as named_generator
from attention_dynamics.data.tokens import rescale_tokens
from attention_dynamics.data.windows import Windows, split_windows
from attention_dynamics.validation import require_integer, require_one_of

Sequences = Literal["digits", "co2", "sunspots"]
SHORTEST_PERIOD = 4.0
LARGEST = 4.5
r"""No value of the two series is this many training deviations away from the training mean (the
farthest is 4.33); the ball that the tokens are divided by is made for this number, and a longer
token is refused. It is the one number of a task that was read off held out values too."""


class RealSeries(NamedTuple):
    r"""``values`` (N,) in float64, ``observed`` (N,) False where a value needed an interpolation,
    ``lag`` L of its season, ``missing`` the number of raw values that were interpolated.
    """

    values: Float[Tensor, " N"]
    observed: Bool[Tensor, " N"]
    lag: int
    missing: int


class DigitImages(NamedTuple):
    """``images`` (n, 8, 8) with entries in 0..1, in float64, and their ``digits`` (n,)."""

    images: Float[Tensor, "n 8 8"]
    digits: Int[Tensor, " n"]


@dataclass(frozen=True)
class RealTask:
    r"""Tokens and targets of both sides, and what the baselines read.

    ``tokens`` (n, T, d) and ``targets`` (n,) are for training, ``held_tokens`` and ``held_targets``
    are held out; all in float64. ``features`` (n, k) and ``held_features`` are the same inputs,
    flat and without places: T values of a window in units of the targets, or 64 pixels.
    ``forecasts`` are forecasts of the held targets that need no fit. ``block`` is the number of
    neighbours that a bootstrap keeps together, 1 for samples without an order; ``outside`` the
    share of all tokens longer than 1.
    """

    name: Sequences
    tokens: Float[Tensor, "n T d"]
    targets: Float[Tensor, " n"]
    held_tokens: Float[Tensor, "v T d"]
    held_targets: Float[Tensor, " v"]
    features: Float[Tensor, "n k"]
    held_features: Float[Tensor, "v k"]
    forecasts: dict[str, Tensor]
    block: int
    outside: float


@lru_cache(maxsize=2)
def real_series(name: str) -> RealSeries:
    r"""The changes of weekly CO2, :math:`x_t = c_{t+1} - c_t`, or the yearly sunspot numbers.

    Weeks without a measurement are interpolated linearly between their neighbours. A change is
    ``observed`` if both its weeks were measured. Raises ValueError for another name,
    ModuleNotFoundError, saying what to install, without statsmodels.
    """
    require_one_of("name", name, ("co2", "sunspots"))
    try:
        from statsmodels.datasets import co2, sunspots
    except ModuleNotFoundError as error:
        raise _needs("statsmodels", name) from error
    if name == "sunspots":
        raw = sunspots.load_pandas().data["SUNACTIVITY"].to_numpy(dtype=float)
        return RealSeries(torch.tensor(raw), torch.ones(len(raw), dtype=torch.bool), 11, 0)
    raw = co2.load_pandas().data["co2"].to_numpy(dtype=float)
    filled, known = interpolated(raw)
    both = torch.tensor(known[1:] & known[:-1])
    return RealSeries(torch.tensor(np.diff(filled)), both, 52, int((~known).sum()))


def interpolated(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The series with each NaN on the line between its neighbours, and where it was known.

    Raises ValueError if the first or last value is missing: there is no line to draw.
    """
    known = np.isfinite(raw)
    if not (len(raw) and known[0] and known[-1]):
        raise ValueError(
            "raw: expected a series with a known first and last value; cut the missing ends off"
        )
    place = np.arange(len(raw))
    return np.interp(place, place[known], raw[known]), known


@lru_cache(maxsize=1)
def digit_images() -> DigitImages:
    """The 1797 images, pixels over 16. Raises ModuleNotFoundError without scikit-learn."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise _needs("scikit-learn", "digits") from error
    found = load_digits()
    return DigitImages(torch.tensor(found.images / 16.0), torch.tensor(found.target))


def _needs(package: str, name: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(
        f"name: {name!r} comes with {package}, which is not installed; "
        'pip install "attention-dynamics[data]"'
    )


def place_pairs(length: int) -> int:
    r"""The least p whose periods :math:`4 \cdot 2^k`, k < p, reach ``length`` T."""
    require_integer("length", length, minimum=1)
    return 1 + max(0, math.ceil(math.log2(length / SHORTEST_PERIOD)))


def real_task(
    name: str,
    *,
    training: int,
    held: int,
    ball: bool = True,
    held_fraction: float = 0.25,
    seed: int = 0,
) -> RealTask:
    r"""
    .. math:: X_{a,t} = \frac1b (z_{a+t}, p_t), \quad y_a = \frac{x_{a+T} - \bar y}{\hat\sigma}
        \qquad\text{or}\qquad X_{j,t} = \frac1b (\text{row } t, p_t), \quad y_j = \pm1.

    z is the series, standardised by its values before the end of the training part; T = L + 1. The
    places have periods 4, 8, ... up to the first that reaches T. With ``ball`` the tokens are
    divided by :math:`b = \sqrt{p + 4.5^2}` for a series, :math:`\sqrt{p + 8}` for images, which no
    token exceeds; without it b = 1 and tokens are longer than the theory allows.

    Of a series the last ``held_fraction`` of the windows is held out, T windows before it are left
    out, and of what remains at most ``training`` and ``held`` windows, evenly spaced, are taken
    whose target was observed. Of the images ``training`` + ``held`` are drawn and dealt at random
    (``seed``), each digit in its share. Raises ValueError for an unknown name or sizes that are
    below 1 or, for images, more than there are.
    """
    require_one_of("name", name, get_args(Sequences))
    require_integer("training", training, minimum=1)
    require_integer("held", held, minimum=1)
    if name == "digits":
        return _parity(training, held, ball, seed)
    series = real_series(name)
    T, pairs = series.lag + 1, place_pairs(series.lag + 1)
    windows = _thinned(series, T, training, held, held_fraction)
    past = series.values[: int(windows.training[-1]) + T + 1]
    values = (series.values - past.mean()) / past.std(correction=0)
    bound = math.sqrt(pairs + LARGEST**2) if ball else None
    task = forecasting_task(
        values, T, series.lag, windows, token_bound=bound, pairs=pairs,
        base_period=SHORTEST_PERIOD, dtype=torch.float64,
    )  # fmt: skip
    features, held_features = (task.standardise(x) for x in (task.values, task.held_values))
    forecasts = {
        "constant": torch.zeros_like(task.held_targets),
        "persistence": held_features[:, -1],
        "seasonal": held_features[:, -series.lag],
    }
    return RealTask(
        _literal(name), task.tokens, task.targets, task.held_tokens, task.held_targets, features,
        held_features, forecasts, T, _outside(task.tokens, task.held_tokens),
    )  # fmt: skip


def _thinned(series: RealSeries, T: int, training: int, held: int, held_fraction: float) -> Windows:
    windows = split_windows(
        len(series.values) - 2 * T, T, split="time", validation_fraction=held_fraction
    )
    sides = []
    for starts, most in zip(windows, (training, held), strict=True):
        known = starts[series.observed[starts + T]]
        sides.append(known[_spaced(len(known), min(most, len(known)))])
    return Windows(*sides)


def _spaced(of: int, count: int) -> Int[Tensor, " count"]:
    """``count`` of the numbers 0..of - 1, evenly spaced: where floor(i count / of) is to step."""
    place = torch.arange(of)
    return place[(place + 1) * count // of > place * count // of]


def _parity(training: int, held: int, ball: bool, seed: int) -> RealTask:
    images, digits = digit_images()
    both = training + held
    if both > len(digits):
        raise ValueError(
            f"training, held: expected at most {len(digits)} images together, got {both}"
        )
    dealt = torch.randperm(len(digits), generator=named_generator(seed, "real", "digits"))
    dealt = dealt[digits[dealt].sort(stable=True).indices]  # by digit, in random order within
    taken = dealt[_spaced(len(dealt), both)]
    first = torch.zeros(both, dtype=torch.bool)
    first[_spaced(both, training)] = True
    pairs = place_pairs(8)
    places = position_features(8, pairs=pairs, base_period=SHORTEST_PERIOD)
    sides = []
    for index in (taken[first], taken[~first]):
        tokens = torch.cat((images[index], places.expand(len(index), -1, -1)), dim=-1)
        tokens = rescale_tokens(tokens, math.sqrt(8 + pairs)) if ball else tokens
        parity = 1.0 - 2.0 * (digits[index] % 2).double()
        sides.append((tokens, parity, images[index].flatten(1)))
    (tokens, targets, features), (held_tokens, held_targets, held_features) = sides
    guess = {"constant": torch.full_like(held_targets, float(targets.mean()))}
    return RealTask(
        "digits", tokens, targets, held_tokens, held_targets, features, held_features, guess, 1,
        _outside(tokens, held_tokens),
    )  # fmt: skip


def _outside(*tokens: Tensor) -> float:
    norms = torch.cat([x.norm(dim=-1).flatten() for x in tokens])
    return float((norms > 1 + 1e-12).double().mean())


def _literal(name: str) -> Sequences:
    [found] = [known for known in get_args(Sequences) if known == name]
    return found
