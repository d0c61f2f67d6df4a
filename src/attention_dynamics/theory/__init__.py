r"""Constants, bounds, kernels, transport maps and linearisation of the shallow Transformer."""

from attention_dynamics.theory.approximation import (
    ApproximationBound,
    approximation_bound,
    target_bound,
    value_radius,
    value_radius_bound,
)
from attention_dynamics.theory.bounds import (
    UNIT_BALL,
    IndRNNGradientBounds,
    InputBounds,
    NetworkConstants,
    indrnn_gradient_bounds,
    input_bounds,
    network_constants,
)
from attention_dynamics.theory.constants import (
    KAPPA_STAR,
    activation_curvature,
    block_curvature,
    block_slope,
    covariance_trace_bound,
    head_lipschitz,
    head_smoothness,
    third_cumulant_bound,
)
from attention_dynamics.theory.erf_kernel import erf_kernel
from attention_dynamics.theory.kernels import (
    Spectrum,
    TangentKernel,
    empirical_kernel,
    empirical_kernel_total,
    kernel_vector_product,
    spectrum,
)
from attention_dynamics.theory.limit_kernel import LimitKernel, limit_kernel
from attention_dynamics.theory.linearisation import (
    AdversarialPerturbation,
    adversarial_perturbation,
    linearisation_error,
    linearised,
    random_perturbation,
)
from attention_dynamics.theory.teacher import Teacher, TeacherValues
from attention_dynamics.theory.transport import (
    ApproximationError,
    MultiAnchorTransport,
    TransportNorms,
    approximation_error,
    head_contributions,
    random_multi_anchor,
    transported_function,
)

__all__ = [
    "KAPPA_STAR",
    "UNIT_BALL",
    "AdversarialPerturbation",
    "ApproximationBound",
    "ApproximationError",
    "IndRNNGradientBounds",
    "InputBounds",
    "LimitKernel",
    "MultiAnchorTransport",
    "NetworkConstants",
    "Spectrum",
    "TangentKernel",
    "Teacher",
    "TeacherValues",
    "TransportNorms",
    "activation_curvature",
    "adversarial_perturbation",
    "approximation_bound",
    "approximation_error",
    "block_curvature",
    "block_slope",
    "covariance_trace_bound",
    "empirical_kernel",
    "empirical_kernel_total",
    "erf_kernel",
    "head_contributions",
    "head_lipschitz",
    "head_smoothness",
    "indrnn_gradient_bounds",
    "input_bounds",
    "kernel_vector_product",
    "limit_kernel",
    "linearisation_error",
    "linearised",
    "network_constants",
    "random_multi_anchor",
    "random_perturbation",
    "spectrum",
    "target_bound",
    "third_cumulant_bound",
    "transported_function",
    "value_radius",
    "value_radius_bound",
]
