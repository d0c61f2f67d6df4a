"""Projected descent against a plain autograd loop, its bookkeeping and its errors."""

import math
import warnings
from dataclasses import replace

import pandas as pd
import pytest
import torch

from attention_dynamics.data.streams import generator
from attention_dynamics.data.tokens import query_vector, unit_ball_tokens
from attention_dynamics.models import shallow
from attention_dynamics.models.parameters import Parameters
from attention_dynamics.models.shallow import ShallowTransformer
from attention_dynamics.theory.transport import TransportNorms
from attention_dynamics.training import DescentConfig, Radii, projected_gradient_descent

n, T, d, m = 24, 5, 3, 4
COLUMNS = [
    "step", "loss", "validation_loss",
    "gradient_c", "gradient_U", "gradient_W",
    "distance_c", "distance_U", "distance_W",
    "active_c", "active_U", "active_W",
]  # fmt: skip


def model_of(query="last", seed=0, dtype=torch.float64, heads=m):
    if query == "fixed":
        query = query_vector(d, generator=generator(0, "query"), dtype=dtype)
    return ShallowTransformer.symmetric(heads, d, query=query, seed=seed, dtype=dtype)


def data(samples=n, dtype=torch.float64, name="training"):
    tokens = unit_ball_tokens(samples, T, d, generator=generator(0, name), dtype=dtype)
    return tokens, torch.sin(3 * tokens.sum(dim=(1, 2)))


def same(a, b, atol=1e-13):
    return all(torch.allclose(x, y, rtol=0, atol=atol) for x, y in zip(a, b, strict=True))


def autograd_iterates(model, tokens, targets, steps, eta, radii, mask=None):
    """Plain projected descent: autograd for the gradient, a loop over heads for the balls."""
    initial = model.snapshot()
    phi, iterates, losses = initial, [initial], []
    for _ in range(steps + 1):
        leaves = Parameters(*(block.clone().requires_grad_() for block in phi))
        f = shallow.forward(leaves, tokens, query=model.query, mask=mask)
        loss = ((f - targets) ** 2).mean()
        gradients = torch.autograd.grad(loss, leaves)
        losses.append(loss.item())
        moved = []
        for block, gradient, centre, rho in zip(phi, gradients, initial, radii, strict=True):
            step = block - eta * gradient - centre
            for i in range(m):
                length = float(step[i].norm())
                if length > rho / math.sqrt(m):
                    step[i] *= rho / math.sqrt(m) / length
            moved.append(centre + step)
        phi = Parameters(*moved)
        iterates.append(phi)
    return iterates[: steps + 1], losses


@pytest.mark.parametrize("query", ["last", "fixed"])
@pytest.mark.parametrize("masked", [False, True])
def test_it_is_projected_gradient_descent(query, masked):
    tokens, targets = data()
    mask = None
    if masked:
        mask = torch.arange(T) < torch.arange(n)[:, None] % T + 1
    radii, steps = (0.2, 0.3, 0.02), 12
    expected, losses = autograd_iterates(
        model_of(query), tokens, targets, steps, steps**-0.5, radii, mask
    )
    model = model_of(query)
    result = projected_gradient_descent(
        model, tokens, targets, DescentConfig(steps, radii=Radii(*radii)), mask=mask
    )
    assert result.step_size == steps**-0.5
    assert same(result.initial, expected[0], atol=0)
    assert same(result.final, expected[-1])
    assert same(model.snapshot(), result.final, atol=0)
    mean = Parameters(
        *(torch.stack(blocks[:-1]).mean(dim=0) for blocks in zip(*expected, strict=True))
    )
    assert same(result.averaged, mean)
    assert result.history["loss"].to_numpy() == pytest.approx(losses, rel=1e-12)
    assert result.best_step == min(range(steps + 1), key=losses.__getitem__)
    assert same(result.best, expected[result.best_step])
    assert result.best_loss == pytest.approx(min(losses), rel=1e-12)
    assert not result.stopped_early
    assert result.steps_taken == steps


def test_history_describes_each_iterate():
    tokens, targets = data()
    radii, steps = (0.2, 0.3, 0.02), 12
    expected, _ = autograd_iterates(model_of(), tokens, targets, steps, 0.5, radii)
    model = model_of()
    config = DescentConfig(steps, step_size=0.5, radii=Radii(*radii))
    history = projected_gradient_descent(model, tokens, targets, config).history
    assert list(history.columns) == COLUMNS
    assert history["step"].tolist() == list(range(steps + 1))
    assert history["validation_loss"].isna().all()
    for k in (0, 1, 7, steps):
        _, gradients = shallow.loss_and_gradients(expected[k], tokens, targets, query="last")
        moved = expected[k].minus(expected[0]).block_norms()
        for block, rho in zip("cUW", radii, strict=True):
            row = history.iloc[k]
            gradient = float(getattr(gradients, block).norm())
            reached = math.sqrt(m) * float(getattr(moved, block).max())
            assert row[f"gradient_{block}"] == pytest.approx(gradient, rel=1e-12)
            assert row[f"distance_{block}"] == pytest.approx(reached, rel=1e-9, abs=1e-14)
            assert row[f"distance_{block}"] <= rho * (1 + 1e-12)
            on_boundary = int((getattr(moved, block) * math.sqrt(m) > rho * (1 - 1e-9)).sum())
            assert row[f"active_{block}"] == on_boundary
    assert history[["active_c", "active_U", "active_W"]].iloc[-1].sum() > 0


def test_record_every_thins_the_history_and_keeps_both_ends():
    tokens, targets = data()
    config = DescentConfig(10, record_every=4)
    result = projected_gradient_descent(model_of(), tokens, targets, config)
    full = projected_gradient_descent(model_of(), tokens, targets, replace(config, record_every=1))
    assert result.history["step"].tolist() == [0, 4, 8, 10]
    kept = full.history[full.history["step"].isin([0, 4, 8, 10])].reset_index(drop=True)
    pd.testing.assert_frame_equal(result.history, kept)
    assert result.best_step == full.best_step  # the training loss is known at every step


def test_validation_decides_which_iterate_is_best():
    tokens, targets = data()
    held = (tokens, -targets)  # each step leads away from these: step 0 stays best
    result = projected_gradient_descent(
        model_of(), tokens, targets, DescentConfig(15), validation=held
    )
    assert result.best_step == 0
    assert same(result.best, result.initial, atol=0)
    assert result.history["validation_loss"].is_monotonic_increasing
    expected = float(shallow.loss(result.final, *held, query="last"))
    assert result.history["validation_loss"].iloc[-1] == pytest.approx(expected, rel=1e-13)
    assert result.best_loss == result.history["validation_loss"].min()


def test_validation_takes_a_mask():
    tokens, targets = data()
    held_tokens, held_targets = data(samples=10, name="validation")
    mask = torch.ones(10, T, dtype=torch.bool)
    mask[:, -1] = False
    held = (held_tokens, held_targets, mask)
    result = projected_gradient_descent(
        model_of("fixed"), tokens, targets, DescentConfig(3), validation=held
    )
    short = shallow.loss(
        result.final, held_tokens[:, :-1], held_targets, query=model_of("fixed").query
    )
    assert result.history["validation_loss"].iloc[-1] == pytest.approx(float(short), rel=1e-12)


def test_stochastic_descent_draws_batches_with_replacement():
    tokens, targets = data()
    config = DescentConfig(6, step_size=0.3, batch_size=8, seed=5, record_every=3)
    result = projected_gradient_descent(model_of(), tokens, targets, config)
    stream = generator(5, "projected gradient descent", "batches")
    phi = model_of().snapshot()
    for k in range(6):
        if k % 3 == 0:
            row = result.history[result.history["step"] == k]
            whole = float(shallow.loss(phi, tokens, targets, query="last"))
            assert row["loss"].item() == pytest.approx(whole, rel=1e-12)
        index = torch.randint(n, (8,), generator=stream)
        _, g = shallow.loss_and_gradients(phi, tokens[index], targets[index], query="last")
        phi = phi.minus(g.scaled(0.3))
    assert same(result.final, phi)
    assert result.history["step"].tolist() == [0, 3, 6]
    again = projected_gradient_descent(model_of(), tokens, targets, config)
    assert same(again.final, result.final, atol=0)
    other = projected_gradient_descent(model_of(), tokens, targets, replace(config, seed=6))
    assert not same(other.final, result.final, atol=1e-6)


def test_stochastic_gradients_average_to_the_gradient():
    tokens, targets = data()
    draws = []
    for seed in range(225):
        config = DescentConfig(1, step_size=1.0, batch_size=4, seed=seed)
        result = projected_gradient_descent(model_of(), tokens, targets, config)
        draws.append(result.initial.U - result.final.U)
    _, g = shallow.loss_and_gradients(model_of().snapshot(), tokens, targets, query="last")
    stacked = torch.stack(draws)
    error = stacked.std(dim=0) / 15
    assert ((stacked.mean(dim=0) - g.U).abs() < 5 * error).all()


def test_early_stopping_counts_patience_from_the_last_real_improvement():
    tokens, targets = data()
    config = DescentConfig(3000, step_size=0.5, patience=20, relative_improvement=0.05)
    model = model_of()
    result = projected_gradient_descent(model, tokens, targets, config)
    assert result.stopped_early
    assert result.steps_taken < 3000
    losses = result.history["loss"].tolist()
    assert len(losses) == result.steps_taken + 1
    reference, at = math.inf, 0
    for k, loss in enumerate(losses):
        if loss < 0.95 * reference:
            reference, at = loss, k
        assert (k - at >= 20) == (k == result.steps_taken)
    # small improvements below the threshold still count for the best iterate
    assert result.best_step == min(range(len(losses)), key=losses.__getitem__)
    assert result.best_step > at
    assert same(model.snapshot(), result.final, atol=0)


def test_float32_and_masked_padding_run():
    tokens, targets = data(dtype=torch.float32)
    tokens[:, 0] = math.nan
    mask = torch.ones(n, T, dtype=torch.bool)
    mask[:, 0] = False
    model = model_of(dtype=torch.float32)
    result = projected_gradient_descent(
        model, tokens, torch.nan_to_num(targets), DescentConfig(20), mask=mask
    )
    assert result.averaged.dtype == torch.float32
    assert result.history["loss"].iloc[-1] < result.history["loss"].iloc[0]


def test_the_bar_is_shown_on_request_only(capsys):
    tokens, targets = data()
    projected_gradient_descent(model_of(), tokens, targets, DescentConfig(3))
    assert capsys.readouterr().err == ""
    projected_gradient_descent(model_of(), tokens, targets, DescentConfig(3), progress=True)
    assert "projected gradient descent" in capsys.readouterr().err


@pytest.mark.parametrize("block", ["c", "U", "W"])
def test_radii_below_the_transport_norms_warn(block):
    tokens, targets = data()
    radii = Radii(**({"c": 3.0, "U": 3.0, "W": 3.0} | {block: 1.5}))
    config = DescentConfig(1, radii=radii, transport_norms=TransportNorms(2.0, 2.0, 2.0))
    message = rf"radii\.{block} = 1\.5 is below transport_norms\.{block} = 2.*raise radii\.{block}"
    with pytest.warns(UserWarning, match=message) as caught:
        projected_gradient_descent(model_of(), tokens, targets, config)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    free = replace(config, radii=Radii(2.0, None, 2.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        projected_gradient_descent(model_of(), tokens, targets, free)


def test_patience_that_ends_with_the_last_step_stops_nothing():
    tokens, targets = data()
    config = DescentConfig(5, step_size=1e-12, patience=5)
    result = projected_gradient_descent(model_of(), tokens, targets, config)
    assert (result.steps_taken, result.stopped_early) == (5, False)
    sooner = projected_gradient_descent(model_of(), tokens, targets, replace(config, patience=4))
    assert (sooner.steps_taken, sooner.stopped_early) == (4, True)


def test_tokens_beyond_the_unit_ball_warn_where_the_theory_is_meant():
    tokens, targets = data()
    norms = TransportNorms(0.0, 0.0, 0.0)
    with pytest.warns(UserWarning, match=r"tokens: norms reach .*rescale_tokens.*token_bound"):
        projected_gradient_descent(
            model_of(), 3 * tokens, targets, DescentConfig(1, transport_norms=norms)
        )
    padded = torch.cat((tokens, torch.full_like(tokens[:, :1], 9.0)), dim=1)
    mask = torch.ones(n, T + 1, dtype=torch.bool)
    mask[:, -1] = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        projected_gradient_descent(model_of(), 3 * tokens, targets, DescentConfig(1))
        projected_gradient_descent(
            model_of(), padded, targets, DescentConfig(1, transport_norms=norms), mask=mask
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"radii": 3.0}, r"radii: expected Radii\(c, U, W\), got 3.0; name the blocks"),
        ({"step_size": "0.1"}, "step_size: expected a finite number > 0, got '0.1', a str; pass"),
    ],
)
def test_a_configuration_of_another_type_is_refused(changes, message):
    with pytest.raises(TypeError, match=message):
        DescentConfig(10, **changes)


def test_a_loss_that_overflows_at_the_start_is_no_divergence():
    tokens, targets = data()
    with pytest.raises(FloatingPointError, match=r"at step 0 .* before the first step: rescale"):
        projected_gradient_descent(model_of(), tokens, 1e200 * targets, DescentConfig(3))


@pytest.mark.parametrize("held", [(torch.zeros(2, 2, 2),), torch.zeros(2, 2, 2)])
def test_a_validation_set_that_is_no_pair_is_refused(held):
    tokens, targets = data()
    with pytest.raises(TypeError, match=r"validation: expected \(tokens, targets\) or"):
        projected_gradient_descent(model_of(), tokens, targets, DescentConfig(1), validation=held)


def test_divergence_names_the_step_and_the_step_size():
    tokens, targets = data()
    model = model_of()
    config = DescentConfig(50, step_size=1e300)
    with pytest.raises(
        FloatingPointError, match=r"loss: (nan|inf) at step \d+ with step_size = 1e\+300.*reduce"
    ):
        projected_gradient_descent(model, tokens, targets, config)
    assert same(model.snapshot(), model_of().snapshot(), atol=0)


def test_half_precision_is_refused():
    tokens, targets = data(dtype=torch.float16)
    with pytest.raises(TypeError, match=r"model: .*got torch\.float16; .*model\.float\(\)"):
        projected_gradient_descent(model_of(dtype=torch.float16), tokens, targets, DescentConfig(3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps: expected an integer >= 1, got 0"),
        ({"steps": 2.5}, "steps: expected an integer >= 1, got 2.5"),
        ({"step_size": 0.0}, "step_size: expected a finite number > 0, got 0.0; pass None"),
        ({"step_size": -0.1}, "step_size: expected a finite number > 0, got -0.1"),
        ({"step_size": math.nan}, "step_size: expected a finite number > 0, got nan"),
        ({"batch_size": 0}, "batch_size: expected an integer >= 1, got 0"),
        ({"patience": 0}, "patience: expected an integer >= 1, got 0"),
        ({"record_every": 0}, "record_every: expected an integer >= 1, got 0"),
        ({"relative_improvement": -1e-9}, "relative_improvement: expected a fraction in"),
        ({"relative_improvement": 1.0}, "relative_improvement: expected a fraction in"),
    ],
)
def test_a_configuration_out_of_range_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        DescentConfig(**({"steps": 10} | changes))


def bad_data(change):
    tokens, targets = data()
    return change(tokens, targets)


def with_entry(tensor, value):
    tensor = tensor.clone()
    tensor.view(-1)[3] = value
    return tensor


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda x, y: (x, y[:-1]), ValueError, r"targets: expected shape \(n,\) with n = 24"),
        (lambda x, y: (x, y[:, None]), ValueError, r"targets: .*got \(24, 1\); one number"),
        (lambda x, y: (x.mT, y), ValueError, r"tokens: expected shape .* d = 3, got \(24, 3, 5\)"),
        (lambda x, y: (with_entry(x, math.nan), y), ValueError, "tokens: expected finite values"),
        (lambda x, y: (x, with_entry(y, math.inf)), ValueError, "targets: expected finite values"),
        (lambda x, y: (x.float(), y), TypeError, "tokens: has dtype torch.float32"),
        (lambda x, y: (x, y.float()), TypeError, "targets: has dtype torch.float32"),
        (lambda x, y: (x[:0], y[:0]), ValueError, "tokens: expected at least one sample"),
    ],
)
def test_bad_data_are_refused_before_the_first_step(change, error, message):
    tokens, targets = data()
    model = model_of()
    with pytest.raises(error, match=message):
        projected_gradient_descent(model, *change(tokens, targets), DescentConfig(3))
    with pytest.raises(error, match=f"validation {message}"):
        projected_gradient_descent(
            model, tokens, targets, DescentConfig(3), validation=change(tokens, targets)
        )
    assert same(model.snapshot(), model_of().snapshot(), atol=0)


def test_a_mask_that_is_not_boolean_is_refused():
    tokens, targets = data()
    with pytest.raises(TypeError, match="mask: expected a boolean"):
        projected_gradient_descent(
            model_of(), tokens, targets, DescentConfig(3), mask=torch.ones(n, T)
        )
