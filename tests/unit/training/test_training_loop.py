"""The loop around the steps: what it keeps, how rarely it looks, what it costs."""

import math
import sys
from collections import Counter

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attention_dynamics.data.streams import generator
from attention_dynamics.data.tokens import unit_ball_tokens
from attention_dynamics.models.parameters import Parameters, independent_initialisation
from attention_dynamics.models.shallow import ShallowTransformer
from attention_dynamics.training import (
    DescentConfig,
    Objective,
    Radii,
    descent,
    projected_gradient_descent,
)
from attention_dynamics.training.update import FusedUpdate, Update, _functions

n, T, d, m = 24, 5, 3, 5
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def model_of(dtype=torch.float64, device="cpu"):
    start = independent_initialisation(m, d, generator=generator(0), dtype=dtype, device=device)
    return ShallowTransformer(start, query="last")


def data(name="training", device="cpu"):
    tokens = unit_ball_tokens(n, T, d, generator=generator(0, name), dtype=torch.float64)
    return tokens.to(device), torch.sin(3 * tokens.sum(dim=(1, 2))).to(device)


@pytest.fixture
def accelerator(monkeypatch):
    """Run on the CPU as on an accelerator: torch operators, a look every ``window`` steps."""

    def pretend(window=64):
        monkeypatch.setattr(descent, "update_for", Update)
        monkeypatch.setattr(descent, "_window", lambda parameters: window)

    return pretend


def train(config, **options):
    return projected_gradient_descent(model_of(), *data(), config, **options)


def equal(a, b, atol=0.0):
    """Two results agree: numbers to ``atol``, steps exactly."""
    for name in ("initial", "final", "averaged", "best"):
        for x, y in zip(getattr(a, name), getattr(b, name), strict=True):
            assert torch.allclose(x.cpu(), y.cpu(), rtol=0, atol=atol), name
    for name in ("best_step", "steps_taken", "stopped_early", "step_size"):
        assert getattr(a, name) == getattr(b, name), name
    assert a.best_loss == pytest.approx(b.best_loss, rel=atol, abs=0)
    pd.testing.assert_frame_equal(a.history, b.history, rtol=atol, atol=atol)


CONFIGS = {
    "plain": DescentConfig(150),
    "projected": DescentConfig(150, step_size=0.3, radii=Radii(0.2, 0.3, 0.05), record_every=7),
    "stopped": DescentConfig(
        400, step_size=0.3, patience=40, relative_improvement=0.1, record_every=9
    ),
    "stochastic": DescentConfig(100, step_size=0.3, batch_size=8, record_every=3, patience=25),
}


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("window", [2, 7, 64])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_looking_rarely_changes_nothing(accelerator, config, window, held):
    options = {"validation": data("held")} if held else {}
    plain = train(config, **options)
    accelerator(1)
    each_step = train(config, **options)
    accelerator(window)
    rarely = train(config, **options)
    equal(rarely, each_step)
    equal(plain, rarely, atol=1e-12)


def test_a_run_that_is_stopped_ends_where_it_would_have(accelerator):
    accelerator(64)
    result = train(CONFIGS["stopped"])
    assert result.stopped_early
    assert 64 < result.steps_taken < 127  # within the second window
    assert result.history["step"].iloc[-1] == result.steps_taken


@pytest.mark.parametrize(
    "config",
    [
        DescentConfig(200, step_size=1e300),
        DescentConfig(200, step_size=1e300, batch_size=4, record_every=50),
        DescentConfig(200, step_size=1e300, record_every=50),
    ],
)
def test_the_error_names_the_first_bad_step(accelerator, config):
    with pytest.raises(FloatingPointError) as at_once:
        train(config)
    accelerator(64)
    model = model_of()
    with pytest.raises(FloatingPointError) as late:
        projected_gradient_descent(model, *data(), config)
    assert str(late.value) == str(at_once.value)
    assert all(
        torch.equal(a, b) for a, b in zip(model.snapshot(), model_of().snapshot(), strict=True)
    )


def test_what_comes_after_the_stop_is_no_error(accelerator, monkeypatch):
    # The loop has gone on past step 5 when it looks, and met an infinity there.
    def loss(self, phi):
        seen.append(len(seen))
        value = math.inf if seen[-1] > 8 else 1.0
        return torch.tensor(value, dtype=torch.float64), phi.scaled(0.01)

    monkeypatch.setattr(Objective, "loss_and_gradients", loss)
    seen = []
    accelerator(64)
    result = train(DescentConfig(100, patience=5))
    assert len(seen) == 64
    assert (result.steps_taken, result.stopped_early, result.best_step) == (5, True, 0)


def forbid_waiting(monkeypatch):
    """Refuse what waits for a device, from the first step on; count the transfers of looks."""
    transfers = Counter()

    def refuse(self, *_):
        raise AssertionError("the loop waits for the device")

    def count(name):
        original = getattr(Tensor, name)

        def counted(self, *arguments, **options):
            transfers[name] += 1
            return original(self, *arguments, **options)

        return counted

    def steps(config, progress):
        for name in ("item", "__float__", "__int__", "__bool__", "__index__", "numpy", "nonzero"):
            monkeypatch.setattr(Tensor, name, refuse)
        monkeypatch.setattr(Tensor, "tolist", count("tolist"))
        return range(config.steps + 1)

    monkeypatch.setattr(descent, "_steps", steps)
    return transfers


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("held", [False, True])
def test_an_accelerator_is_waited_for_at_looks_only(accelerator, config, held):
    options = {"validation": data("held")} if held else {}
    accelerator(64)
    with pytest.MonkeyPatch.context() as guard:
        transfers = forbid_waiting(guard)
        # The reference never looks at its numbers on any device; CPU engines may.
        result = train(config, engine="reference", **options)
    looks = math.ceil((result.steps_taken + 1) / 64)
    assert looks <= transfers["tolist"] <= 2 * looks  # losses, and the rows of the history


def test_the_guard_sees_a_loop_that_waits():
    with pytest.MonkeyPatch.context() as guard:
        forbid_waiting(guard)
        with pytest.raises(AssertionError, match="waits for"):
            train(DescentConfig(3))  # the CPU looks at each step


@pytest.mark.parametrize("device", DEVICES)
def test_iterates_between_two_looks_fit_the_memory(device):
    small = independent_initialisation(4, 3, generator=generator(0), device=device)
    assert descent._window(small) == (1 if device == "cpu" else 64)
    for size, window in ((1e5, 64), (2**22, 16), (1e8, 1)):
        meta = Parameters(*(torch.empty(int(size) // 3, device="meta"),) * 3)
        assert descent._window(meta) == window


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_devices_agree(device, config):
    expected = train(config)
    got = projected_gradient_descent(model_of(device=device), *data(device=device), config)
    assert got.final.U.device.type == device
    equal(got, expected, atol=1e-10)


@settings(max_examples=60)
@given(
    losses=st.lists(st.floats(0.1, 1.0), min_size=2, max_size=25),
    window=st.integers(1, 6),
    patience=st.one_of(st.none(), st.integers(1, 6)),
    record_every=st.integers(1, 4),
)
def test_slots_keep_every_iterate_as_long_as_it_is_needed(losses, window, patience, record_every):
    steps = len(losses) - 1
    gradients = [
        independent_initialisation(m, d, generator=generator(k), dtype=torch.float64)
        for k in range(steps + 1)
    ]

    def evaluate(self, phi):
        k = len(seen)
        seen.append(phi.clone())
        return torch.tensor(losses[k], dtype=torch.float64), gradients[k]

    seen = []
    config = DescentConfig(steps, 0.1, patience=patience, record_every=record_every)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Objective, "loss_and_gradients", evaluate)
        patch.setattr(descent, "_window", lambda parameters: window)
        result = train(config)

    phi, iterates = model_of().snapshot(), []
    for g in gradients:
        iterates.append(phi)
        phi = phi.minus(g.scaled(0.1))
    reference, at, end = math.inf, 0, steps
    for k, loss in enumerate(losses):
        if loss < (1 - config.relative_improvement) * reference:
            reference, at = loss, k
        if patience is not None and k - at >= patience and k < steps:
            end = k
            break
    best = min(range(end + 1), key=losses.__getitem__)
    mean = Parameters(
        *(torch.stack(blocks).mean(0) for blocks in zip(*iterates[:end], strict=True))
    )
    assert (result.steps_taken, result.best_step) == (end, best)
    assert result.best_loss == losses[best]
    rows = sorted({*range(0, end + 1, record_every), end})
    assert result.history["step"].tolist() == rows
    assert result.history["loss"].tolist() == [losses[k] for k in rows]
    for name, want in (("final", iterates[end]), ("best", iterates[best]), ("averaged", mean)):
        for block, value in zip(getattr(result, name), want, strict=True):
            assert torch.allclose(block, value, rtol=0, atol=1e-12), name


def test_a_long_history_outgrows_its_first_array(monkeypatch):
    def evaluate(self, phi):
        return torch.tensor(1.0 / (1 + next(count)), dtype=torch.float64), phi.scaled(0.0)

    count = iter(range(10**6))
    monkeypatch.setattr(Objective, "loss_and_gradients", evaluate)
    history = train(DescentConfig(10_000)).history
    assert history["step"].tolist() == list(range(10_001))
    assert history["loss"].to_numpy() == pytest.approx(1 / np.arange(1, 10_002), rel=0, abs=0)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_run_leaves_the_model_as_it_came_in(monkeypatch, stop):
    original = Objective.loss_and_gradients
    calls = []

    def interrupted(self, phi):
        calls.append(phi)
        if len(calls) == 6:
            raise stop
        return original(self, phi)

    monkeypatch.setattr(Objective, "loss_and_gradients", interrupted)
    model = model_of()
    with pytest.raises(stop):
        projected_gradient_descent(model, *data(), DescentConfig(50, step_size=0.5))
    assert len(calls) == 6
    assert not torch.equal(calls[-1].U, model.U)
    assert all(
        torch.equal(a, b) for a, b in zip(model.snapshot(), model_of().snapshot(), strict=True)
    )


def test_results_do_not_share_memory():
    result = train(DescentConfig(20, step_size=0.5))
    kept = [getattr(result, name) for name in ("initial", "final", "averaged", "best")]
    assert len({block.untyped_storage().data_ptr() for each in kept for block in each}) >= 4
    assert result.best_step == 20
    result.best.U.zero_()
    assert result.final.U.abs().min() > 0


def test_batches_gathered_together_are_the_draws_of_single_steps():
    tokens, targets = data()
    mask = torch.arange(T) < torch.arange(n)[:, None] % T + 1
    training = Objective.of(model_of(), tokens, targets, mask)
    batches = descent._batches(training, DescentConfig(1000, batch_size=7, seed=3))
    stream = generator(3, "projected gradient descent", "batches")
    for _ in range(150):
        index = torch.randint(n, (7,), generator=stream)
        batch = next(batches)
        assert torch.equal(batch.targets, targets[index])
        assert torch.equal(batch.tokens, training.tokens[index])
        assert torch.equal(batch.mask, mask[index])
        assert torch.equal(batch.inputs.query, training.inputs.query[index])


def test_an_engine_can_be_named():
    plain = train(DescentConfig(30, step_size=0.3))
    for engine in ("reference", "eager"):
        equal(train(DescentConfig(30, step_size=0.3), engine=engine), plain, atol=1e-12)
    with pytest.raises(ValueError, match="engine: expected one of"):
        train(DescentConfig(30), engine="fastest")


class Operators(TorchDispatchMode):
    """Counts the operators that torch is asked for."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen[str(function)] += 1
        return function(*args, **(kwargs or {}))


def cost(steps, update):
    """Python calls and torch operators of a run whose loss and gradient cost one call."""
    answer = torch.tensor(0.5, dtype=torch.float64), model_of().snapshot().scaled(1e-3)
    calls = Counter()

    def count(frame, event, argument):
        calls[event] += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Objective, "loss_and_gradients", lambda self, phi: answer)
        if update is Update:
            patch.setattr(descent, "update_for", Update)
        config = DescentConfig(steps, radii=Radii(1.0, 1.0, 1.0))
        with Operators() as operators:
            train(config)
        previous = sys.getprofile()
        sys.setprofile(count)
        try:
            train(config)
        finally:
            sys.setprofile(previous)
    return calls["call"] + calls["c_call"], operators.seen.total()


@pytest.mark.parametrize(
    ("update", "most_calls", "most_operators"),
    [(Update, 80, 36), *([(FusedUpdate, 60, 1)] if _functions("float64") else [])],
)
def test_a_step_costs_few_calls(update, most_calls, most_operators):
    # Counted, not timed: the difference of two lengths is the cost of a step. The one operator of
    # the C++ is the look at the loss.
    per_step = np.subtract(cost(60, update), cost(20, update)) / 40
    assert 0 < per_step[0] <= most_calls
    assert 0 < per_step[1] <= most_operators


@pytest.mark.parametrize("engine", ["auto", "eager", "reference"])
def test_a_descent_runs_in_the_dtype_of_its_model_wherever_it_is_called(engine):
    tokens, y = (t.float() for t in data())
    y = y.bfloat16()
    config = DescentConfig(steps=4, step_size=0.5, batch_size=3)

    def run(x, y):
        model = model_of(torch.float32)
        return projected_gradient_descent(model, x, y, config, engine=engine)

    expected = run(tokens, y.float())
    equal(run(tokens, y), expected)
    equal(run(tokens.clone().requires_grad_(), y), expected)
    with torch.device("meta"):  # whatever the default device of new tensors is
        equal(run(tokens, y), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        equal(run(tokens, y), expected)
