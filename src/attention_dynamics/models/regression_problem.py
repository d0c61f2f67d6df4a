r"""The regression problem of softmax attention: target, covariances, noise; true or estimated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from attention_dynamics.models._regression_inputs import Factors, require_arguments
from attention_dynamics.models._spectrum import Spectrum
from attention_dynamics.validation import (
    known_truth,
    require_finite,
    require_floating,
    require_matrix,
    require_number,
    working_dtype,
)


@dataclass(frozen=True, eq=False)
class RegressionProblem:
    r"""
    .. math:: y = M_\star x + \epsilon, \quad \mathbb E\,x x^\top = \Sigma, \quad
        z_t \sim \mathcal N(0, S), \quad \operatorname{Cov}\epsilon = \sigma_\epsilon^2 I.

    ``target`` (\*batch, m, d) is :math:`M_\star`, ``query_covariance`` (\*batch, d, d) is
    :math:`\Sigma`, ``token_covariance`` (\*batch, k, k) is :math:`S`, ``noise`` the standard
    deviation :math:`\sigma_\epsilon`, a number or one a batch entry. A singular covariance is
    allowed until its inverse is asked for. Raises ValueError for shapes that do not fit, entries
    that are not finite, a covariance that is not symmetric or has a negative eigenvalue, negative
    noise; TypeError for dtypes.
    """

    target: Float[Tensor, "*batch m d"]
    query_covariance: Float[Tensor, "*batch d d"]
    token_covariance: Float[Tensor, "*batch k k"]
    noise: float | Float[Tensor, "*batch"] = 0.0

    def __post_init__(self) -> None:
        require_matrix("target", self.target, ("m", "d"))
        require_floating("target", self.target)
        require_finite("target", self.target)
        for name, symbol, size in (
            ("query_covariance", "d", self.dimension),
            ("token_covariance", "k", self.context_dimension),
        ):
            value = getattr(self, name)
            require_matrix(name, value, (symbol, symbol), {symbol: size})
            require_floating(name, value, self.target.dtype)
            require_finite(name, value)
        if isinstance(self.noise, Tensor):
            require_finite("noise", self.noise)
            if known_truth((self.noise < 0).any()):
                raise ValueError(
                    f"noise: expected standard deviations >= 0, got {self.noise.min().item()}"
                )
        else:
            require_number("noise", self.noise, remedy="it is a standard deviation")
        self._query.require_covariance("query_covariance")
        self._token.require_covariance("token_covariance")

    @cached_property
    def _query(self) -> Spectrum:
        return Spectrum(self.query_covariance)

    @cached_property
    def _token(self) -> Spectrum:
        return Spectrum(self.token_covariance)

    @property
    def outputs(self) -> int:
        """The number m of outputs."""
        return self.target.shape[-2]

    @property
    def dimension(self) -> int:
        """The dimension d of a query."""
        return self.target.shape[-1]

    @property
    def context_dimension(self) -> int:
        """The dimension k of a token, which is the latent width of the factors."""
        return self.token_covariance.shape[-1]

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """The leading axes, broadcast."""
        noise = self.noise.shape if isinstance(self.noise, Tensor) else ()
        return tuple(
            torch.broadcast_shapes(
                self.target.shape[:-2],
                self.query_covariance.shape[:-2],
                self.token_covariance.shape[:-2],
                noise,
            )
        )

    @property
    def query_root(self) -> Float[Tensor, "*batch d d"]:
        r""":math:`\Sigma^{1/2}`, symmetric."""
        return self._query.root

    @property
    def token_root(self) -> Float[Tensor, "*batch k k"]:
        r""":math:`S^{1/2}`, symmetric."""
        return self._token.root

    @property
    def inverse_query_root(self) -> Float[Tensor, "*batch d d"]:
        r""":math:`\Sigma^{-1/2}`. Raises ValueError where :math:`\Sigma` is singular."""
        self._query.require_invertible("query_covariance", "take n >= d samples")
        return self._query.inverse_root

    @property
    def inverse_token_root(self) -> Float[Tensor, "*batch k k"]:
        r""":math:`S^{-1/2}`. Raises ValueError where :math:`S` is singular."""
        self._token.require_invertible("token_covariance", "take T > k tokens")
        return self._token.inverse_root

    @cached_property
    def whitened_target(self) -> Float[Tensor, "*batch m d"]:
        r""":math:`N_\star = M_\star \Sigma^{1/2}`."""
        return self.target @ self.query_root

    @cached_property
    def singular_values(self) -> Float[Tensor, "*batch r"]:
        r""":math:`\sigma_1 \ge \sigma_2 \ge \dots` of :math:`N_\star`, min(m, d) of them."""
        return torch.linalg.svdvals(self.whitened_target)

    @cached_property
    def rank(self) -> int:
        r"""The numerical rank of :math:`N_\star`, the largest over the batch."""
        values = self.singular_values
        floor = max(self.outputs, self.dimension) * torch.finfo(values.dtype).eps
        return int((values > floor * values[..., :1]).sum(dim=-1).max())

    @cached_property
    def latent_rank(self) -> int:
        r"""The rank of S, the largest that :math:`U V^\top` can have; the smallest of a batch."""
        return int(self._token.rank.min())

    @property
    def noise_loss(self) -> Float[Tensor, "*batch"]:
        r""":math:`\tfrac12 m_y \sigma_\epsilon^2`, which no choice of the factors takes away."""
        noise = torch.as_tensor(self.noise, dtype=self.target.dtype, device=self.target.device)
        return 0.5 * self.outputs * noise.square()

    @property
    def minimum(self) -> Float[Tensor, "*batch"]:
        r"""
        .. math:: \min_{A, B} L = \tfrac12 m \sigma_\epsilon^2
            + \tfrac12 \sum_{i > \operatorname{rank} S} \sigma_i(N_\star)^2.

        The sum is empty where the latent width reaches the rank of :math:`N_\star`.
        """
        squares = self.singular_values.square()
        place = torch.arange(squares.shape[-1], device=squares.device)
        beyond = place >= self._token.rank[..., None]
        return self.noise_loss + 0.5 * torch.where(beyond, squares, 0.0).sum(dim=-1)

    def whiten(self, factors: Factors) -> tuple[Tensor, Tensor]:
        r""":math:`(U, V) = (A S^{1/2}, \Sigma^{1/2} B S^{1/2})`.

        Shapes (\*batch, m, k) and (\*batch, d, k).
        """
        return factors.A @ self.token_root, self.query_root @ factors.B @ self.token_root

    def unwhiten(self, U: Float[Tensor, "*batch m k"], V: Float[Tensor, "*batch d k"]) -> Factors:
        r""":math:`(A, B) = (U S^{-1/2}, \Sigma^{-1/2} V S^{-1/2})`.

        Raises ValueError where a covariance is singular.
        """
        inverse = self.inverse_token_root
        return Factors(U @ inverse, self.inverse_query_root @ V @ inverse)

    def to(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> RegressionProblem:
        """The same problem on another device or in another dtype."""
        noise = self.noise
        return RegressionProblem(
            self.target.to(device=device, dtype=dtype),
            self.query_covariance.to(device=device, dtype=dtype),
            self.token_covariance.to(device=device, dtype=dtype),
            noise.to(device=device, dtype=dtype) if isinstance(noise, Tensor) else noise,
        )

    @classmethod
    def stack(cls, problems: Sequence[RegressionProblem]) -> RegressionProblem:
        """One problem with a new first batch axis, one entry a problem of the same sizes.

        Raises ValueError without problems.
        """
        if not problems:
            raise ValueError("problems: expected at least one RegressionProblem to stack, got none")
        first = problems[0]
        noise = [torch.as_tensor(p.noise, dtype=first.target.dtype) for p in problems]
        return cls(
            torch.stack([p.target for p in problems]),
            torch.stack([p.query_covariance for p in problems]),
            torch.stack([p.token_covariance for p in problems]),
            torch.stack([value.to(first.target.device) for value in noise]),
        )

    @classmethod
    def from_samples(
        cls,
        queries: Float[Tensor, "*batch n d"],
        contexts: Float[Tensor, "*batch T k"] | Float[Tensor, "*batch n T k"],
        targets: Float[Tensor, "*batch n m"],
        ridge: float = 0.0,
    ) -> RegressionProblem:
        r"""
        .. math:: \hat\Sigma = \tfrac1n X^\top X + \lambda I, \qquad
            \hat M = \tfrac1n Y^\top X\, \hat\Sigma^{-1}, \qquad
            \hat S = \overline{\tfrac1T \sum_t (z_t - \bar z)(z_t - \bar z)^\top} + \lambda I,

        with :math:`\lambda` the ``ridge``. The target is least squares (ridge regression where
        :math:`\lambda > 0`), the token covariance the softmax covariance at zero logits, averaged
        over the contexts where each sample has its own, and the noise the root mean square residual
        of an output: without a ridge ``noise_loss`` is the training loss of least squares.

        Raises ValueError where a sample covariance is singular (n < d, T <= k, or dependent
        coordinates) and no ridge is given, and as ``models.regression`` does for its arguments.
        """
        require_number("ridge", ridge)
        require_arguments(None, queries, contexts, targets)
        dtype = working_dtype(queries.dtype)
        queries, contexts, targets = (value.to(dtype) for value in (queries, contexts, targets))
        samples, dimension = queries.shape[-2:]
        length, context_dimension = contexts.shape[-2:]
        query_covariance = queries.mT @ queries / samples
        centred = contexts - contexts.mean(dim=-2, keepdim=True)
        token_covariance = centred.mT @ centred / length
        if contexts.ndim > queries.ndim:
            token_covariance = token_covariance.mean(dim=-3)
        spectra = []
        for name, covariance, remedy in (
            ("queries", query_covariance, f"n = {samples}, d = {dimension}: take n >= d samples"),
            ("contexts", token_covariance, f"T = {length}, k = {context_dimension}: take T > k"),
        ):
            identity = torch.eye(covariance.shape[-1], dtype=dtype, device=covariance.device)
            spectra.append(Spectrum(0.5 * (covariance + covariance.mT) + ridge * identity))
            spectra[-1].require_invertible(
                name, f"{remedy}, or give a ridge > 0", what="sample covariance"
            )
        moment = targets.mT @ queries / samples
        target = moment @ spectra[0].inverse
        residuals = targets - queries @ target.mT
        noise = residuals.square().mean(dim=(-2, -1)).sqrt()
        return cls(
            target,
            spectra[0].matrix,
            spectra[1].matrix,
            noise if noise.ndim else float(noise),
        )
