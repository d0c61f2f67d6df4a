"""Laws that softmax attention and the network obey on every input, not on chosen ones."""

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from model_instances import Instance, instances

from attention_dynamics.models import Parameters, attention, get_activation, shallow

TIGHT = {"rtol": 1e-12, "atol": 1e-12}


def features(instance, tokens=None, **changes):
    options = {"mask": instance.mask, "scale": instance.scale, **changes}
    return attention.head_features(
        instance.tokens if tokens is None else tokens,
        instance.parameters.W,
        instance.parameters.U,
        instance.query,
        **options,
    )


def weights_of(instance):
    values = attention.logits(
        instance.tokens, instance.parameters.W, instance.query, scale=instance.scale
    )
    return values, attention.attention_weights(values, instance.mask)


@given(instances(query_kind="fixed", mask_kind="none"), st.randoms(use_true_random=False))
def test_a_fixed_query_does_not_see_the_order_of_the_tokens(instance, random):
    order = list(range(instance.length))
    random.shuffle(order)
    shuffled = features(instance, instance.tokens[:, order])
    torch.testing.assert_close(shuffled, features(instance), **TIGHT)


def test_the_last_token_query_does_see_the_order():
    instance = Instance(query_kind="last")
    turned = features(instance, instance.tokens.flip(1))
    assert (turned.s - features(instance).s).abs().max() > 1e-2


@given(instances(), st.floats(-1e3, 1e3))
def test_weights_do_not_change_when_all_logits_are_shifted(instance, shift):
    values, weights = weights_of(instance)
    torch.testing.assert_close(
        attention.attention_weights(values + shift, instance.mask), weights, rtol=1e-9, atol=1e-12
    )


@given(instances())
def test_weights_are_a_distribution_on_the_kept_tokens(instance):
    _, weights = weights_of(instance)
    assert weights.min() >= 0
    torch.testing.assert_close(
        weights.sum(-1), torch.ones_like(weights[..., 0]), rtol=0, atol=1e-14
    )
    if instance.mask is not None:
        assert weights.masked_select(~instance.mask[:, None]).abs().sum() == 0


@given(instances(mask_kind="none"))
def test_the_covariance_is_psd_with_trace_at_most_one_on_the_unit_ball(instance):
    tokens = instance.tokens / instance.tokens.norm(dim=-1, keepdim=True).clamp_min(1)
    _, weights = weights_of(instance)
    M = attention.softmax_covariance(weights, tokens)
    torch.testing.assert_close(M, M.mT, rtol=0, atol=1e-15)
    assert torch.linalg.eigvalsh(M).min() > -1e-14
    trace = M.diagonal(dim1=-2, dim2=-1).sum(-1)
    mu = attention.pooled_token(weights, tokens)
    assert (trace <= 1 - mu.square().sum(-1) + 1e-14).all()


@given(instances(mask_kind="padding"), st.integers(1, 5), st.sampled_from([0.0, 1e30, torch.nan]))
def test_padding_is_truncation_whatever_the_padding_holds(instance, extra, filling):
    filler = torch.full((instance.samples, extra, instance.dimension), filling).double()
    padded = torch.cat((instance.tokens, filler), dim=1)
    mask = F.pad(instance.mask, (0, extra))
    options = {**instance.options, "mask": mask}
    value = shallow.forward(instance.parameters, padded, **options)
    gradient = shallow.per_sample_gradients(instance.parameters, padded, **options)
    for j, length in enumerate(instance.mask.sum(-1).tolist()):
        alone = instance.tokens[j : j + 1, :length]
        options = {**instance.options, "mask": None}
        torch.testing.assert_close(
            value[j : j + 1], shallow.forward(instance.parameters, alone, **options), **TIGHT
        )
        torch.testing.assert_close(
            gradient.map(lambda block, j=j: block[j : j + 1]),
            shallow.per_sample_gradients(instance.parameters, alone, **options),
            **TIGHT,
        )


@given(instances())
def test_jvp_and_vjp_are_adjoint(instance):
    common = (instance.parameters, instance.tokens)
    pushed = shallow.jvp(*common, instance.tangent, **instance.options)
    pulled = shallow.vjp(*common, instance.targets, **instance.options)
    torch.testing.assert_close(instance.targets @ pushed, pulled.inner(instance.tangent), **TIGHT)


@given(instances(), st.floats(-3, 3), st.floats(-3, 3))
def test_jvp_and_vjp_are_linear(instance, left, right):
    common = (instance.parameters, instance.tokens)
    v, w = instance.tangent, instance.parameters
    combined = shallow.jvp(*common, v.scaled(left).plus(w.scaled(right)), **instance.options)
    expected = left * shallow.jvp(*common, v, **instance.options)
    expected = expected + right * shallow.jvp(*common, w, **instance.options)
    torch.testing.assert_close(combined, expected, rtol=1e-11, atol=1e-11)
    g = instance.targets
    h = g.flip(0).square()
    combined = shallow.vjp(*common, left * g + right * h, **instance.options)
    expected = shallow.vjp(*common, g, **instance.options).scaled(left)
    expected = expected.plus(shallow.vjp(*common, h, **instance.options).scaled(right))
    torch.testing.assert_close(combined, expected, rtol=1e-11, atol=1e-11)


@given(instances())
def test_the_network_is_one_attention_call_under_a_block_diagonal_layer(instance):
    """Heads are m queries W_i q on shared keys; U is a block-diagonal layer (m, m d).

    One neuron a head: the layer reads the concatenated pooled tokens (m d,), row i is zero outside
    of block i.
    """
    c, U, W = instance.parameters
    heads, dimension = U.shape
    q = attention.resolve_query(instance.tokens, instance.query, instance.mask)
    queries = instance.scale * torch.einsum("mde,ne->nmd", W, q)
    mask = None if instance.mask is None else instance.mask[:, None, :]
    pooled = F.scaled_dot_product_attention(
        queries, instance.tokens, instance.tokens, attn_mask=mask, scale=1.0
    )
    layer = torch.block_diag(*U)
    assert layer.shape == (heads, heads * dimension)
    hidden = get_activation(instance.activation).value(pooled.flatten(1) @ layer.mT)
    torch.testing.assert_close(
        shallow.forward(instance.parameters, instance.tokens, **instance.options),
        hidden @ c / heads**0.5,
        **TIGHT,
    )


@given(instances())
def test_the_order_of_the_heads_does_not_matter(instance):
    turned = instance.parameters.map(lambda block: block.flip(0))
    torch.testing.assert_close(
        shallow.forward(turned, instance.tokens, **instance.options),
        shallow.forward(instance.parameters, instance.tokens, **instance.options),
        **TIGHT,
    )


@given(instances(), st.floats(0.1, 10))
def test_only_the_product_of_scale_and_W_enters(instance, factor):
    moved = Parameters(instance.parameters.c, instance.parameters.U, instance.parameters.W / factor)
    options = {**instance.options, "scale": instance.scale * factor}
    torch.testing.assert_close(
        shallow.forward(moved, instance.tokens, **options),
        shallow.forward(instance.parameters, instance.tokens, **instance.options),
        rtol=1e-11,
        atol=1e-11,
    )
