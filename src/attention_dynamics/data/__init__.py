r"""Random streams, tokens in the unit ball, windows of an autoregressive series, real data."""

from attention_dynamics.data.autoregressive import (
    Forecasting,
    autoregressive_series,
    autoregressive_task,
    forecasting_task,
    position_features,
    stationary_variance,
)
from attention_dynamics.data.real import (
    DigitImages,
    RealSeries,
    RealTask,
    Sequences,
    digit_images,
    real_series,
    real_task,
)
from attention_dynamics.data.streams import generator, stream_key, stream_seed
from attention_dynamics.data.tokens import (
    Law,
    check_token_norms,
    query_vector,
    rescale_tokens,
    unit_ball_tokens,
)
from attention_dynamics.data.windows import Windows, split_windows, targets_seen

__all__ = [
    "DigitImages",
    "Forecasting",
    "Law",
    "RealSeries",
    "RealTask",
    "Sequences",
    "Windows",
    "autoregressive_series",
    "autoregressive_task",
    "check_token_norms",
    "digit_images",
    "forecasting_task",
    "generator",
    "position_features",
    "query_vector",
    "real_series",
    "real_task",
    "rescale_tokens",
    "split_windows",
    "stationary_variance",
    "stream_key",
    "stream_seed",
    "targets_seen",
    "unit_ball_tokens",
]
