"""Softmax attention for regression: values, closed-form gradients, batches, errors."""

import pytest
import torch
from regression_instances import (
    Instance,
    loss_by_formula,
    output_by_formula,
    weights_by_formula,
)

from attention_dynamics.models import attention, regression
from attention_dynamics.models.regression import Factors

TIGHT = {"rtol": 1e-12, "atol": 1e-12}
BOTH = pytest.mark.parametrize("shared", [True, False])


@BOTH
def test_output_and_loss_are_the_formulas(shared):
    instance = Instance(shared=shared)
    expected = torch.stack([output_by_formula(instance, i) for i in range(instance.samples)])
    torch.testing.assert_close(regression.forward(*instance.arguments), expected, **TIGHT)
    loss = regression.loss(*instance.arguments, instance.targets)
    torch.testing.assert_close(loss, loss_by_formula(instance), **TIGHT)
    pooled = regression.attend(*instance.arguments)
    torch.testing.assert_close(pooled @ instance.factors.A.mT, expected, **TIGHT)


@BOTH
@pytest.mark.parametrize("k", [1, 3, 7])
def test_the_closed_form_is_the_gradient_of_the_formula(shared, k):
    instance = Instance(shared=shared, context_dimension=k)
    loss, gradients = regression.loss_and_gradients(*instance.arguments, instance.targets)
    instance.factors.map(lambda block: block.requires_grad_())
    expected = loss_by_formula(instance)
    torch.testing.assert_close(loss, expected.detach(), **TIGHT)
    torch.testing.assert_close(
        tuple(gradients), torch.autograd.grad(expected, instance.factors), **TIGHT
    )


def test_a_shared_context_is_one_context_repeated():
    shared = Instance()
    own = shared.contexts.expand(shared.samples, -1, -1)
    for function in (regression.loss_and_gradients, regression.loss):
        expected = function(*shared.arguments, shared.targets)
        actual = function(shared.factors, shared.queries, own, shared.targets)
        torch.testing.assert_close(actual, expected, **TIGHT)


@BOTH
def test_the_slopes_are_the_covariance_product_of_attention(shared):
    # One sample: the gradient in B is x (M A' r)', and M is that of the attention module.
    instance = Instance(samples=1, shared=shared)
    X = instance.contexts.reshape(1, instance.length, -1)
    b = instance.queries @ instance.factors.B
    weights = attention.attention_weights((b @ X[0].mT)[None])
    mu = attention.pooled_token(weights, X)[0]
    residual = mu @ instance.factors.A.mT - instance.targets
    product = attention.covariance_product(weights, X, residual @ instance.factors.A)[0]
    _, gradients = regression.loss_and_gradients(*instance.arguments, instance.targets)
    torch.testing.assert_close(gradients.A, residual.mT @ mu, **TIGHT)
    torch.testing.assert_close(gradients.B, instance.queries.mT @ product, **TIGHT)


@BOTH
@pytest.mark.parametrize("batch", [(3,), (2, 3)])
def test_a_batch_is_its_entries(shared, batch):
    instance = Instance(shared=shared, batch=batch)
    loss, gradients = regression.loss_and_gradients(*instance.arguments, instance.targets)
    pooled = regression.attend(*instance.arguments)
    tokens = regression.participation_ratio(*instance.arguments)
    assert loss.shape == batch
    for index in torch.cartesian_prod(*map(torch.arange, batch)).reshape(-1, len(batch)).tolist():
        at, one = tuple(index), instance.entry(*index)
        expected = regression.loss_and_gradients(*one.arguments, one.targets)
        actual = (loss[at], gradients.map(lambda block, at=at: block[at]))
        torch.testing.assert_close(actual, expected, **TIGHT)
        torch.testing.assert_close(pooled[at], regression.attend(*one.arguments), **TIGHT)
        ratio = regression.participation_ratio(*one.arguments)
        torch.testing.assert_close(tokens[at], ratio, **TIGHT)


@BOTH
def test_many_factors_may_share_one_sample(shared):
    one, many = Instance(shared=shared), Instance(shared=shared, batch=(3,))
    data = (one.queries, one.contexts, one.targets)
    loss, gradients = regression.loss_and_gradients(many.factors, *data)
    for index in range(3):
        factors = many.factors.map(lambda block, index=index: block[index])
        expected = regression.loss_and_gradients(factors, *data)
        actual = (loss[index], gradients.map(lambda block, index=index: block[index]))
        torch.testing.assert_close(actual, expected, **TIGHT)


@BOTH
@pytest.mark.parametrize("chunk", [1, 2, 5, 9])
def test_blocks_of_samples_change_nothing(shared, chunk):
    instance = Instance(shared=shared)
    for function in (regression.loss, regression.loss_and_gradients):
        whole = function(*instance.arguments, instance.targets)
        parts = function(*instance.arguments, instance.targets, chunk=chunk)
        torch.testing.assert_close(parts, whole, **TIGHT)
    for function in (regression.attend, regression.forward, regression.participation_ratio):
        parts = function(*instance.arguments, chunk=chunk)
        torch.testing.assert_close(parts, function(*instance.arguments), **TIGHT)


def test_the_memory_of_a_shared_context_is_that_of_a_block(monkeypatch):
    seen = []
    plain = attention.attention_weights

    def watched(logits, mask=None):
        seen.append(logits.shape)
        return plain(logits, mask)

    monkeypatch.setattr(attention, "attention_weights", watched)
    instance = Instance(samples=400, length=1024)
    regression.loss_and_gradients(*instance.arguments, instance.targets)
    assert len(seen) > 1
    assert all(shape.numel() <= 2**17 for shape in seen)


@BOTH
def test_without_checks_the_numbers_are_the_same(shared):
    instance = Instance(shared=shared)
    arguments = (*instance.arguments, instance.targets)
    checked = regression.loss_and_gradients(*arguments)
    unchecked = regression.loss_and_gradients(*arguments, validate=False)
    torch.testing.assert_close(unchecked, checked, rtol=0, atol=0)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_other_precisions(shared, dtype):
    exact = Instance(shared=shared)
    instance = Instance(shared=shared, dtype=dtype)
    loss, gradients = regression.loss_and_gradients(*instance.arguments, instance.targets)
    assert {block.dtype for block in (loss, *gradients)} == {torch.float32}
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    expected, _ = regression.loss_and_gradients(*exact.arguments, exact.targets)
    torch.testing.assert_close(loss.double(), expected, rtol=tolerance, atol=tolerance)


def test_huge_logits_pick_one_token():
    instance = Instance()
    factors = instance.factors._replace(B=1e30 * instance.factors.B)
    data = (instance.queries, instance.contexts)
    loss, gradients = regression.loss_and_gradients(factors, *data, instance.targets)
    assert torch.isfinite(loss)
    assert gradients.B.abs().max() == 0
    assert torch.equal(
        regression.participation_ratio(factors, *data), torch.ones(5, dtype=torch.float64)
    )
    pooled = regression.attend(factors, *data)
    apart = (pooled[:, None] - instance.contexts).abs().sum(-1).amin(-1)
    assert apart.max() < 1e-14


@BOTH
def test_the_participation_ratio_is_its_formula(shared):
    instance = Instance(shared=shared)
    actual = regression.participation_ratio(*instance.arguments)
    for i in range(instance.samples):
        alpha, _ = weights_by_formula(instance, i)
        torch.testing.assert_close(actual[i], 1 / (alpha**2).sum(), **TIGHT)


def test_effective_sample_size():
    instance = Instance()
    S = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
    actual = regression.effective_sample_size(instance.factors, instance.queries, S, 100)
    for i, x in enumerate(instance.queries):
        b = instance.factors.B.mT @ x
        torch.testing.assert_close(actual[i], 100 * torch.exp(-(b @ S @ b)), **TIGHT)


def test_the_effective_sample_size_is_the_participation_ratio_of_long_contexts():
    g = torch.Generator().manual_seed(0)
    tokens = torch.randn((200_000, 2), generator=g, dtype=torch.float64)
    factors = Factors(torch.eye(2).double(), 0.5 * torch.eye(2).double())
    queries = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    measured = regression.participation_ratio(factors, queries, tokens)
    law = regression.effective_sample_size(factors, queries, torch.eye(2).double(), 200_000)
    torch.testing.assert_close(measured, law, rtol=0.02, atol=0)


def test_functions_of_factors():
    factors = Instance(batch=(2, 3)).factors
    assert factors.batch_shape == (2, 3)
    assert factors.to(dtype=torch.float32).A.dtype == torch.float32
    total = factors.zip(factors, torch.add)
    assert torch.equal(total.B, 2 * factors.B)
    mixed = Factors(torch.zeros(4, 3, 2), torch.zeros(5, 2))
    assert mixed.batch_shape == (4,)


@BOTH
def test_the_functions_map_over_a_vmap(shared):
    many = Instance(shared=shared, batch=(3,))
    arguments = (many.factors, many.queries, many.contexts, many.targets)
    mapped = torch.func.vmap(regression.loss_and_gradients)(*arguments)
    torch.testing.assert_close(mapped, regression.loss_and_gradients(*arguments), **TIGHT)


@BOTH
def test_nothing_is_bound_to_the_cpu(shared):
    # A tensor made on the CPU in between would refuse to meet one on the meta device.
    instance = Instance(shared=shared)
    arguments = (instance.factors, instance.queries, instance.contexts, instance.targets)
    factors, *data = (value.to(device="meta") for value in arguments)
    for validate in (True, False):
        loss, gradients = regression.loss_and_gradients(factors, *data, validate=validate)
        assert {block.device.type for block in (loss, *gradients)} == {"meta"}
    ratio = regression.participation_ratio(factors, *data[:2])
    S = torch.eye(2, dtype=torch.float64, device="meta")
    tokens = regression.effective_sample_size(factors, data[0], S, 9)
    assert ratio.shape == tokens.shape == (5,)


def refused(message, error=ValueError, **changes):
    instance = Instance()
    arguments = {
        "factors": instance.factors, "queries": instance.queries,
        "contexts": instance.contexts, "targets": instance.targets,
    } | changes  # fmt: skip
    with pytest.raises(error, match=message):
        regression.loss_and_gradients(**arguments)


def test_errors_name_the_argument():
    x = Instance()
    zeros = torch.zeros
    refused(r"factors.B: .*\(\*batch, d, k\) with k = 2, got \(4, 3\)",
            factors=Factors(x.factors.A, zeros(4, 3).double()))  # fmt: skip
    refused(r"queries: .* d = 4, got \(5, 3\)", queries=zeros(5, 3).double())
    refused(r"contexts: .* k = 2, got \(6, 3\); a shared context", contexts=zeros(6, 3).double())
    refused(r"contexts: .* n = 5, .* got \(4, 6, 2\)", contexts=zeros(4, 6, 2).double())
    refused(r"contexts: .* 2 axes .* 3 .* got shape \(1, 1, 6, 2\)",
            contexts=zeros(1, 1, 6, 2).double())  # fmt: skip
    refused(r"targets: .* n = 5, m = 3, got \(5, 2\)", targets=zeros(5, 2).double())
    refused(r"queries: expected a torch.Tensor", TypeError, queries=[1.0])
    refused(r"targets: has dtype torch.float32", TypeError, targets=x.targets.float())
    refused(r"contexts: expected at least one entry", contexts=zeros(0, 2).double())
    refused(r"factors.A: expected finite values, got nan .* diverged",
            factors=x.factors._replace(A=x.factors.A * torch.nan))  # fmt: skip
    refused(r"queries: expected finite values, got inf", queries=x.queries * torch.inf)
    with pytest.raises(ValueError, match="chunk: expected an integer >= 1, got 0"):
        regression.attend(*x.arguments, chunk=0)
    with pytest.raises(ValueError, match="length: expected an integer >= 1, got 0"):
        regression.effective_sample_size(x.factors, x.queries, torch.eye(2).double(), 0)
    with pytest.raises(ValueError, match=r"token_covariance: .* k = 2, got \(3, 3\)"):
        regression.effective_sample_size(x.factors, x.queries, torch.eye(3).double(), 9)


def test_logits_that_overflow_are_located():
    instance = Instance()
    refused(
        "logits: the largest kept logit",
        factors=instance.factors._replace(B=1e308 * instance.factors.B.sign()),
        contexts=1e10 * instance.contexts,
    )
