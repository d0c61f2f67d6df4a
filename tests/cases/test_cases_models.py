"""Inputs that broke similar software, tried on the models: the number is that of the case."""

import warnings

import pytest
import torch
from model_instances import Instance
from torch.func import jacrev, vmap

from attention_dynamics.models import (
    IndRNN,
    Parameters,
    ShallowTransformer,
    attention,
    independent_initialisation,
    shallow,
    symmetric_initialisation,
)


def every_output(parameters, tokens, query, mask=None):
    """Value, all derivatives and all features of a network on some tokens, as a flat list."""
    n = tokens.shape[0]
    options = {"query": query, "mask": mask}
    ones = torch.ones(n, dtype=parameters.dtype)
    tangent = parameters.map(torch.ones_like)
    features = attention.head_features(tokens, parameters.W, parameters.U, query, mask=mask)
    loss, gradients = shallow.loss_and_gradients(parameters, tokens, ones, **options)
    return [
        shallow.forward(parameters, tokens, **options),
        shallow.jvp(parameters, tokens, tangent, **options),
        shallow.head_second_derivative(parameters, tokens, tangent.U, tangent.W, **options),
        loss,
        *gradients,
        *shallow.per_sample_gradients(parameters, tokens, **options),
        *features,
    ]


# ---- 1: a row of logits that is all -inf ----


def test_case_1_a_row_of_minus_infinity_is_an_error_not_nan():
    logits = torch.zeros(3, 2, 4)
    logits[1, 1] = -torch.inf
    with pytest.raises(ValueError, match=r"logits: .* sample 1, head 1 is -inf.*boolean mask"):
        attention.attention_weights(logits)
    logits[1, 1, 2] = 0.0
    weights = attention.attention_weights(logits)
    assert weights[1, 1].tolist() == [0.0, 0.0, 1.0, 0.0]


def test_case_1_a_mask_can_leave_only_infinite_logits():
    logits = torch.tensor([[[0.0, -torch.inf]]])
    with pytest.raises(ValueError, match=r"logits: .* sample 0, head 0 is -inf"):
        attention.attention_weights(logits, torch.tensor([[False, True]]))


# ---- 2: float16 logits of 7e4; a mask of finfo.min - 16 ----


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1e4, 7e4])
def test_case_2_logits_beyond_float16_stay_finite(dtype, size):
    # x . W q = +-7e4 would be infinite in float16 (largest number 65504).
    tokens = torch.tensor([[[1.0], [-1.0], [0.5]]], dtype=dtype)
    parameters = Parameters(
        torch.ones(1, dtype=dtype),
        torch.ones((1, 1), dtype=dtype),
        torch.full((1, 1, 1), size / 100, dtype=dtype),
    )
    query = torch.full((1,), 100.0, dtype=dtype)
    values = attention.logits(tokens, parameters.W, query)
    assert values.dtype == torch.float32
    assert values.abs().max() >= 0.99 * size
    weights = attention.attention_weights(values)
    assert weights.flatten().tolist() == [1.0, 0.0, 0.0]
    for output in every_output(parameters, tokens, query):
        assert torch.isfinite(output).all()


def test_case_2_a_large_negative_mask_is_refused_by_type():
    lowest = torch.finfo(torch.float16).min
    mask = torch.tensor([[0.0, lowest - 16]])
    with pytest.raises(TypeError, match=r"mask: expected a boolean tensor .* mask == 0"):
        attention.attention_weights(torch.zeros((1, 1, 2), dtype=torch.float16), mask)
    as_told = attention.attention_weights(torch.zeros((1, 1, 2), dtype=torch.float16), mask == 0)
    assert as_told.flatten().tolist() == [1.0, 0.0]


# ---- 3: a mask with the sign of infinity flipped ----


def test_case_3_a_float_mask_of_either_sign_is_an_error():
    instance = Instance(samples=1, length=2)
    for infinity in (torch.inf, -torch.inf):
        mask = torch.tensor([[0.0, infinity]])
        for call in (
            lambda mask=mask: attention.attention_weights(torch.zeros(1, 1, 2), mask),
            lambda mask=mask: shallow.forward(
                instance.parameters, instance.tokens, query=instance.query, mask=mask
            ),
        ):
            with pytest.raises(TypeError, match=r"mask: expected a boolean tensor"):
                call()


def test_case_3_a_masked_weight_is_exactly_zero():
    mask = torch.tensor([[True, False, True]])
    weights = attention.attention_weights(torch.tensor([[[0.0, 1e30, 0.0]]]), mask)
    assert weights.flatten().tolist() == [0.5, 0.0, 0.5]


def test_case_3_padding_weighs_nothing_below_any_kept_logit():
    # The kept logits are about -1e4: padding (zero tokens, logit 0) must still lose to them.
    tokens = torch.tensor([[[1.0], [1.1], [0.0]]], dtype=torch.float64)
    parameters = Parameters(
        torch.ones(1).double(), torch.ones((1, 1)).double(), torch.full((1, 1, 1), -1e4).double()
    )
    query = torch.ones(1, dtype=torch.float64)
    mask = torch.tensor([[True, True, False]])
    features = attention.head_features(tokens, parameters.W, parameters.U, query, mask=mask)
    assert features.s.item() == 1.0
    assert torch.equal(
        shallow.forward(parameters, tokens, query=query, mask=mask),
        shallow.forward(parameters, tokens[:, :2], query=query),
    )


# ---- 4: float16, T = 1, the only key masked ----


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_case_4_an_empty_key_set_is_rejected_with_its_sample(dtype):
    mask = torch.tensor([[True], [False]])
    tokens = torch.ones((2, 1, 3), dtype=dtype)
    model = ShallowTransformer.symmetric(4, 3, query="last", seed=0, dtype=dtype)
    message = r"mask: no key is left for sample 1 \(all 1 entries are False\); keep at least one"
    for call in (
        lambda: attention.attention_weights(torch.zeros((2, 1, 1), dtype=dtype), mask),
        lambda: attention.resolve_query(tokens, "last", mask),
        lambda: model(tokens, mask),
        lambda: model.loss_and_gradients(tokens, torch.zeros(2), mask),
    ):
        with pytest.raises(ValueError, match=message):
            call()


# ---- 5: T = 1 ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("query_kind", ["fixed", "last"])
@pytest.mark.parametrize("padded", [False, True])
def test_case_5_one_token_gives_the_plain_network_and_no_gradient_in_W(dtype, query_kind, padded):
    instance = Instance(
        samples=6, length=3 if padded else 1, heads=5, query_kind=query_kind, dtype=dtype
    )
    mask = None
    if padded:
        mask = torch.tensor([[True, False, False]]).expand(6, -1)
    c, U, W = instance.parameters
    value = shallow.forward(instance.parameters, instance.tokens, query=instance.query, mask=mask)
    plain = torch.tanh(instance.tokens[:, 0] @ U.mT) @ c / 5**0.5
    torch.testing.assert_close(value, plain)
    gradients = shallow.per_sample_gradients(
        instance.parameters, instance.tokens, query=instance.query, mask=mask
    )
    assert torch.equal(gradients.W, torch.zeros((6, 5, 3, 3), dtype=dtype))
    assert gradients.U.abs().min() > 0
    _, gradients = shallow.loss_and_gradients(
        instance.parameters, instance.tokens, instance.targets, query=instance.query, mask=mask
    )
    assert torch.equal(gradients.W, torch.zeros_like(W))
    values = attention.logits(instance.tokens, W, instance.query, mask=mask)
    weights = attention.attention_weights(values, mask)
    zeroed = instance.tokens if mask is None else instance.tokens * mask[..., None]
    M = attention.softmax_covariance(weights, zeroed)
    assert M.abs().max() == 0


# ---- 6: symmetric initialisation, m = 5 ----


def test_case_6_an_odd_number_of_heads_is_refused_by_name():
    with pytest.raises(
        ValueError, match=r"heads: .* m must be even, got m = 5; take m = 4 or m = 6"
    ):
        symmetric_initialisation(5, 3, generator=torch.Generator())
    with pytest.raises(ValueError, match=r"got m = 5"):
        ShallowTransformer.symmetric(5, 3, query="last", seed=0)


# ---- 9, 11: vmap over our forward, jacrev, jvp; nothing in place ----


@pytest.mark.parametrize("query_kind", ["fixed", "last"])
@pytest.mark.parametrize("mask_kind", ["none", "padding"])
def test_case_11_vmap_of_jacrev_over_samples_runs_without_a_warning(query_kind, mask_kind):
    instance = Instance(samples=5, query_kind=query_kind, mask_kind=mask_kind, heads=6)
    mask = torch.ones(5, 4, dtype=torch.bool) if instance.mask is None else instance.mask

    def one(c, U, W, x, keep):
        return shallow.forward(Parameters(c, U, W), x[None], query=instance.query, mask=keep[None])[
            0
        ]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jacobian = vmap(jacrev(one, argnums=(0, 1, 2)), in_dims=(None, None, None, 0, 0))(
            *instance.parameters, instance.tokens, mask
        )
    expected = shallow.per_sample_gradients(
        instance.parameters, instance.tokens, query=instance.query, mask=instance.mask
    )
    torch.testing.assert_close(jacobian, tuple(expected), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("query_kind", ["fixed", "last"])
def test_case_11_every_closed_form_runs_under_vmap_over_parameters(query_kind):
    instance = Instance(samples=5, query_kind=query_kind, mask_kind="padding", heads=4)
    factors = torch.tensor([0.5, 2.0], dtype=torch.float64)
    stacked = [torch.stack([f * block for f in factors]) for block in instance.parameters]

    def outputs(c, U, W):
        parameters = Parameters(c, U, W)
        common = (parameters, instance.tokens)
        return (
            shallow.forward(*common, **instance.options),
            shallow.jvp(*common, instance.tangent, **instance.options),
            shallow.loss_and_gradients(*common, instance.targets, **instance.options),
            shallow.per_sample_gradients(*common, **instance.options),
            shallow.head_second_derivative(
                *common, instance.tangent.U, instance.tangent.W, **instance.options
            ),
        )

    batched, tree = torch.utils._pytree.tree_flatten(vmap(outputs)(*stacked))
    for k, factor in enumerate(factors):
        alone, alone_tree = torch.utils._pytree.tree_flatten(
            outputs(*instance.parameters.scaled(factor))
        )
        assert tree == alone_tree
        for left, right in zip(batched, alone, strict=True):
            torch.testing.assert_close(left[k], right, rtol=1e-12, atol=1e-12)


def test_case_11_inputs_are_never_written_to():
    instance = Instance(mask_kind="padding")
    everything = (*instance.parameters, *instance.tangent, instance.tokens, instance.query)
    everything += (instance.mask, instance.targets)
    versions = [tensor._version for tensor in everything]
    every_output(instance.parameters, instance.tokens, instance.query, instance.mask)
    shallow.vjp(instance.parameters, instance.tokens, instance.targets, query=instance.query)
    assert [tensor._version for tensor in everything] == versions


# ---- 12: all-zero tokens ----


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("query", ["last", "fixed", "zero"])
def test_case_12_zero_tokens_give_finite_everything(dtype, query):
    g = torch.Generator().manual_seed(0)
    parameters = independent_initialisation(4, 3, generator=g, dtype=dtype)
    tokens = torch.zeros((2, 5, 3), dtype=dtype)
    q = {"last": "last", "fixed": torch.ones(3, dtype=dtype), "zero": torch.zeros(3, dtype=dtype)}
    for output in every_output(parameters, tokens, q[query]):
        assert torch.isfinite(output).all()
    gradients = shallow.per_sample_gradients(parameters, tokens, query=q[query])
    assert all(block.abs().max() == 0 for block in (gradients.U, gradients.W))
    kernel = sum(torch.einsum("i...,j...->ij", block, block) for block in gradients)
    assert torch.isfinite(kernel).all()


def test_case_12_equal_tokens_give_no_gradient_in_W():
    instance = Instance(samples=4, length=5)
    tokens = instance.tokens[:, :1].expand(-1, 5, -1)
    gradients = shallow.per_sample_gradients(instance.parameters, tokens, query=instance.query)
    assert gradients.W.abs().max() < 1e-15
    assert gradients.U.abs().max() > 1e-2


# ---- 13: same seed on CPU and GPU ----


def _starts(device):
    """Every random construction of the models on a device, from one seed."""
    g = torch.Generator().manual_seed(11)
    recurrent = IndRNN(6, 3, recurrent_init="normal", generator=g, device=device)
    model = ShallowTransformer.symmetric(6, 3, query=torch.ones(3), seed=11, device=device)
    return [
        *symmetric_initialisation(6, 3, generator=g, device=device),
        *independent_initialisation(6, 3, generator=g, device=device),
        *model.snapshot(),
        recurrent.w.detach(),
        recurrent.u.detach(),
        recurrent.c.detach(),
    ]


def test_case_13_numbers_are_sampled_on_the_cpu_and_then_moved(monkeypatch):
    """Asserted without a GPU, compared where one is present."""
    drawn = []
    for name in ("randn", "randint"):
        original = getattr(torch, name)

        def record(*args, _original=original, **kwargs):
            result = _original(*args, **kwargs)
            drawn.append((kwargs["generator"].device.type, result.device.type))
            return result

        monkeypatch.setattr(torch, name, record)
    on_cpu = _starts("cpu")
    assert len(drawn) == 12
    count = len(drawn)
    # On another device every draw is still on the CPU, and there are as many of them.
    elsewhere = _starts("meta")
    assert all(tensor.device.type == "meta" for tensor in elsewhere)
    assert len(drawn) == 2 * count
    assert set(drawn) == {("cpu", "cpu")}
    if torch.cuda.is_available():
        for left, right in zip(on_cpu, _starts("cuda"), strict=True):
            assert right.device.type == "cuda"
            assert torch.equal(left, right.cpu())


def test_case_13_the_default_device_does_not_change_the_numbers():
    expected = _starts("cpu")
    with torch.device("meta"):
        actual = symmetric_initialisation(
            6, 3, generator=torch.Generator("cpu").manual_seed(11), device="cpu"
        )
    assert torch.equal(
        actual.U,
        symmetric_initialisation(6, 3, generator=torch.Generator().manual_seed(11)).U,
    )
    assert torch.equal(actual.U, expected[7])


def test_case_13_a_generator_of_another_device_is_refused():
    class Elsewhere(torch.Generator):
        device = torch.device("cuda", 0)

    with pytest.raises(ValueError, match=r"generator: expected .* on the CPU, got one on cuda:0"):
        symmetric_initialisation(4, 3, generator=Elsewhere())


# ---- 25: a non-contiguous gradient or input ----


@pytest.mark.parametrize("query_kind", ["fixed", "last"])
def test_case_25_any_stride_gives_the_same_result(query_kind):
    instance = Instance(samples=4, length=5, query_kind=query_kind, mask_kind="padding")

    def strided(tensor):
        """The same numbers at every second place of a transposed array."""
        wide = torch.zeros((*reversed(tensor.shape), 2), dtype=tensor.dtype)
        view = wide[..., 0].permute(*reversed(range(tensor.ndim)))
        view.copy_(tensor)
        assert not view.is_contiguous()
        return view

    parameters, tokens = instance.parameters.map(strided), strided(instance.tokens)
    query = "last" if query_kind == "last" else strided(instance.query)
    mask = strided(instance.mask)
    for left, right in zip(
        every_output(parameters, tokens, query, mask),
        every_output(instance.parameters, instance.tokens, instance.query, instance.mask),
        strict=True,
    ):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)
    pulled = shallow.vjp(
        parameters, tokens, strided(instance.targets), query=query, mask=mask,
        activation=instance.activation,
    )  # fmt: skip
    expected = shallow.vjp(
        instance.parameters, instance.tokens, instance.targets, **instance.options
    )
    torch.testing.assert_close(pulled, expected, rtol=1e-12, atol=1e-12)


def test_case_25_returned_gradients_can_be_flattened_by_view():
    instance = Instance(samples=4, length=5, query_kind="last")
    _, gradients = shallow.loss_and_gradients(
        instance.parameters, instance.tokens, instance.targets, query="last"
    )
    flat = torch.cat([block.view(-1) for block in gradients])
    assert flat.shape == (4 + 4 * 3 + 4 * 9,)
