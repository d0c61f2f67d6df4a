r"""Random streams and tokens in the unit ball."""

from attention_dynamics.data.streams import generator, stream_key, stream_seed
from attention_dynamics.data.tokens import (
    Law,
    check_token_norms,
    query_vector,
    rescale_tokens,
    unit_ball_tokens,
)

__all__ = [
    "Law",
    "check_token_norms",
    "generator",
    "query_vector",
    "rescale_tokens",
    "stream_key",
    "stream_seed",
    "unit_ball_tokens",
]
