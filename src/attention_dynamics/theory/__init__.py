r"""Kernels, transport maps, linearisation, and the convergence theorem with its constants."""

from attention_dynamics.theory.a_priori import (
    a_priori_constants,
    mean_square_radius,
    mean_square_radius_bound,
)
from attention_dynamics.theory.approximation import (
    ApproximationBound,
    BernsteinBound,
    approximation_bound,
    bernstein_approximation_bound,
    head_second_moment,
    target_bound,
    value_radius,
    value_radius_bound,
)
from attention_dynamics.theory.bound_table import (
    Stops,
    bound_table,
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
from attention_dynamics.theory.calculator import BoundCalculator, NoProjection
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
from attention_dynamics.theory.convergence import (
    Decomposition,
    Ingredients,
    fast_form,
    paper_form,
    path_length,
    path_length_limit,
    steps_without_projection,
)
from attention_dynamics.theory.erf_kernel import erf_kernel
from attention_dynamics.theory.generalisation import (
    GeneralisationBound,
    expected_tangent_complexity,
    generalisation_bound,
    tangent_complexity,
)
from attention_dynamics.theory.kernel_controls import (
    linearised_attention_kernel,
    linearised_features,
    shared_attention_kernel,
)
from attention_dynamics.theory.kernel_flow import (
    kernel_descent,
    kernel_flow,
)
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
from attention_dynamics.theory.requirements import (
    Requirement,
    required_steps,
    required_width,
    requirement,
)
from attention_dynamics.theory.setting import ErrorBound, Setting, Start
from attention_dynamics.theory.teacher import Teacher, TeacherValues
from attention_dynamics.theory.trajectory import (
    DescentStep,
    Trajectory,
    descent_step,
    record_trajectory,
)
from attention_dynamics.theory.transport import (
    ApproximationError,
    MultiAnchorTransport,
    TransportNorms,
    approximation_error,
    head_contributions,
    random_multi_anchor,
    transported_function,
)
from attention_dynamics.theory.weight_decay import (
    decay_without_projection,
    decayed_form,
    effective_steps,
)

__all__ = [
    "KAPPA_STAR",
    "UNIT_BALL",
    "AdversarialPerturbation",
    "ApproximationBound",
    "ApproximationError",
    "BernsteinBound",
    "BoundCalculator",
    "Decomposition",
    "DescentStep",
    "ErrorBound",
    "GeneralisationBound",
    "IndRNNGradientBounds",
    "Ingredients",
    "InputBounds",
    "LimitKernel",
    "MultiAnchorTransport",
    "NetworkConstants",
    "NoProjection",
    "Requirement",
    "Setting",
    "Spectrum",
    "Start",
    "Stops",
    "TangentKernel",
    "Teacher",
    "TeacherValues",
    "Trajectory",
    "TransportNorms",
    "a_priori_constants",
    "activation_curvature",
    "adversarial_perturbation",
    "approximation_bound",
    "approximation_error",
    "bernstein_approximation_bound",
    "block_curvature",
    "block_slope",
    "bound_table",
    "covariance_trace_bound",
    "decay_without_projection",
    "decayed_form",
    "descent_step",
    "effective_steps",
    "empirical_kernel",
    "empirical_kernel_total",
    "erf_kernel",
    "expected_tangent_complexity",
    "fast_form",
    "generalisation_bound",
    "head_contributions",
    "head_lipschitz",
    "head_second_moment",
    "head_smoothness",
    "indrnn_gradient_bounds",
    "input_bounds",
    "kernel_descent",
    "kernel_flow",
    "kernel_vector_product",
    "limit_kernel",
    "linearisation_error",
    "linearised",
    "linearised_attention_kernel",
    "linearised_features",
    "mean_square_radius",
    "mean_square_radius_bound",
    "network_constants",
    "paper_form",
    "path_length",
    "path_length_limit",
    "random_multi_anchor",
    "random_perturbation",
    "record_trajectory",
    "required_steps",
    "required_width",
    "requirement",
    "shared_attention_kernel",
    "spectrum",
    "steps_without_projection",
    "tangent_complexity",
    "target_bound",
    "third_cumulant_bound",
    "transported_function",
    "value_radius",
    "value_radius_bound",
]
