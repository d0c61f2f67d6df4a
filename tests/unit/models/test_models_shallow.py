"""The network and its closed forms, against loops over the formulas and against autograd."""

import copy
import pickle

import pytest
import torch
from hypothesis import given
from model_instances import Instance, gradients_by_formula, instances, value_by_formula
from torch.func import functional_call, grad, jvp, vmap

from attention_dynamics.models import (
    Activation,
    Parameters,
    ShallowTransformer,
    from_column_layout,
    shallow,
    symmetric_initialisation,
)

TIGHT = {"rtol": 1e-12, "atol": 1e-12}


def assert_parameters_close(actual, expected, **tolerance):
    for name, left, right in zip("cUW", actual, expected, strict=True):
        torch.testing.assert_close(
            left, right, **tolerance, msg=lambda text, name=name: f"block {name}: {text}"
        )


@given(instances())
def test_the_value_is_the_formula(instance):
    actual = shallow.forward(instance.parameters, instance.tokens, **instance.options)
    torch.testing.assert_close(actual, value_by_formula(instance), **TIGHT)


@given(instances())
def test_per_sample_gradients_are_the_formula_with_M_formed(instance):
    actual = shallow.per_sample_gradients(instance.parameters, instance.tokens, **instance.options)
    assert_parameters_close(actual, gradients_by_formula(instance), **TIGHT)


@given(instances())
def test_loss_and_gradients_agree_with_autograd(instance):
    free = instance.parameters.map(lambda block: block.clone().requires_grad_())
    expected = shallow.loss(free, instance.tokens, instance.targets, **instance.options)
    loss, gradients = shallow.loss_and_gradients(
        instance.parameters, instance.tokens, instance.targets, **instance.options
    )
    torch.testing.assert_close(loss, expected.detach(), **TIGHT)
    assert_parameters_close(gradients, torch.autograd.grad(expected, tuple(free)), **TIGHT)
    mean_square = (value_by_formula(instance) - instance.targets).square().mean()
    torch.testing.assert_close(loss, mean_square, **TIGHT)


@given(instances())
def test_vjp_agrees_with_autograd(instance):
    def weighted_sum(c, U, W):
        values = shallow.forward(Parameters(c, U, W), instance.tokens, **instance.options)
        return (instance.targets * values).sum()

    expected = grad(weighted_sum, argnums=(0, 1, 2))(*instance.parameters)
    actual = shallow.vjp(instance.parameters, instance.tokens, instance.targets, **instance.options)
    assert_parameters_close(actual, expected, **TIGHT)


@given(instances())
def test_jvp_agrees_with_forward_mode(instance):
    def values(c, U, W):
        return shallow.forward(Parameters(c, U, W), instance.tokens, **instance.options)

    _, expected = jvp(values, tuple(instance.parameters), tuple(instance.tangent))
    actual = shallow.jvp(instance.parameters, instance.tokens, instance.tangent, **instance.options)
    torch.testing.assert_close(actual, expected, **TIGHT)


@given(instances())
def test_the_second_derivative_of_a_head_agrees_with_nested_forward_mode(instance):
    V, Z = instance.tangent.U, instance.tangent.W

    def heads(epsilon):
        c, U, W = instance.parameters
        # One head at a time with c = 1: the network of a single head is sigma(s).
        moved = Parameters(torch.ones_like(c), U + epsilon * V, W + epsilon * Z)
        single = [
            shallow.forward(moved.map(lambda b, i=i: b[i : i + 1]), instance.tokens,
                            **instance.options)
            for i in range(instance.heads)
        ]  # fmt: skip
        return torch.stack(single, dim=-1)

    def slope(epsilon):
        return jvp(heads, (epsilon,), (torch.ones_like(epsilon),))[1]

    zero = torch.zeros((), dtype=torch.float64)
    expected = jvp(slope, (zero,), (torch.ones_like(zero),))[1]
    actual = shallow.head_second_derivative(
        instance.parameters, instance.tokens, V, Z, **instance.options
    )
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("query_kind", ["fixed", "last"])
@pytest.mark.parametrize("chunk", [1, 2, 7, 100])
def test_the_result_does_not_depend_on_the_block_size(query_kind, chunk):
    instance = Instance(samples=7, length=5, query_kind=query_kind, mask_kind="padding")
    common = (instance.parameters, instance.tokens)
    for function, extra in (
        (shallow.forward, ()),
        (shallow.vjp, (instance.targets,)),
        (shallow.jvp, (instance.tangent,)),
        (shallow.loss_and_gradients, (instance.targets,)),
    ):
        whole = function(*common, *extra, **instance.options)
        blocked = function(*common, *extra, **instance.options, chunk=chunk)
        torch.testing.assert_close(blocked, whole, **TIGHT)


def test_a_large_batch_is_split_into_blocks_of_bounded_size(monkeypatch):
    from attention_dynamics.models.engines import pooling

    seen = []
    weigh = pooling._weigh
    monkeypatch.setattr(
        pooling, "_weigh", lambda x, w, mask, e, *rest: seen.append(e.numel()) or weigh(
            x, w, mask, e, *rest
        ),
    )  # fmt: skip
    instance = Instance(samples=800, length=64, heads=17)
    shallow.loss_and_gradients(
        instance.parameters, instance.tokens, instance.targets, **instance.options, engine="eager"
    )
    assert len(seen) > 1
    assert max(seen) <= pooling.BLOCK
    assert sum(seen) == 800 * 64 * 17


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_and_returned_in_float32(dtype):
    instance = Instance(samples=5, query_kind="fixed")
    low = instance.parameters.to(dtype=dtype)
    tokens, query = instance.tokens.to(dtype), instance.query.to(dtype)
    value = shallow.forward(low, tokens, query=query)
    assert value.dtype == torch.float32
    expected = shallow.forward(low.to(dtype=torch.float32), tokens.float(), query=query.float())
    assert torch.equal(value, expected)
    loss, gradients = shallow.loss_and_gradients(low, tokens, instance.targets, query=query)
    assert loss.dtype == torch.float32
    assert {block.dtype for block in gradients} == {torch.float32}


def test_float32_agrees_with_float64_to_its_own_precision():
    double = Instance(samples=50, length=16, dimension=8, heads=64, seed=3)
    single = double.parameters.to(dtype=torch.float32)
    _, low = shallow.loss_and_gradients(
        single, double.tokens.float(), double.targets.float(), query=double.query.float()
    )
    _, high = shallow.loss_and_gradients(
        double.parameters, double.tokens, double.targets, query=double.query
    )
    assert_parameters_close(low.to(dtype=torch.float64), high, rtol=1e-4, atol=1e-6)


# ---- symmetric initialisation ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("heads", [2, 6, 10, 14, 30, 34, 66, 128])
@pytest.mark.parametrize("query", ["last", "fixed"])
def test_the_symmetric_initialisation_gives_zero_bit_by_bit(heads, dtype, query):
    g = torch.Generator().manual_seed(heads)
    for length in (1, 3, 17):
        tokens = 3 * torch.randn((77, length, 5), generator=g, dtype=dtype)
        q = "last" if query == "last" else torch.randn(5, generator=g, dtype=dtype)
        model = ShallowTransformer.symmetric(heads, 5, query=q, generator=g, dtype=dtype)
        assert torch.equal(model(tokens), torch.zeros(77, dtype=dtype))
        loss, _ = model.loss_and_gradients(tokens, torch.full((77,), 2.0, dtype=dtype))
        assert loss.item() == 4.0


def test_zero_does_not_rest_on_equal_rounding_of_the_two_halves():
    # The second half is perturbed the way another kernel could round it.
    from attention_dynamics.models._network import head_sum

    g = torch.Generator().manual_seed(0)
    half = torch.randn((9, 5), generator=g)
    sigmas = torch.cat((half, half + 1e-7 * torch.randn((9, 5), generator=g)), dim=1)
    c = torch.cat((torch.ones(5), -torch.ones(5)))
    assert not torch.equal(head_sum(c, sigmas, None), torch.zeros(9))
    assert torch.equal(head_sum(c, sigmas, torch.ones(5, dtype=torch.bool)), torch.zeros(9))


def test_twins_keep_their_own_derivatives():
    parameters = symmetric_initialisation(
        6, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    instance = Instance(heads=6)
    free = parameters.map(lambda block: block.clone().requires_grad_())
    loss = shallow.loss(free, instance.tokens, instance.targets, query=instance.query)
    expected = torch.autograd.grad(loss, tuple(free))
    assert all(block.abs().max() > 1e-3 for block in expected)
    _, actual = shallow.loss_and_gradients(
        parameters, instance.tokens, instance.targets, query=instance.query
    )
    assert_parameters_close(actual, expected, **TIGHT)
    # Opposite signs in U and W, equal ones in c: the pair leaves zero at the first step.
    for name, sign in (("c", 1), ("U", -1), ("W", -1)):
        block = getattr(actual, name)
        torch.testing.assert_close(block[3:], sign * block[:3], **TIGHT)


# ---- logit scale, layout ----


@pytest.mark.parametrize(("exponent", "expected"), [(0, 1.0), (-0.5, 0.25), (-1, 1 / 16)])
def test_the_logit_scale_is_a_power_of_the_heads(exponent, expected):
    assert shallow.logit_scale(16, exponent) == expected


def test_an_unknown_logit_exponent_is_refused():
    with pytest.raises(ValueError, match=r"exponent: expected one of 0, -0.5, -1, got 2"):
        shallow.logit_scale(16, 2)


def test_scaling_the_logits_is_scaling_W():
    instance = Instance(heads=16)
    model = ShallowTransformer(instance.parameters, query=instance.query, logit_exponent=-0.5)
    scaled = instance.parameters._replace(W=instance.parameters.W / 4)
    expected = shallow.forward(scaled, instance.tokens, query=instance.query)
    torch.testing.assert_close(model(instance.tokens).detach(), expected, **TIGHT)


def test_column_layout_is_converted():
    columns = torch.arange(24.0).reshape(2, 3, 4)
    rows = from_column_layout(columns)
    assert rows.shape == (2, 4, 3)
    assert rows.is_contiguous()
    assert torch.equal(rows[1, 2], columns[1, :, 2])
    with pytest.raises(ValueError, match=r"tokens: expected shape \(n, d, T\), got \(3, 4\)"):
        from_column_layout(columns[0])


# ---- the module ----


@pytest.fixture
def module():
    instance = Instance(samples=8, heads=6, query_kind="fixed")
    return ShallowTransformer(instance.parameters, query=instance.query), instance


def test_the_module_owns_a_copy_of_what_it_is_given(module):
    model, instance = module
    with torch.no_grad():
        model.W.zero_()
    assert instance.parameters.W.abs().min() > 0


def test_closed_gradients_equal_backward_and_leave_grad_alone(module):
    model, instance = module
    loss, gradients = model.loss_and_gradients(instance.tokens, instance.targets)
    assert all(p.grad is None for p in model.parameters())
    assert not loss.requires_grad
    (model(instance.tokens) - instance.targets).square().mean().backward()
    assert_parameters_close(gradients, (model.c.grad, model.U.grad, model.W.grad), **TIGHT)


@pytest.mark.parametrize("optimiser", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_any_torch_optimiser_lowers_the_loss(module, optimiser):
    model, instance = module
    optim = optimiser(model.parameters(), lr=0.05)
    losses = []
    for _ in range(30):
        optim.zero_grad()
        loss = (model(instance.tokens) - instance.targets).square().mean()
        loss.backward()
        optim.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_closed_gradients_drive_an_optimiser_like_backward_does(module):
    model, instance = module
    twin = copy.deepcopy(model)
    by_backward = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    by_formula = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    for _ in range(5):
        by_backward.zero_grad()
        (model(instance.tokens) - instance.targets).square().mean().backward()
        by_backward.step()
        _, gradients = twin.loss_and_gradients(instance.tokens, instance.targets)
        twin.c.grad, twin.U.grad, twin.W.grad = gradients
        by_formula.step()
    assert_parameters_close(twin.snapshot(), model.snapshot(), **TIGHT)


def test_state_round_trips_with_the_query(module):
    model, instance = module
    other = ShallowTransformer.symmetric(6, 3, query=torch.zeros(3), seed=5, dtype=torch.float64)
    assert set(model.state_dict()) == {"c", "U", "W", "query"}
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(instance.tokens), model(instance.tokens))
    last = ShallowTransformer.symmetric(6, 3, query="last", seed=5)
    assert set(last.state_dict()) == {"c", "U", "W"}


def test_deepcopy_and_pickle_give_independent_equal_models(module):
    model, instance = module
    before = model(instance.tokens).detach()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(instance.tokens), before)
        with torch.no_grad():
            twin.c.zero_()
        assert torch.equal(model(instance.tokens), before)


def test_snapshot_and_load_copy_both_ways(module):
    model, instance = module
    start = model.snapshot()
    before = model(instance.tokens).detach()
    weights = model.W
    model.load(start.scaled(0.5))
    assert model.W is weights  # an optimiser that holds the tensor sees the new values
    assert not torch.equal(model(instance.tokens), before)
    assert_parameters_close(start, instance.parameters, rtol=0, atol=0)
    model.load(start)
    assert torch.equal(model(instance.tokens), before)
    start.c.zero_()
    assert torch.equal(model(instance.tokens), before)
    with pytest.raises(ValueError, match=r"parameters.U: expected shape \(6, 3\), got \(4, 3\)"):
        model.load(Parameters(start.c, start.U[:4], start.W))


def test_moving_to_another_dtype_moves_the_query(module):
    model, instance = module
    model.to(torch.float32)
    assert model.query.dtype == model.c.dtype == torch.float32
    assert model(instance.tokens.float()).dtype == torch.float32


def test_functional_call_and_an_ensemble_by_vmap(module):
    model, instance = module
    names = dict(model.named_parameters())
    torch.testing.assert_close(
        functional_call(model, names, (instance.tokens,)), model(instance.tokens)
    )
    factors = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    stacked = {name: torch.stack([f * p.detach() for f in factors]) for name, p in names.items()}
    ensemble = vmap(lambda p: functional_call(model, p, (instance.tokens,)))(stacked)
    for k, f in enumerate(factors):
        expected = shallow.forward(
            instance.parameters.scaled(f), instance.tokens, query=instance.query
        )
        torch.testing.assert_close(ensemble[k], expected, **TIGHT)


def _softsign(x):
    return x / (1 + x.abs())


def _softsign_first(x):
    return (1 + x.abs()) ** -2


def _softsign_second(x):
    return -2 * x.sign() * (1 + x.abs()) ** -3


def test_a_custom_activation_is_accepted(module):
    _, instance = module
    softsign = Activation("softsign", _softsign, _softsign_first, _softsign_second, (1, 1, 2))
    model = ShallowTransformer(instance.parameters, query=instance.query, activation=softsign)
    (model(instance.tokens) - instance.targets).square().mean().backward()
    _, gradients = model.loss_and_gradients(instance.tokens, instance.targets)
    assert_parameters_close(gradients, (model.c.grad, model.U.grad, model.W.grad), **TIGHT)


def test_a_seed_or_a_generator_but_not_both():
    for extra in ({}, {"seed": 1, "generator": torch.Generator()}):
        with pytest.raises(ValueError, match="generator, seed: give exactly one of them"):
            ShallowTransformer.symmetric(4, 3, query="last", **extra)


def test_the_printed_module_says_what_it_is(module):
    model, _ = module
    text = repr(model)
    for piece in ("heads=6", "dimension=3", "query=fixed", "activation=tanh"):
        assert piece in text


# ---- bad input ----


def test_errors_name_the_argument_the_value_and_the_remedy():
    instance = Instance(samples=5, length=16, dimension=8, heads=4)
    columns = instance.tokens.mT
    with pytest.raises(
        ValueError,
        match=r"tokens: expected shape \(n, T, d\) with d = 8, got \(5, 8, 16\).*"
        r"from_column_layout",
    ):
        shallow.forward(instance.parameters, columns, query=instance.query)
    with pytest.raises(ValueError, match=r"query: expected shape \(d,\) with d = 8, got \(3,\)"):
        shallow.forward(instance.parameters, instance.tokens, query=torch.zeros(3))
    with pytest.raises(ValueError, match=r"query: expected a tensor .* or 'last', got 'first'"):
        shallow.forward(instance.parameters, instance.tokens, query="first")
    with pytest.raises(ValueError, match=r"query: expected one of 'last', got 'first'"):
        ShallowTransformer(instance.parameters, query="first")
    with pytest.raises(
        ValueError, match=r"targets: expected shape \(n,\) with n = 5, got \(5, 1\)"
    ):
        shallow.loss(
            instance.parameters, instance.tokens, instance.targets[:, None], query=instance.query
        )
    with pytest.raises(
        TypeError, match=r"parameters: has dtype torch.float32 .*\.to\(torch.float64"
    ):
        shallow.forward(
            instance.parameters.to(dtype=torch.float32), instance.tokens, query=instance.query
        )
    with pytest.raises(TypeError, match=r"tokens: expected a torch.Tensor .* got ndarray"):
        shallow.forward(instance.parameters, instance.tokens.numpy(), query=instance.query)
    with pytest.raises(
        TypeError, match=r"tokens: expected a floating-point tensor, got torch.int64"
    ):
        shallow.forward(instance.parameters, instance.tokens.long(), query=instance.query)
    with pytest.raises(ValueError, match=r"parameters.W: expected shape .* m = 4, d = 8, got"):
        shallow.forward(
            instance.parameters._replace(W=instance.parameters.W[:2]),
            instance.tokens,
            query=instance.query,
        )
    with pytest.raises(ValueError, match=r"activation: expected one of 'tanh'.* got 'relu'"):
        shallow.forward(
            instance.parameters, instance.tokens, query=instance.query, activation="relu"
        )
    with pytest.raises(ValueError, match=r"tangent.U: expected shape .* got \(3, 8\)"):
        shallow.jvp(
            instance.parameters,
            instance.tokens,
            instance.tangent._replace(U=instance.tangent.U[:3]),
            query=instance.query,
        )
    with pytest.raises(ValueError, match=r"chunk: expected an integer >= 1, got 0; pass None"):
        shallow.loss_and_gradients(
            instance.parameters, instance.tokens, instance.targets, query=instance.query, chunk=0
        )
    with pytest.raises(ValueError, match=r"tokens: expected at least one sample"):
        shallow.forward(instance.parameters, instance.tokens[:0], query=instance.query)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_located(bad):
    instance = Instance(samples=5)
    instance.tokens[3, 2, 1] = bad
    with pytest.raises(ValueError, match=rf"tokens: .* got {bad} at index \(3, 2, 1\)"):
        shallow.forward(instance.parameters, instance.tokens, query=instance.query)
    instance = Instance(samples=5)
    instance.targets[4] = bad
    with pytest.raises(ValueError, match=rf"targets: .* got {bad} at index \(4,\)"):
        shallow.loss(instance.parameters, instance.tokens, instance.targets, query=instance.query)
    instance = Instance(samples=5)
    instance.parameters.U[0, 2] = bad
    with pytest.raises(ValueError, match=rf"parameters.U: .* got {bad} at index \(0, 2\)"):
        shallow.forward(instance.parameters, instance.tokens, query=instance.query)


def test_inner_loops_can_skip_the_checks(monkeypatch):
    from attention_dynamics.models import _pass, parameters

    instance = Instance()
    expected = shallow.loss_and_gradients(
        instance.parameters, instance.tokens, instance.targets, **instance.options
    )

    def refuse(*args, **kwargs):
        raise AssertionError("a check ran")

    for module in (_pass, parameters):
        monkeypatch.setattr(module, "require_finite", refuse)
    with pytest.raises(AssertionError, match="a check ran"):
        shallow.forward(instance.parameters, instance.tokens, **instance.options)
    actual = shallow.loss_and_gradients(
        instance.parameters, instance.tokens, instance.targets, **instance.options, validate=False
    )
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
