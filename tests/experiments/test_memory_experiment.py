"""Memory against T: the meters against known allocations, every method against autograd."""

from __future__ import annotations

import functools
import gc
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_dynamics.data import generator
from attention_dynamics.experiments import _memory_meter as meter
from attention_dynamics.experiments import _memory_state as state
from attention_dynamics.experiments import memory
from attention_dynamics.experiments._memory_methods import METHODS
from attention_dynamics.models import attention
from attention_dynamics.models.activations import get_activation
from attention_dynamics.running import Experiment, sweep
from attention_dynamics.running.store import read_results

SMALL = replace(memory.PROFILES["smoke"].configs[0], length=37)
FLAT = ("streaming", "values_streaming", "recurrent_forward", "recurrent_values")
DOUBLE = {"dtype": torch.float64}


@pytest.fixture(scope="module")
def smoke():
    return sweep(memory, "smoke")


def extra(**changes):
    rows = memory.run(replace(SMALL, **changes), 0).set_index("quantity")["value"]
    return rows["extra"]


# The experiment


def test_the_module_has_the_shape_of_an_experiment():
    assert isinstance(memory, Experiment)
    assert memory.NAME == "memory"
    assert set(memory.PROFILES) == {"smoke", "book", "paper"}
    assert memory.Config.__dataclass_params__.frozen


def test_bands_and_sizes_are_those_fixed_before_the_run():
    linear, flat = (0.9, 1.1), (-0.05, 0.05)
    assert {name: band.ends for name, band in memory.BANDS.items()} == {
        "autograd": linear, "closed": linear, "values": linear,
        "recurrent_autograd": linear, "recurrent_closed": linear,
        "streaming": flat, "streaming_last": flat, "blocks": flat, "values_streaming": flat,
        "recurrent_forward": flat, "recurrent_values": flat,
        "recurrent_checkpointed": (0.45, 0.55),
    }  # fmt: skip
    assert memory.KERNEL_BAND.ends == flat
    assert memory.RESIDENT_BAND.ends == linear
    assert memory.LARGE == ("autograd", "closed", "recurrent_closed")
    assert memory.SLOPE_FROM == 1024
    assert memory.KERNEL_LENGTHS == (4096, 16384)
    paper = memory.PROFILES["paper"].configs
    assert {(c.samples, c.units, c.dimension) for c in paper} == {(32, 64, 8)}
    assert {c.length for c in paper} == {256, 1024, 4096, 16384, 65536}
    for profile in memory.PROFILES.values():
        assert profile.seeds == (0, 1)
        assert {(c.method, c.query) for c in profile.configs} == {
            ("streaming", "last"),
            *((name, "fixed") for name, method in METHODS.items() if method.counted),
        }


def test_a_cell_is_a_pure_function_of_config_and_seed(smoke):
    config = replace(SMALL, method="blocks")
    first = memory.run(config, 5)
    pd.testing.assert_frame_equal(memory.run(config, 5), first, check_exact=True)
    assert tuple(first.columns) == memory.COLUMNS
    other = memory.run(config, 6).set_index("quantity")["value"]
    values = first.set_index("quantity")["value"]
    assert (other[["loss", "gradient"]] != values[["loss", "gradient"]]).all()
    counts = smoke[smoke["quantity"] == "extra"]
    assert (counts.groupby(["method", "query", "length"])["value"].nunique() == 1).all()


def test_all_methods_of_a_model_give_one_loss_and_one_gradient(smoke):
    table = smoke.pivot_table(
        index=["method", "query", "length", "seed"], columns="quantity", values="value"
    ).reset_index()
    table = table[table["query"] == "fixed"]
    table["model"] = table["method"].map(lambda name: METHODS[name].model)
    for _, rows in table.groupby(["model", "length", "seed"]):
        for quantity in ("loss", "gradient"):
            known = rows[quantity].dropna()
            assert len(known) >= 4
            np.testing.assert_allclose(known, known.iloc[0], rtol=2e-5)
    training = {name for name, method in METHODS.items() if method.task == "training"}
    assert set(table.dropna()["method"]) == {name for name in training if METHODS[name].counted}


def test_the_loss_is_that_of_the_formula():
    problem = memory.problem_of(SMALL, 3, dtype=torch.float64)
    X, y, q = (t.numpy() for t in (problem.tokens, problem.targets, problem.query))
    c, U, W = (block.numpy() for block in problem.heads)
    values = []
    for x in X:
        logits = np.stack([x @ w @ q for w in W])
        alpha = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        values.append(c @ np.tanh(((alpha @ x) * U).sum(axis=1)) / math.sqrt(len(c)))
    rows = memory.run(SMALL, 3).set_index("quantity")["value"]
    assert rows["loss"] == pytest.approx(np.mean((np.array(values) - y) ** 2), rel=1e-5)
    assert rows["tokens"] == 4 * X.size
    assert rows["arrays"] == rows["extra"] / (4 * SMALL.samples * SMALL.units * SMALL.length)


def test_what_is_kept_grows_as_the_method_says():
    sizes = SMALL.samples * SMALL.units
    for name in FLAT:
        assert extra(method=name, length=256) == extra(method=name, length=1024)
    for name in ("autograd", "closed", "values"):
        grown = extra(method=name, length=512) - extra(method=name, length=256)
        assert grown == 4 * 4 * sizes * 256  # logits, weights, projections, their product
    for name in ("recurrent_autograd", "recurrent_closed"):
        grown = extra(method=name, length=512) - extra(method=name, length=256)
        assert 2 <= grown / (4 * sizes * 256) < 3
    grown = extra(method="recurrent_checkpointed", length=1024) - extra(
        method="recurrent_checkpointed", length=256
    )
    assert grown == 3 * 4 * sizes * (32 - 16)  # sqrt(T) kept states, and a part twice
    square, next_one = (extra(method="recurrent_checkpointed", length=T) for T in (256, 257))
    assert next_one - square == 2 * 4 * sizes  # 17 states a part, of which there are 16 still


@pytest.mark.parametrize(("name", "arrays"), [("autograd", 2), ("recurrent_autograd", 1)])
def test_of_the_arrays_at_the_peak_half_are_kept_for_the_way_back(name, arrays):
    problem = memory.problem_of(replace(SMALL, length=512), 0)
    kept = {}

    def note(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        METHODS[name].compute(problem)
    bytes_of_one = 4 * SMALL.samples * SMALL.units * 512
    own = (sum(kept.values()) - problem.tokens.nbytes) / bytes_of_one
    assert own == pytest.approx(arrays, abs=0.05)
    assert extra(method=name, length=512) / bytes_of_one == pytest.approx(2 * arrays, abs=0.05)


def test_the_blocks_of_the_library_stop_growing():
    at = {T: extra(method="blocks", units=64, length=T) for T in (2048, 4096, 8192)}
    assert at[4096] == at[8192] <= 1.2 * at[2048]


def test_the_last_token_asks_for_no_more_than_queries_of_its_own():
    fixed, last = (extra(method="streaming", length=500, query=q) for q in ("fixed", "last"))
    assert fixed < last < 2 * fixed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "flash"}, "method: .*'autograd'.*got 'flash'"),
        ({"method": "fused"}, "method: 'fused' is a compiled kernel.*resident"),
        ({"query": "first"}, "query: .*'fixed'.*got 'first'"),
    ],
)
def test_errors_name_the_argument_and_the_remedy(changes, message):
    with pytest.raises(ValueError, match=message):
        memory.run(replace(SMALL, **changes), 0)


def test_a_label_names_a_method_and_a_query(smoke):
    assert set(memory.of(smoke, "streaming_last")["query"]) == {"last"}
    assert set(memory.of(smoke, "streaming")["query"]) == {"fixed"}
    assert set(memory.of(smoke, "recurrent_values")["method"]) == {"recurrent_values"}
    with pytest.raises(ValueError, match=r"label: .*'streaming_last'.*got 'fused'"):
        memory.of(smoke, "fused")


def test_smoke_can_be_summarised_and_stored(tmp_path):
    frame = sweep(memory, "smoke", directory=tmp_path)
    back, _ = read_results(tmp_path)
    first, second = (memory.summarise(table) for table in (frame, back))
    pd.testing.assert_frame_equal(first, second)
    assert list(first["quantity"]) == list(memory.BANDS)
    assert list(first.columns) == [
        "quantity", "slope", "lower", "upper", "seeds", "band_lower", "band_upper", "inside",
    ]  # fmt: skip


def synthetic(exponents, lengths=(256, 1024, 4096, 16384)):
    records = [
        {"method": label.removesuffix("_last"), "length": T, "seed": seed, "quantity": "extra",
         "query": "last" if label.endswith("_last") else "fixed",
         "value": 1e4 * (max(T, 1024) if T < 1024 else T) ** exponent}
        for label, exponent in exponents.items()
        for T in lengths
        for seed in (0, 1)
    ]  # fmt: skip
    return pd.DataFrame(records)


def test_summarise_tells_hits_from_misses():
    right = {name: (band.lower + band.upper) / 2 for name, band in memory.BANDS.items()}
    table = memory.summarise(synthetic(right)).set_index("quantity")
    assert table["inside"].all()
    np.testing.assert_allclose(table["slope"], list(right.values()), atol=1e-12)
    swapped = {name: 1.0 - value for name, value in right.items()}
    missed = memory.summarise(synthetic(swapped)).set_index("quantity")["inside"]
    assert not missed.drop("recurrent_checkpointed").any()
    assert missed["recurrent_checkpointed"]  # one half is its own mirror image


def test_short_sequences_do_not_enter_the_slope_unless_there_are_no_others():
    frame = synthetic({"autograd": 1.0})
    assert memory.estimate(frame, "autograd").mean == pytest.approx(1.0)
    short = synthetic({"autograd": 1.0}, lengths=(256, 512, 1024))
    assert memory.estimate(short, "autograd").mean == pytest.approx(0.0)
    assert memory.estimate(frame, "closed") is None
    assert list(memory.summarise(frame)["quantity"]) == ["autograd"]


# The states


@pytest.mark.parametrize("query", ["fixed", "last"])
@pytest.mark.parametrize("name", ["closed", "streaming", "blocks", "autograd"])
def test_a_gradient_of_heads_is_that_of_automatic_differentiation(name, query):
    problem = memory.problem_of(replace(SMALL, length=150, query=query), 4, **DOUBLE)
    leaves = [block.clone().requires_grad_() for block in problem.heads]
    loss = (_heads(problem, *leaves) - problem.targets).square().mean()
    expected = torch.autograd.grad(loss, leaves)
    found, gradients = METHODS[name].compute(problem)
    torch.testing.assert_close(found, loss.detach(), rtol=1e-13, atol=0)
    for a, b in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)


def _heads(problem, c, U, W):
    query = problem.query.expand(len(problem.tokens), -1)
    logits = torch.einsum("ntd,mde,ne->nmt", problem.tokens, W, query)
    pooled = torch.softmax(logits, dim=-1) @ problem.tokens
    return (c * problem.sigma.value((pooled * U).sum(dim=-1))).sum(dim=-1) * len(c) ** -0.5


@pytest.mark.parametrize("query", ["fixed", "last"])
@pytest.mark.parametrize("name", ["values", "values_streaming"])
def test_values_are_those_of_the_formula(name, query):
    problem = memory.problem_of(replace(SMALL, length=150, query=query), 4, **DOUBLE)
    torch.testing.assert_close(
        METHODS[name].compute(problem), _heads(problem, *problem.heads), rtol=1e-13, atol=1e-15
    )


@pytest.mark.parametrize("length", [1, 2, 16, 17, 90])
@pytest.mark.parametrize("activation", ["tanh", "erf"])
def test_a_gradient_of_units_is_that_of_automatic_differentiation(length, activation):
    problem = memory.problem_of(replace(SMALL, length=length, activation=activation), 4, **DOUBLE)
    units = problem.units._replace(u=1.5 * problem.units.u)
    problem = problem._replace(units=units)
    w, u, c = leaves = [block.clone().requires_grad_() for block in units]
    h = torch.zeros(SMALL.samples, SMALL.units, **DOUBLE)
    for t in range(length):
        h = problem.sigma.value(problem.tokens[:, t] @ w.mT + u * h)
    values = (c * h).sum(dim=-1) * len(c) ** -0.5
    loss = (values - problem.targets).square().mean()
    expected = torch.autograd.grad(loss, leaves)
    torch.testing.assert_close(METHODS["recurrent_values"].compute(problem), values.detach())
    for name in ("forward", "checkpointed", "closed", "autograd"):
        found, gradients = METHODS[f"recurrent_{name}"].compute(problem)
        torch.testing.assert_close(found, loss.detach(), rtol=1e-13, atol=0)
        for a, b in zip(gradients, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-14)
    for cut in (1, 7, length, length + 3):
        gradients = state.checkpointed(
            units, problem.tokens, problem.targets, problem.sigma, cut=cut
        )[1]
        for a, b in zip(gradients, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-14)


@settings(max_examples=40, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    order=st.randoms(use_true_random=False),
    scale=st.sampled_from([0.0, 1.0, 30.0, 3000.0]),
    seed=st.integers(0, 50),
)
def test_blocks_merge_in_any_order_and_any_grouping(cuts, order, scale, seed):
    stream = generator(seed, "merge")
    n, m, d = 2, 3, 4
    X = torch.randn(n, sum(cuts), d, generator=stream, **DOUBLE)
    U, W = (torch.randn(m, *k, generator=stream, **DOUBLE) for k in ((d,), (d, d)))
    q = torch.randn(d, generator=stream, **DOUBLE)
    parts = [state.block_summary(x, U, scale * (W @ q)) for x in X.split(cuts, dim=1)]
    while len(parts) > 1:
        order.shuffle(parts)
        parts.append(state.merge(parts.pop(), parts.pop(), U))
    s, a, r = attention.head_features(X, W, U, q, scale=scale, engine="reference")
    near = {"rtol": 1e-12, "atol": 1e-13 * (1 + scale)}  # a logit is rounded in its last digit
    torch.testing.assert_close((parts[0].a * U).sum(dim=-1), s, **near)
    torch.testing.assert_close(parts[0].a, a, **near)
    torch.testing.assert_close(parts[0].r, r, **near)
    logits = attention.logits(X, W, q, scale=scale)
    torch.testing.assert_close(parts[0].top, logits.amax(dim=-1), **near)
    size = torch.logsumexp(logits, dim=-1)
    torch.testing.assert_close(parts[0].top + parts[0].Z.log(), size, **near)


def test_a_summary_holds_2_d_plus_2_numbers_a_head():
    problem = memory.problem_of(SMALL, 0)
    total = state.streamed_summary(problem.tokens, *problem.heads[1:], problem.query)
    numbers = sum(part.numel() for part in total)
    assert numbers == SMALL.samples * SMALL.units * (2 * SMALL.dimension + 2)


# The meters


def counted(compute):
    return meter.peak_bytes(compute)[0]


def test_storages_are_counted_while_they_live():
    def compute():
        a = torch.zeros(1000)  # 4000
        b = a + 1  # 8000
        del a
        c = torch.zeros(1500)  # 10000
        del b, c
        return torch.zeros(2000)  # 8000

    assert counted(compute) == 10000


def test_views_and_writing_in_place_cost_nothing():
    given_before = torch.ones(50, 20)

    def compute():
        rows = given_before.unbind()
        block = given_before[:, 3:].mT.view(17, 50)
        given_before.mul_(2.0)
        torch.add(given_before, 1, out=given_before)
        return rows, block

    assert counted(compute) == 0


def test_a_view_keeps_the_whole_storage_alive():
    def compute():
        view = torch.zeros(1000)[:10]
        return view, torch.zeros(500)

    assert counted(compute) == 6000


def test_lists_of_tensors_and_other_dtypes_are_counted():
    def compute():
        parts = torch.ones(10, dtype=torch.float64)  # 80
        both = torch.cat([parts, parts])  # 160
        return torch.linalg.eigh(torch.eye(4)), both  # 64, 64 + 16

    assert counted(compute) == 80 + 160 + 64 + 64 + 16


def test_what_autograd_keeps_is_counted_and_freed_on_the_way_back():
    x = torch.ones(1000, requires_grad=True)

    def kept():
        y = x.exp().sin().cos()  # exp and sin are kept, cos is the result
        return y.shape, torch.ones(10).requires_grad_(), y

    def dropped():
        with torch.no_grad():
            return x.exp().sin().cos()

    assert counted(kept) == 3 * 4000 + 40
    assert counted(dropped) == 2 * 4000

    def back():
        # two kept, the seed of 4, then cos(sin) and the product: the chain is let go link by link
        return torch.autograd.grad(x.exp().sin().sum(), x)

    assert 2 * 4000 < counted(back) <= 4 * 4000 + 16


def test_the_count_repeats_after_the_work_space_was_used():
    config = replace(SMALL, method="blocks", length=300)
    first = memory.run(config, 0)
    memory.run(replace(config, length=3000), 0)
    pd.testing.assert_frame_equal(memory.run(config, 0), first, check_exact=True)


def test_an_error_passes_and_the_collector_runs_again():
    def broken():
        assert not gc.isenabled()
        raise FloatingPointError("in the middle")

    assert gc.isenabled()
    with pytest.raises(FloatingPointError, match="in the middle"):
        counted(broken)
    assert gc.isenabled()


def test_on_cuda_the_allocator_is_asked_after_a_first_run(monkeypatch):
    called = []
    answers = {"memory_allocated": 300, "max_memory_allocated": 1000}
    for name in ("synchronize", "reset_peak_memory_stats", *answers):

        def fake(device, name=name):
            called.append((name, str(device)))
            return answers.get(name)

        monkeypatch.setattr(torch.cuda, name, fake)
    peak, result = meter.peak_bytes(lambda: called.append(("compute", "")) or "made", "cuda:1")
    assert (peak, result) == (700, "made")
    names = [name for name, _ in called]
    assert names.count("compute") == 2
    reset, before, asked = (names.index(name) for name in ("reset_peak_memory_stats", *answers))
    assert names.index("compute") < reset < asked
    assert before < len(names) - 1 - names[::-1].index("compute") < asked
    assert {device for name, device in called if name != "compute"} == {"cuda:1"}


def test_pages_are_those_of_the_process():
    config = replace(SMALL, samples=8, units=64, dimension=8, length=16384)
    assert memory.resident(config, 0) == pytest.approx(extra(**vars(config)), rel=0.05)
    ones = functools.partial, torch.ones, 2**24
    assert meter.resident_bytes(*ones) == pytest.approx(2**26, abs=2**23)  # with the code of it
    with pytest.raises(RuntimeError, match=r"^ValueError: "):
        meter.resident_bytes(math.sqrt, -1.0)


def test_views_take_pages_that_are_no_bytes_of_theirs():
    # What closed back-propagation holds beyond its count: lists of T views.
    steps = torch.zeros(2**15, 1)
    assert counted(lambda: steps.unbind()) == 0
    pages = meter.resident_bytes(functools.partial, torch.unbind, steps)
    assert 400 < pages / len(steps) < 800


def test_a_peak_before_the_computation_is_forgotten():
    once_large = "[__import__('torch').ones(2**25), lambda: None][1]"
    assert meter.resident_bytes(eval, once_large) < 2**23


def test_what_was_freed_before_does_not_hide_what_is_taken():
    # The pin lies above the freed blocks, so that they do not go back to the system by themselves.
    make = "lambda: [bytes(2000) for _ in range(50_000)]"
    hole = "lambda blocks, pin: [blocks.clear(), lambda: (make(), pin)][1]"
    again = f"(lambda make: ({hole})(make(), bytes(5000)))({make})"
    assert meter.resident_bytes(eval, again) == pytest.approx(50_000 * 2048, rel=0.1)


def test_where_the_peak_cannot_be_reset_the_error_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(meter, "_RESET", tmp_path / "none" / "clear_refs")
    with pytest.raises(RuntimeError, match=r"needs Linux.*use peak_bytes"):
        meter._resident(lambda: None)
    with pytest.raises(RuntimeError, match="has no VmNothing"):
        meter._status("VmNothing")


@pytest.mark.compiler
@pytest.mark.parametrize("name", memory.KERNELS)
def test_the_kernels_compute_what_the_others_do(name):
    problem = memory.problem_of(SMALL, 2, **DOUBLE)
    other = {"fused": "closed", "recurrent_fused": "recurrent_closed"}[name]
    for one, two in zip(*(METHODS[k].compute(problem)[1] for k in (name, other)), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-13)


def test_an_activation_is_passed_on():
    problem = memory.problem_of(replace(SMALL, activation="erf"), 0)
    assert problem.sigma is get_activation("erf")


def test_the_last_token_asks_and_the_output_is_not_zero():
    problem = memory.problem_of(replace(SMALL, query="last"), 0)
    assert torch.equal(problem.query, problem.tokens[:, -1])
    assert memory.problem_of(SMALL, 0).query.shape == (SMALL.dimension,)
    assert METHODS["values"].compute(problem).abs().min() > 1e-3  # c is 1, not symmetric


def test_a_scale_of_the_logits_is_one_of_the_matrices():
    X, _, q, (c, U, W), _, sigma = memory.problem_of(SMALL, 0, **DOUBLE)
    one = state.streamed_summary(X, U, W, q, scale=2.5)
    for a, b in zip(one, state.streamed_summary(X, U, 2.5 * W, q), strict=True):
        torch.testing.assert_close(a, b)
    values = state.streamed_values(
        memory.problem_of(SMALL, 0, **DOUBLE).heads, X, q, sigma, scale=2.5
    )
    pooled = (sigma.value((one.a * U).sum(dim=-1)) * c).sum(dim=-1) * len(c) ** -0.5
    torch.testing.assert_close(values, pooled)
