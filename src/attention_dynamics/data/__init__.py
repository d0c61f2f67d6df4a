r"""Random streams, tokens in the unit ball, windows of an autoregressive series."""

from attention_dynamics.data.autoregressive import (
    Forecasting,
    Windows,
    autoregressive_series,
    autoregressive_task,
    forecasting_task,
    position_features,
    split_windows,
    stationary_variance,
    targets_seen,
)
from attention_dynamics.data.streams import generator, stream_key, stream_seed
from attention_dynamics.data.tokens import (
    Law,
    check_token_norms,
    query_vector,
    rescale_tokens,
    unit_ball_tokens,
)

__all__ = [
    "Forecasting",
    "Law",
    "Windows",
    "autoregressive_series",
    "autoregressive_task",
    "check_token_norms",
    "forecasting_task",
    "generator",
    "position_features",
    "query_vector",
    "rescale_tokens",
    "split_windows",
    "stationary_variance",
    "stream_key",
    "stream_seed",
    "targets_seen",
    "unit_ball_tokens",
]
