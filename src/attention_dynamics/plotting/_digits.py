"""Numbers as a reader likes them: three digits, groups of three, powers of ten."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GROUP = "\u202f"  # a narrow space that no line breaks at
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def rounded_up(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The least numbers of three significant digits that are not smaller; for positive ones."""
    below = np.floor(np.log10(values)) - 2
    # Powers of ten are exact from 10^0 to 10^22: divide by them, and never by 10^-3.
    unit, inverse = 10.0 ** np.maximum(below, 0), 10.0 ** np.maximum(-below, 0)
    digits = np.ceil(values / unit * inverse)
    # What has three digits already may have gained a unit by rounding.
    fewer = digits - 1
    digits = np.where(fewer * unit / inverse >= values, fewer, digits)
    return np.asarray(digits * unit / inverse)


def number(value: float) -> str:
    """Three significant digits, as in 22 900, 0.0158 and 2.29 × 10⁷."""
    if 1e-3 <= value < 1e6:
        whole, dot, rest = f"{float(f'{value:.3g}'):.12g}".partition(".")
        return integer(int(whole)) + dot + rest
    digits, _, exponent = f"{value:.2e}".partition("e")
    return f"{digits} × {power_of_ten(int(exponent))}"


def integer(value: int) -> str:
    """All digits, in groups of three from 10 000 on."""
    return f"{value:,}".replace(",", _GROUP) if value >= 10_000 else str(value)


def power_of_ten(exponent: int) -> str:
    """10⁻², 1, 10, 10⁴."""
    if exponent in (0, 1):
        return str(10**exponent)
    return "10" + str(exponent).translate(_SUPERSCRIPTS)
