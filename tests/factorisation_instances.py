"""Small regression problems and factors that the tests of descent share."""

import torch

from attention_dynamics.models.regression import Factors
from attention_dynamics.models.regression_problem import RegressionProblem


def covariance(dimension, condition, stream, dtype=torch.float64):
    """A covariance with mean eigenvalue 1 and the given condition number."""
    rotation = torch.linalg.qr(torch.randn(dimension, dimension, generator=stream)).Q.to(dtype)
    spread = torch.linspace(0, 1, dimension, dtype=dtype)
    values = torch.as_tensor(condition, dtype=dtype) ** spread
    return (rotation * (values / values.mean())) @ rotation.T


def problem(m=3, d=4, k=3, *, condition=10.0, seed=0, batch=(), dtype=torch.float64):
    """A problem with a Gaussian target and different covariances of queries and tokens."""
    stream = torch.Generator().manual_seed(seed)
    target = torch.randn(*batch, m, d, generator=stream, dtype=torch.float64).to(dtype)
    queries, tokens = (covariance(size, condition, stream, dtype) for size in (d, k))
    return RegressionProblem(
        target, queries.expand(*batch, d, d).clone(), tokens.expand(*batch, k, k).clone(), 0.1
    )


def factors(m=3, d=4, k=3, *, seed=0, size=1.0, batch=(), dtype=torch.float64):
    """Gaussian factors."""
    stream = torch.Generator().manual_seed(1000 + seed)
    A, B = (
        size * torch.randn(*batch, rows, k, generator=stream, dtype=torch.float64)
        for rows in (m, d)
    )
    return Factors(A.to(dtype), B.to(dtype))
