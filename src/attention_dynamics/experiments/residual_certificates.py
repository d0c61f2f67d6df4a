r"""Certified runs: gradient descent at the certified step size, every step held against its bound.

Each cell draws ``runs`` independent starts and data sets, scales each start until the route's
certificate holds, then by a further ``margin``, and descends all of them in one batch at
:math:`\eta = 1/S_\theta`. At every step k three things are checked:

1. :math:`L_k \le (1 - \eta\mu_{\mathrm{PL}})^kL_0`;
2. the length of the path so far, :math:`\eta\sum_{j<k}\|\nabla L_j\|`, is at most
   :math:`\rho_\theta`, which is more than the distance being so;
3. :math:`\|\nabla L_k\|^2 \ge 2\mu_{\mathrm{PL}}L_k`.

``targets`` are normal, or on route Z the ``"slowest"`` ones: the whole error then lies along the
smallest singular direction of :math:`Z_0`.

The bands were fixed before any run at the profiles ``book`` and ``paper``. A violation would refute
the theorem. ``speed`` is the measured rate over the certified one; on route Z it tends to at least
:math:`16 \cdot 2\,(\varphi'(0)/a)^2 = 72` as the scale grows, and to 72 for the slowest targets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import pandas as pd
import torch
from torch import Tensor

from attention_dynamics.data import generator
from attention_dynamics.experiments.estimates import (
    Band,
    Estimate,
    Profile,
    band_table,
    select,
    t_interval,
)
from attention_dynamics.experiments.shape import columns_of, rows_of
from attention_dynamics.models.residual import (
    ResidualConfig,
    ResidualParameters,
    init_parameters,
    layers,
    loss_and_gradients,
    stack_parameters,
)
from attention_dynamics.theory.certificates import Certificate, certificate, scale_to_certify

NAME = "residual_certificates"
SCHEMA = 1
ROUNDING = 1e-9
"""A bound is broken if it is passed by more than this fraction."""
SPEED_FLOOR = 1e-12
r"""The speed is taken at the last step with :math:`L_k/L_0` above this."""


@dataclass(frozen=True)
class Config:
    r"""One route, with the residual or without; ``margin`` multiplies the smallest certified scale.

    ``dimension``, ``hidden`` and ``key_dimension`` are d, m and :math:`d_k`.
    """

    route: Literal["Z", "H"]
    residual: bool
    targets: Literal["normal", "slowest"] = "normal"
    margin: float = 64.0
    runs: int = 5
    steps: int = 2000
    samples: int = 2
    length: int = 4
    dimension: int = 32
    hidden: int = 32
    key_dimension: int = 8

    @property
    def layer(self) -> ResidualConfig:
        """The layer of this configuration."""
        return ResidualConfig(
            dimension=self.dimension, key_dimension=self.key_dimension, hidden=self.hidden,
            attention_residual=self.residual,
        )  # fmt: skip

    @property
    def setting(self) -> str:
        """``Z_with``, ``Z_without``, ``Z_slowest``, ``H_with`` or ``H_without``."""
        if self.targets == "slowest":
            return f"{self.route}_slowest"
        return f"{self.route}_{'with' if self.residual else 'without'}"


COLUMNS = (*columns_of(Config), "run")


def _settings(z: Config) -> tuple[Config, ...]:
    h = replace(z, route="H", dimension=6, hidden=96)
    return (
        z,
        replace(z, targets="slowest"),
        replace(z, residual=False),
        h,
        replace(h, residual=False),
    )


_Z = Config("Z", True)
PROFILES = {
    "smoke": Profile(_settings(replace(_Z, runs=2, steps=30)), seeds=(100,)),
    "book": Profile(_settings(_Z), seeds=(0,)),
    "paper": Profile(_settings(_Z), seeds=(0, 1, 2, 3)),
}

BANDS = {
    "violations": Band(None, 0.0, "the theorem"),
    "least_speed_Z_with": Band(70.0, None, "at least 16 * 2 * (phi'(0) / a)^2 in the limit"),
    "speed_Z_slowest": Band(70.0, 74.0, "16 * 2 * (phi'(0) / a)^2 in the limit"),
}
"""``violations`` counts steps at which one of the three checks fails, over all runs."""


@dataclass(frozen=True)
class CertifiedStart:
    """A start with its data and its certificate, which holds."""

    parameters: ResidualParameters
    tokens: Tensor
    targets: Tensor
    certificate: Certificate


def start(config: Config, seed: int, run: int) -> CertifiedStart:
    """Draw a run's data and start, scale the start and certify it; on the CPU.

    Raises ValueError where no scale certifies it, or the larger scale is not certified.
    """
    layer, shape = config.layer, (config.samples, config.length, config.dimension)
    tokens, targets = (
        torch.randn(*shape, generator=generator(seed, NAME, name, run), dtype=torch.float64)
        for name in ("tokens", "targets")
    )
    drawn = init_parameters(
        layer, generator(seed, NAME, "start", run), orthogonal_w2=config.route == "Z"
    )
    if config.targets == "slowest":
        targets = _slowest(config, drawn, tokens, targets)
    scaled = scale_to_certify(
        drawn, tokens, targets, layer, route=config.route, accuracy=0.05
    ).parameters
    # One of the two blocks is zero and stays so.
    wider = scaled._replace(W1=config.margin * scaled.W1, W2=config.margin * scaled.W2)
    found = certificate(wider, tokens, targets, layer, route=config.route)
    if not found.ok:
        raise ValueError(
            f"margin: expected a scale that is certified, got {config.margin:g} times the "
            f"smallest: {found.reason}"
        )
    return CertifiedStart(wider, tokens, targets, found)


def run(config: Config, seed: int, device: str = "cpu") -> pd.DataFrame:
    """Rows (quantity, value) of each of ``runs`` runs; a pure function of its arguments.

    Raises ValueError if a start can't be certified or a field is out of its range.
    """
    starts = [start(config, seed, j) for j in range(config.runs)]
    curves = descend(starts, config, device)
    frames = []
    for j, one in enumerate(starts):
        found = one.certificate
        relative = curves["loss"][:, j] / curves["loss"][0, j]
        last = int((relative > SPEED_FLOOR).nonzero().max())
        quantities = {
            "violations": float(curves["violations"][j]),
            "loss_over_bound": float((relative / curves["bound"][:, j])[1:].max()),
            "path_over_rho": float(curves["path"][-1, j] / found.rho),
            "gradient_over_pl": float(curves["gradient_over_pl"][:, j].min()),
            "speed": float(relative[last].log() / (last * math.log1p(-found.eta * found.mu))),
            "certified_rate": found.eta * found.mu,
            "rho": found.rho,
            "smoothness": found.S,
            "final": float(relative[-1]),
        }
        frames.append(rows_of(NAME, config, seed, quantities).assign(run=j))
    return pd.concat(frames, ignore_index=True)


def descend(starts: list[CertifiedStart], config: Config, device: str = "cpu") -> dict[str, Tensor]:
    r"""``loss``, ``bound`` (relative), ``path``, ``gradient_over_pl``: (steps + 1, runs).

    ``violations`` (runs,) counts the steps at which a check fails, a NaN being a failure. A
    gradient is checked while :math:`L_k > 0`.
    """
    layer = config.layer
    theta = ResidualParameters(
        *(block.to(device) for block in stack_parameters([one.parameters for one in starts]))
    )
    tokens, targets = (
        torch.stack([getattr(one, name) for one in starts]).to(device)
        for name in ("tokens", "targets")
    )
    mu, eta, rho = (
        torch.tensor([getattr(one.certificate, name) for one in starts], dtype=torch.float64)
        for name in ("mu", "eta", "rho")
    )
    mu, eta, rho = mu.to(device), eta.to(device), rho.to(device)
    path, rows = torch.zeros_like(eta), []
    for _ in range(config.steps + 1):
        loss, gradient = loss_and_gradients(theta, tokens, targets, layer, validate=False)
        squared = gradient.inner(gradient)
        rows.append((loss, path, squared))
        path = path + eta * squared.sqrt()
        theta = theta.plus(gradient, -eta)
    loss, path, squared = (torch.stack(values) for values in zip(*rows, strict=True))
    k = torch.arange(config.steps + 1, dtype=torch.float64, device=device)[:, None]
    bound = (k * torch.log1p(-eta * mu)).exp()
    ratio = torch.where(loss > 0, squared / (2 * mu * loss), 1.0)
    kept = (
        (loss <= bound * (1 + ROUNDING) * loss[0])
        & (path <= rho * (1 + ROUNDING))
        & (ratio >= 1 - ROUNDING)
    )
    return {
        "loss": loss,
        "bound": bound,
        "path": path,
        "gradient_over_pl": ratio,
        "violations": (~kept).sum(dim=0),
    }


def estimate(frame: pd.DataFrame, quantity: str) -> Estimate:
    """The number of violations over all runs; the least or the mean ``speed`` of a setting's runs.

    The interval of a number or a least value is the value itself, that of a mean a 95 %
    t-interval.
    """
    if quantity == "violations":
        counted = select(frame, quantity)["value"]
        total = float(counted.sum())
        return Estimate(total, total, total, len(counted))
    name, _, setting = quantity.partition("speed_")
    values = select(of_setting(frame, setting), "speed")["value"]
    if name == "least_":
        least = float(values.min())
        return Estimate(least, least, least, len(values))
    return t_interval(values)


def of_setting(frame: pd.DataFrame, setting: str) -> pd.DataFrame:
    """The rows of one setting, named as :attr:`Config.setting` does."""
    route, kind = setting.split("_")
    chosen = (frame["route"] == route) & (frame["residual"] == (kind != "without"))
    return frame[chosen & (frame["targets"] == ("slowest" if kind == "slowest" else "normal"))]


def summarise(frame: pd.DataFrame) -> pd.DataFrame:
    """The estimate of each band's quantity with its interval, beside the band."""
    table = band_table(BANDS, lambda quantity: estimate(frame, quantity))
    return table.rename(columns={"seeds": "runs"})


def _slowest(config: Config, drawn: ResidualParameters, tokens: Tensor, targets: Tensor) -> Tensor:
    r""":math:`F_0 - \|r_fZ - Y\|_F\,u_{nT}w^\top` with the last left singular vector of
    :math:`Z_0` and w along the first target, so that the error is as large as before.
    """
    Z = layers(drawn, tokens, config.layer).Z
    left = torch.linalg.svd(Z.flatten(-3, -2), full_matrices=False).U[:, -1]
    along = targets.flatten()[: config.dimension]
    size = torch.linalg.vector_norm(Z - targets) / torch.linalg.vector_norm(along)
    return Z - (size * left[:, None] * along).reshape(Z.shape)
