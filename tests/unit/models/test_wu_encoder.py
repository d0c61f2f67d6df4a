"""The encoder-only neighbour: closed forms against autograd, batches against loops, its limits."""

import pytest
import torch

from attention_dynamics.data.streams import generator
from attention_dynamics.models import wu_encoder
from attention_dynamics.models.wu_encoder import EncoderParameters, initial_parameters


def instance(seed=0, samples=5, length=4, dimension=3, width=7):
    stream = generator(seed, "encoder")
    tokens = torch.randn(samples, length, dimension, generator=stream, dtype=torch.float64)
    targets = torch.randn(samples, generator=stream, dtype=torch.float64)
    return initial_parameters(width, dimension, generator=stream), tokens, targets


def written_out(parameters, tokens, exponent):
    """The formula of the module, sample by sample, token by token."""
    Q, K, V, output = parameters
    width = len(output)
    values = []
    for X in tokens:
        total = torch.zeros(width, dtype=X.dtype)
        for query in X:
            logits = torch.stack([(Q @ query) @ (K @ key) for key in X]) * width**-exponent
            weights = torch.softmax(logits, dim=0)
            total = total + torch.relu(V @ (weights @ X))
        values.append(output @ total / len(X) / width**0.5)
    return torch.stack(values)


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("length", "width"), [(1, 1), (4, 7), (6, 2)])
def test_forward_is_the_formula(exponent, length, width):
    parameters, tokens, _ = instance(length=length, width=width)
    found = wu_encoder.forward(parameters, tokens, logit_exponent=exponent)
    torch.testing.assert_close(
        found, written_out(parameters, tokens, exponent), rtol=1e-13, atol=1e-14
    )


@pytest.mark.parametrize("exponent", [0.5, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_gradients_are_those_of_autograd(exponent, seed):
    parameters, tokens, targets = instance(seed, length=1 + seed)
    leaves = EncoderParameters(*(block.clone().requires_grad_() for block in parameters))
    loss = (written_out(leaves, tokens, exponent) - targets).square().mean()
    expected = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    found_loss, found = wu_encoder.loss_and_gradients(
        parameters, tokens, targets, logit_exponent=exponent
    )
    torch.testing.assert_close(found_loss, loss.detach(), rtol=1e-13, atol=0)
    for block, other in zip(found, expected, strict=True):
        torch.testing.assert_close(block, other, rtol=1e-12, atol=1e-14)


def test_kernel_blocks_are_gram_matrices_of_autograd_gradients():
    parameters, tokens, _ = instance()
    kernel = wu_encoder.tangent_kernel(parameters, tokens, logit_exponent=0.5)
    leaves = EncoderParameters(*(block.clone().requires_grad_() for block in parameters))
    values = wu_encoder.forward(leaves, tokens, logit_exponent=0.5)
    rows = [torch.autograd.grad(value, leaves, retain_graph=True) for value in values]
    for index, block in enumerate(kernel):
        gradients = torch.stack([row[index].flatten() for row in rows])
        torch.testing.assert_close(block, gradients @ gradients.T, rtol=1e-11, atol=1e-14)
    torch.testing.assert_close(kernel.total(), sum(kernel))


def test_a_batch_of_seeds_is_the_loop_over_seeds():
    _, tokens, targets = instance()
    single = [instance(seed)[0] for seed in range(3)]
    batch = EncoderParameters(*(torch.stack(blocks) for blocks in zip(*single, strict=True)))
    loss, gradients = wu_encoder.loss_and_gradients(batch, tokens, targets, logit_exponent=0.5)
    kernel = wu_encoder.tangent_kernel(batch, tokens, logit_exponent=0.5)
    for index, parameters in enumerate(single):
        one_loss, one = wu_encoder.loss_and_gradients(
            parameters, tokens, targets, logit_exponent=0.5
        )
        torch.testing.assert_close(loss[index], one_loss, rtol=1e-13, atol=0)
        for block, other in zip(gradients, one, strict=True):
            torch.testing.assert_close(block[index], other, rtol=1e-12, atol=1e-14)
        one_kernel = wu_encoder.tangent_kernel(parameters, tokens, logit_exponent=0.5)
        for block, other in zip(kernel, one_kernel, strict=True):
            torch.testing.assert_close(block[index], other, rtol=1e-12, atol=1e-14)


def test_one_token_leaves_queries_and_keys_without_gradient():
    parameters, tokens, targets = instance(length=1)
    _, gradients = wu_encoder.loss_and_gradients(parameters, tokens, targets, logit_exponent=0.5)
    assert not gradients.Q.any()
    assert not gradients.K.any()
    assert gradients.V.any()


def test_attention_flattens_with_the_larger_exponent_only():
    """At p = 1 the weights tend to 1/T like m^(-1/2); at p = 1/2 they do not."""
    spread = {}
    for exponent in (0.5, 1.0):
        for width in (16, 4096):
            parameters, tokens, _ = instance(width=width)
            weights = wu_encoder.attention_matrices(parameters, tokens, logit_exponent=exponent)
            torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights.sum(-1)))
            spread[exponent, width] = (weights - 1 / tokens.shape[1]).abs().max().item()
    assert spread[1.0, 4096] < 0.15 * spread[1.0, 16]
    assert spread[0.5, 4096] > 0.4 * spread[0.5, 16]


def test_same_numbers_in_every_precision():
    small = initial_parameters(3, 2, generator=generator(0, "a"), dtype=torch.float32)
    large = initial_parameters(3, 2, generator=generator(0, "a"))
    for block, other in zip(small, large, strict=True):
        torch.testing.assert_close(block, other.float(), rtol=0, atol=0)


def test_errors_name_the_argument():
    parameters, tokens, targets = instance()
    with pytest.raises(ValueError, match=r"parameters\.Q: expected shape"):
        wu_encoder.forward(parameters, tokens[..., :2], logit_exponent=1.0)
    with pytest.raises(ValueError, match="targets"):
        wu_encoder.loss_and_gradients(parameters, tokens, targets[:2], logit_exponent=1.0)
    with pytest.raises(ValueError, match="tokens"):
        wu_encoder.forward(parameters, tokens * torch.nan, logit_exponent=1.0)
    with pytest.raises(ValueError, match="width"):
        initial_parameters(0, 3, generator=generator(0, "a"))
    with pytest.raises(TypeError, match=r"parameters\.Q"):
        wu_encoder.forward(parameters, tokens.float(), logit_exponent=1.0)
