r"""Derivatives of the shallow Transformer in closed form; none passes backward through softmax.

With :math:`s = U \cdot a`, :math:`a = X\alpha`, :math:`r = M U` and the logit scale :math:`\gamma`,

.. math:: \partial_c f = m^{-1/2} \sigma(s), \quad \partial_U f = m^{-1/2} c\,\sigma'(s)\,a, \quad
    \partial_W f = m^{-1/2} \gamma\, c\,\sigma'(s)\, r q^\top.

The arguments common to all functions, and their errors, are those of ``models.shallow``. Source:
arXiv 2601.16514; the derivatives are derived in the chapter on gradients.
"""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from attention_dynamics.models import _pass
from attention_dynamics.models._network import like_parameters, prepare, require_per_sample
from attention_dynamics.models._pass import Query
from attention_dynamics.models.activations import Activation
from attention_dynamics.models.engines import selection
from attention_dynamics.models.engines.reference import attend
from attention_dynamics.models.parameters import Parameters


def vjp(
    parameters: Parameters,
    tokens: Float[Tensor, "n T d"],
    cotangent: Float[Tensor, " n"],
    *,
    query: Query,
    activation: str | Activation = "tanh",
    scale: float = 1.0,
    mask: Bool[Tensor, "n T"] | None = None,
    chunk: int | None = None,
    engine: str = "auto",
    validate: bool = True,
) -> Parameters:
    r"""
    .. math:: \sum_j g_j\, \nabla_\phi f(X_j; \phi), \qquad g = \text{cotangent}.

    Returns c (m,), U (m, d), W (m, d, d) in closed form, in one pass over the tokens.
    """
    sigma, inputs, parameters = prepare(
        parameters, tokens, query, activation, mask, validate, chunk
    )
    require_per_sample("cotangent", cotangent, inputs.tokens, validate)
    g = cotangent.to(inputs.tokens.dtype)
    chosen = selection.choose(engine, inputs, parameters.heads, *parameters, g)
    return chosen.vjp(inputs, parameters, sigma, scale, g, chunk=chunk)


def jvp(
    parameters: Parameters,
    tokens: Float[Tensor, "n T d"],
    tangent: Parameters,
    *,
    query: Query,
    activation: str | Activation = "tanh",
    scale: float = 1.0,
    mask: Bool[Tensor, "n T"] | None = None,
    chunk: int | None = None,
    engine: str = "auto",
    validate: bool = True,
) -> Float[Tensor, " n"]:
    r"""
    .. math:: \langle \nabla f(X_j; \phi), v \rangle = m^{-1/2} \sum_i v_{c,i}\,\sigma(s_i)
        + c_i\,\sigma'(s_i) \bigl(v_{U,i} \cdot a_i + r_i \cdot \gamma\, v_{W,i}\, q\bigr).

    ``tangent`` holds :math:`v = (v_c, v_U, v_W)` in the shape of the parameters. Returns (n,).
    At the symmetric initialisation half of the heads are computed.
    """
    sigma, inputs, parameters = prepare(
        parameters, tokens, query, activation, mask, validate, chunk
    )
    tangent = like_parameters("tangent", tangent, parameters)
    if selection.plain(*parameters, *tangent) and parameters.is_symmetric():
        parameters, tangent = parameters.half(), tangent.folded()
    _, U, W = parameters
    chosen = selection.choose(engine, inputs, parameters.heads, *parameters, *tangent)
    s, slope = chosen.slopes(inputs, U, W, tangent.U, tangent.W, scale, chunk=chunk)
    value, first = sigma.value_and_first(s)
    terms = tangent.c * value + parameters.c * first * slope
    return terms.sum(dim=-1) * parameters.heads**-0.5


def per_sample_gradients(
    parameters: Parameters,
    tokens: Float[Tensor, "n T d"],
    *,
    query: Query,
    activation: str | Activation = "tanh",
    scale: float = 1.0,
    mask: Bool[Tensor, "n T"] | None = None,
    engine: str = "auto",
    validate: bool = True,
) -> Parameters:
    r"""
    .. math:: \nabla_\phi f(X_j; \phi), \quad j = 1..n.

    Returns c (n, m), U (n, m, d), W (n, m, d, d): the memory is n times that of the parameters, so
    this is for tests, teaching and small n.
    """
    sigma, inputs, parameters = prepare(parameters, tokens, query, activation, mask, validate)
    chosen = selection.choose(engine, inputs, parameters.heads, *parameters)
    s, a, r = chosen.features(inputs, parameters.U, parameters.W, scale)
    norm = parameters.heads**-0.5
    value, first = sigma.value_and_first(s)
    factor = (norm * parameters.c * first)[..., None]
    q = inputs.query.expand(inputs.tokens.shape[0], -1)
    return Parameters(
        norm * value, factor * a, (scale * factor * r)[..., None] * q[:, None, None, :]
    )


def head_second_derivative(
    parameters: Parameters,
    tokens: Float[Tensor, "n T d"],
    V: Float[Tensor, "m d"],
    Z: Float[Tensor, "m d d"],
    *,
    query: Query,
    activation: str | Activation = "tanh",
    scale: float = 1.0,
    mask: Bool[Tensor, "n T"] | None = None,
    validate: bool = True,
) -> Float[Tensor, "n m"]:
    r"""
    .. math:: \frac{d^2}{d\varepsilon^2}\Big|_0\, \sigma\bigl(s(U + \varepsilon V,
        W + \varepsilon Z)\bigr) = \sigma''(s)\,(s')^2 + \sigma'(s)\,s'',

    .. math:: s' = V \cdot \mu + U^\top M p, \qquad
        s'' = 2\,V^\top M p + \kappa_3(U, p, p), \qquad p = \gamma Z q.

    Returns (n, m), one number a sample and head; c plays no part. Source: the head calculus of the
    chapter on gradients.
    """
    sigma, inputs, parameters = prepare(parameters, tokens, query, activation, mask, validate)
    direction = like_parameters("(V, Z)", Parameters(parameters.c, V, Z), parameters)
    alpha, projections, s = attend(inputs, parameters.U, parameters.W, scale)
    along_u = projections - s[..., None]
    directions = _pass.head_queries(direction.W, inputs.query, scale)
    along_p = _pass.project(inputs.tokens, directions).mT
    along_p = along_p - (alpha * along_p).sum(dim=-1, keepdim=True)
    along_v = _pass.project(inputs.tokens, direction.U).mT
    first = (alpha * (along_v + along_u * along_p)).sum(dim=-1)
    second = (alpha * along_p * (2 * along_v + along_u * along_p)).sum(dim=-1)
    return sigma.second(s) * first * first + sigma.first(s) * second


def loss_and_gradients(
    parameters: Parameters,
    tokens: Float[Tensor, "n T d"],
    targets: Float[Tensor, " n"],
    *,
    query: Query,
    activation: str | Activation = "tanh",
    scale: float = 1.0,
    mask: Bool[Tensor, "n T"] | None = None,
    chunk: int | None = None,
    engine: str = "auto",
    validate: bool = True,
) -> tuple[Float[Tensor, ""], Parameters]:
    r"""
    .. math:: L_n = \frac1n \sum_j (f_j - y_j)^2, \qquad
        \nabla L_n = \frac2n \sum_j (f_j - y_j)\, \nabla f(X_j; \phi).

    Returns the loss, 0-d, and the gradients in the shape of the parameters, in closed form and in
    a single pass: each block of samples is attended once and dropped.
    """
    sigma, inputs, parameters = prepare(
        parameters, tokens, query, activation, mask, validate, chunk
    )
    require_per_sample("targets", targets, inputs.tokens, validate)
    y = targets.to(inputs.tokens.dtype)
    chosen = selection.choose(engine, inputs, parameters.heads, *parameters, y)
    values, gradients = chosen.step(inputs, parameters, sigma, scale, y, chunk=chunk)
    return (values - y).square().mean(), gradients
