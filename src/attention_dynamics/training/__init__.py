r"""Projection sets and projected gradient descent."""

from attention_dynamics.training.descent import (
    DescentConfig,
    DescentResult,
    projected_gradient_descent,
)
from attention_dynamics.training.objective import Objective
from attention_dynamics.training.projection import ActiveHeads, ProjectionSet, Radii

__all__ = [
    "ActiveHeads",
    "DescentConfig",
    "DescentResult",
    "Objective",
    "ProjectionSet",
    "Radii",
    "projected_gradient_descent",
]
