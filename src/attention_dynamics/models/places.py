r"""Tokens of which most coordinates say only where in the sequence a token stands.

.. math:: x_{jt} = I z_{jt} + p_t, \qquad q_j = q + I \zeta_j,

where I puts :math:`e` numbers into the coordinates in which samples differ. All else is the same in
every sample: it is projected on a head once a call, and not once a sample. The reduction is exact.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

#: At most this many own coordinates, at least that many shared ones.
MOST_OWN, LEAST_SHARED = 2, 2
#: Up to so many numbers T m, which are kept of a sample and of the gradients in the places.
MOST_KEPT = 2**16


class Places(NamedTuple):
    r"""
    .. math:: x_{jt} = I z_{jt} + p_t, \qquad q_j = q + I \zeta_j.

    ``own`` are the coordinates of z; ``values`` z (n, T, e); ``places`` p (T, d), 0 in the own
    coordinates. ``zeta`` (n, e) and ``query`` q (d,) are None without a query; ``zeta`` alone is
    None where one query serves all samples.
    """

    own: Int[Tensor, " e"]
    values: Float[Tensor, "n T e"]
    places: Float[Tensor, "T d"]
    zeta: Float[Tensor, "n e"] | None
    query: Float[Tensor, " d"] | None

    def serve(self, heads: int) -> bool:
        """Whether what a kernel keeps for each place and head (or recurrent unit) stays small."""
        return self.values.shape[1] * heads <= MOST_KEPT

    def order(self) -> Int[Tensor, " d"]:
        """All coordinates, the own ones first."""
        shared = torch.ones(self.places.shape[1], dtype=torch.bool)
        shared[self.own] = False
        return torch.cat((self.own, shared.nonzero()[:, 0]))

    def rows(self, index: Tensor | slice) -> Places:
        """The samples ``index``; it need not be the coarsest split of these alone."""
        zeta = None if self.zeta is None else self.zeta[index].contiguous()
        return self._replace(values=self.values[index].contiguous(), zeta=zeta)


def find_places(
    tokens: Float[Tensor, "n T d"],
    query: Float[Tensor, " d"] | Float[Tensor, "n d"] | None = None,
) -> Places | None:
    r"""Split tokens and queries, or None where that does not pay or cannot be done.

    It pays for at most two own coordinates and at least two shared ones, and can be done where
    queries differ in no coordinate but the own ones. One pass over the tokens.
    """
    samples, _, dimension = tokens.shape
    if samples < 2 or dimension <= LEAST_SHARED:
        return None
    # most tokens are told from places by two samples
    if int((tokens[0] != tokens[-1]).any(dim=0).sum()) > MOST_OWN:
        return None
    differs = (tokens != tokens[:1]).flatten(0, 1).any(dim=0)
    own = differs.nonzero()[:, 0]
    if not 0 < len(own) <= MOST_OWN or dimension - len(own) < LEAST_SHARED:
        return None
    zeta = None
    if query is not None and query.ndim == 2:
        if bool((query != query[:1])[:, ~differs].any()):
            return None
        zeta, query = query[:, own].contiguous(), query[0].masked_fill(differs, 0)
    places = tokens[0].masked_fill(differs, 0)
    return Places(own, tokens[..., own].contiguous(), places, zeta, query)
