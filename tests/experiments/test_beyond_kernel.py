"""Beyond the kernel regime: the two scalings, what is measured of a descent, and the bands."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from torch.func import functional_call, jacrev

from attention_dynamics.data import generator, query_vector
from attention_dynamics.experiments import _beyond_kernel_state as state
from attention_dynamics.experiments import beyond_kernel
from attention_dynamics.experiments.estimates import select
from attention_dynamics.models import shallow
from attention_dynamics.models.attention import attention_weights, logits
from attention_dynamics.models.parameters import (
    Parameters,
    independent_initialisation,
    symmetric_initialisation,
)
from attention_dynamics.models.shallow import ShallowTransformer
from attention_dynamics.running import Experiment, sweep
from attention_dynamics.theory.kernels import empirical_kernel_total, spectrum
from attention_dynamics.training.descent import DescentConfig

SMOKE = beyond_kernel.PROFILES["smoke"].configs
BASE = replace(SMOKE[1], samples=12, held=24)
PROBLEM = {
    "teacher": "sharp", "samples": 12, "held": 24, "length": 5, "dimension": 3,
    "value_norm": 4.0, "logit_norm": 6.0, "teacher_heads": 32, "device": "cpu",
}  # fmt: skip


@pytest.fixture(scope="module")
def smoke():
    return sweep(beyond_kernel, "smoke")


def small(heads=6, seed=0, start=symmetric_initialisation):
    stream = torch.Generator().manual_seed(seed)
    phi = start(heads, 3, generator=stream, dtype=torch.float64)
    tokens = torch.randn((7, 4, 3), generator=stream, dtype=torch.float64) / 2
    targets = torch.randn(7, generator=stream, dtype=torch.float64)
    query = torch.tensor([0.6, 0.0, 0.8], dtype=torch.float64)
    return phi, state.Problem(tokens, targets, tokens[:3], targets[:3], query)


def by_hand(phi, problem, alpha, eta, steps):
    """Autograd descent of alpha f with step eta / alpha^2: the final heads and all the losses."""
    blocks, losses = [block.clone() for block in phi], []
    for _ in range(steps + 1):
        live = [block.requires_grad_() for block in blocks]
        c, U, W = live
        weights = torch.softmax(torch.einsum("ntd,mde,e->nmt", problem.tokens, W, problem.query), 2)
        pooled = torch.einsum("nmt,ntd->nmd", weights, problem.tokens)
        f = (c * torch.tanh((pooled * U).sum(-1))).sum(-1) / len(c) ** 0.5
        loss = (alpha * f - problem.targets).square().mean()
        losses.append(float(loss.detach()))
        slopes = torch.autograd.grad(loss, live)
        if len(losses) <= steps:
            blocks = [(b - eta / alpha**2 * g).detach() for b, g in zip(live, slopes, strict=True)]
    return Parameters(*(block.detach() for block in live)), losses


def test_the_module_has_the_shape_of_an_experiment():
    assert isinstance(beyond_kernel, Experiment)
    assert set(beyond_kernel.PROFILES) == {"smoke", "book", "paper"}


def test_bands_and_seeds_are_those_fixed_before_the_run():
    ends = {name: band.ends for name, band in beyond_kernel.BANDS.items()}
    assert len(ends) == 22
    for name in ("head_movement", "feature_movement", "attention_movement"):
        assert ends[f"kernel_width_{name}"] == (-0.6, -0.4)
        assert ends[f"rich_width_{name}"] == (-0.1, 0.1)
    assert ends["kernel_width_kernel_movement"] == (-1.15, -0.85)
    assert ends["kernel_width_linearisation"] == (-1.15, -0.85)
    assert ends["rich_width_deviation_rms"] == ends["kernel_width_deviation_rms"] == (-0.6, -0.4)
    assert ends["rich_step_edge_final"] == (0.75, 1.25)
    assert ends["rich_length_training_loss"] == (None, 0.05)
    assert ends["rich_samples_union"] == (None, 0.4)
    assert beyond_kernel.PROFILES["book"].seeds == tuple(range(8))
    assert beyond_kernel.PROFILES["paper"].seeds == tuple(range(10))
    heads = {c.heads for c in beyond_kernel.PROFILES["paper"].configs if c.axis == "width"}
    assert max(heads) == 1024
    assert max(c.samples for c in beyond_kernel.PROFILES["paper"].configs) == 4096
    assert max(c.steps for c in beyond_kernel.PROFILES["paper"].configs) == 4000


def test_the_two_scalings():
    kernel = replace(BASE, regime="kernel", heads=16, strength=0.25)
    rich = replace(BASE, regime="rich", heads=16, strength=0.5)
    assert (kernel.richness, kernel.output_scale) == (0.0625, 4.0)
    assert (rich.richness, rich.output_scale) == (0.5, 0.5)
    assert replace(kernel, heads=64).output_scale == 4.0
    assert replace(rich, heads=64).richness == 0.5


@pytest.mark.parametrize("alpha", [4.0, 0.25])
def test_a_scaled_output_is_descended_as_scaled_targets(alpha):
    phi, problem = small()
    config = DescentConfig(steps=6, step_size=0.7)
    final, path, largest = state.descend(problem, phi, config, alpha)
    expected, losses = by_hand(phi, problem, alpha, 0.7, 6)
    for found, block in zip(final, expected, strict=True):
        torch.testing.assert_close(found, block, rtol=1e-10, atol=1e-12)
    assert path == pytest.approx(sum(math.sqrt(loss) for loss in losses[:-1]))
    assert largest == pytest.approx(max(losses))


def test_movements_against_autograd():
    phi, problem = small(start=independent_initialisation)
    _, held = small(seed=5)
    X, y, q = held.tokens, held.targets, problem.query
    final = by_hand(phi, problem, 0.5, 0.9, 4)[0]
    found = state.movements(phi, final, X, y, q)

    def J(point):
        model = ShallowTransformer(point, query=q)
        rows = jacrev(lambda p: functional_call(model, p, (X,)))(dict(model.named_parameters()))
        return torch.cat([rows[name].flatten(1) for name in ("c", "U", "W")], dim=1).detach()

    J0, J1 = J(phi), J(final)
    step = torch.cat([(b - a).flatten() for a, b in zip(phi, final, strict=True)])
    f0, f1 = (shallow.forward(point, X, query=q) for point in (phi, final))
    a0, a1 = (attention_weights(logits(X, point.W, q)) for point in (phi, final))
    K0, K1 = (empirical_kernel_total(point, X, query=q) for point in (phi, final))
    expected = {
        "head_movement": step.norm() / math.sqrt(6),
        "feature_movement": (J1 - J0).norm() / J0.norm(),
        "kernel_movement": (K1 - K0).norm() / K0.norm(),
        "attention_movement": (a1 - a0).abs().sum() / 2 / (7 * 6),
        "linearisation": (f1 - f0 - J0 @ step).norm() / f1.norm(),
    }
    for name, value in expected.items():
        assert found[name] == pytest.approx(float(value), rel=1e-9), name
    for name, K in (("initial", K0), ("final", K1)):
        H = torch.eye(7, dtype=torch.float64) - 1 / 7
        centred = H @ K @ H
        target = torch.outer(H @ y, H @ y)
        cka = (centred * target).sum() / (centred.norm() * target.norm())
        assert found[f"alignment_{name}"] == pytest.approx(float(cka), rel=1e-9)
        assert 0 < found[f"alignment_{name}"] <= 1


def test_top_is_the_first_eigenvalue_whichever_gram_is_smaller():
    phi, problem = small(heads=2)
    many = problem._replace(tokens=problem.tokens.repeat(8, 1, 1) * torch.rand(56, 1, 1))
    for case in (problem, many):
        K = empirical_kernel_total(phi, case.tokens, query=case.query)
        assert state.top(phi, case) == pytest.approx(
            float(spectrum(K).eigenvalues[0]) / len(K), rel=1e-9
        )


def test_the_sharp_head_is_one_head_of_the_model():
    _, problem = small()
    u, w = torch.tensor([1.0, -2.0, 0.5]).double(), torch.tensor([3.0, 0.0, -4.0]).double()
    one = Parameters(torch.ones(1).double(), u[None], torch.outer(w, problem.query)[None])
    expected = shallow.forward(one, problem.tokens, query=problem.query)
    torch.testing.assert_close(state.sharp_head(problem.tokens, u, w), expected)


@pytest.mark.parametrize("teacher", ["sharp", "class"])
def test_targets_are_standardised_on_the_held_out_sequences(teacher):
    made = state.problem_of("test", 3, **(PROBLEM | {"teacher": teacher}))
    assert made.tokens.shape == (12, 5, 3)
    assert made.held_tokens.shape == (24, 5, 3)
    assert float(made.held_targets.mean()) == pytest.approx(0, abs=1e-5)
    assert float(made.held_targets.std(correction=0)) == pytest.approx(1, rel=1e-5)
    assert float(made.query.norm()) == pytest.approx(1)


def test_more_samples_leave_the_held_out_ones_alone():
    few, many = (state.problem_of("test", 3, **(PROBLEM | {"samples": n})) for n in (12, 20))
    assert torch.equal(few.held_tokens, many.held_tokens)
    assert torch.equal(few.held_targets, many.held_targets)


def test_a_cell_is_a_pure_function_of_config_and_seed():
    first = beyond_kernel.run(BASE, 5)
    state.problem_of.cache_clear()
    pd.testing.assert_frame_equal(beyond_kernel.run(BASE, 5), first, check_exact=True)
    assert tuple(first.columns) == beyond_kernel.COLUMNS
    assert np.isfinite(first["value"]).all()


def test_the_rows_of_a_cell_are_what_their_names_say():
    config = replace(BASE, regime="rich", strength=0.5, axis="samples")
    value = beyond_kernel.run(config, 2).set_index("quantity")["value"]
    problem = state.problem_of(
        "beyond_kernel", 2, teacher="sharp", samples=12, held=24, length=config.length,
        dimension=3, value_norm=4.0, logit_norm=12.0, teacher_heads=64, device="cpu",
    )  # fmt: skip
    alpha, outputs, finals = config.output_scale, [], []
    for role in ("student", "other"):
        start = beyond_kernel._initial(config, 2, role, "cpu")
        final, losses = by_hand(start, problem, alpha, config.step_size, config.steps)
        if role == "student":
            initial, all_losses = start, losses
        finals.append(final)
        outputs.append(alpha * shallow.forward(final, problem.held_tokens, query=problem.query))
    gap = (outputs[0] - outputs[1])[:12]
    variance = float(problem.targets.var(correction=0))
    held = float((outputs[0] - problem.held_targets).square().mean())
    expected = {
        "training_loss": all_losses[-1] / variance,
        "held_loss": held,
        "gap": held - all_losses[-1] / variance,
        "largest_loss": max(all_losses),
        "head_movement_c_largest": float((finals[0].c - initial.c).abs().max()),
        "head_movement_c_bound": 2 * 2.0 * 0.5 * sum(math.sqrt(x) for x in all_losses[:-1]),
        "edge_initial": 2.0 * state.top(initial, problem),
        "edge_final": 2.0 * state.top(finals[0], problem),
        "deviation_rms": float(gap.square().mean().sqrt()),
        "deviation_sup": float(gap.abs().max()),
        "alignment_gain": value["alignment_final"] - value["alignment_initial"],
    }
    for name, number in expected.items():
        assert value[name] == pytest.approx(number, rel=2e-3), name
    assert value["head_movement_c_largest"] <= value["head_movement_c_bound"]


def test_a_second_network_is_trained_on_two_axes(smoke):
    with_rival = select(smoke, "deviation_rms")["axis"].unique()
    assert set(with_rival) == {"width", "samples"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"axis": "depth"}, "axis"),
        ({"regime": "lazy"}, "regime"),
        ({"strength": 0.0}, "strength"),
        ({"teacher": "blunt"}, "teacher"),
        ({"time": 0.5, "step_size": 2.0}, "time: expected at least step_size=2.0, got 0.5"),
        ({"probe": 25}, "probe: expected at most held = 24, got 25"),
        ({"axis": "samples", "samples": 25}, "samples: expected at most held = 24, got 25"),
        ({"heads": 5}, "heads"),
    ],
)
def test_errors_name_the_field(change, message):
    with pytest.raises(ValueError, match=message):
        beyond_kernel.run(replace(BASE, **change), 0)


def synthetic(laws, noise=0.004):
    """Rows whose quantities follow power laws: name of a band -> exponent (or value)."""
    random, records = np.random.default_rng(0), []
    grids = {
        "width": (32, 64, 128), "step": (1.0, 2.0, 6.0), "length": (4, 16, 64, 256),
        "samples": (32, 512),
    }  # fmt: skip
    for name, law in laws.items():
        regime, axis, quantity = name.split("_", 2)
        column = beyond_kernel.ALONG[axis]
        if quantity == "union":
            parts = {"deviation_sup": law / 2 - 0.4, "deviation_rms": -0.4}
        elif quantity.endswith("_late"):
            continue
        else:
            parts = {quantity: law}
        for part, power in parts.items():
            for seed in range(6):
                for x in grids[axis]:
                    level = power if part in ("gap", "edge_final") else (1 + seed) * x**power
                    fields = {"heads": 1, "step_size": 1.0, "length": 1, "samples": 1, column: x}
                    records.append(
                        {"axis": axis, "regime": regime, "teacher": "sharp", "seed": seed,
                         "quantity": part, "value": level * np.exp(noise * random.normal()),
                         **fields}
                    )  # fmt: skip
    return pd.DataFrame(records)


def centre(band):
    low, high = band.ends
    if low is None:
        return high - 0.2
    return low + 0.2 if high is None else (low + high) / 2


def test_every_band_can_be_met_and_missed():
    met = beyond_kernel.summarise(
        synthetic({name: centre(band) for name, band in beyond_kernel.BANDS.items()})
    )
    assert met["quantity"].tolist() == list(beyond_kernel.BANDS)
    assert met["inside"].all()
    outside = {
        name: (band.upper + 0.3 if band.upper is not None else band.lower - 0.3)
        for name, band in beyond_kernel.BANDS.items()
    }
    missed = beyond_kernel.summarise(synthetic(outside))
    assert not missed["inside"].any()
    expected = [outside[n.removesuffix("_late")] for n in missed["quantity"]]
    np.testing.assert_allclose(missed["estimate"], expected, atol=0.03)


def test_late_slopes_leave_short_sequences_out_and_step_slopes_large_steps():
    frame = synthetic({"rich_length_training_loss": -0.5, "rich_step_feature_movement": 0.0})
    short = frame["length"].isin([4, 16]) & (frame["axis"] == "length")
    frame.loc[short, "value"] *= 100
    frame.loc[frame["step_size"] == 6.0, "value"] *= 100
    late = beyond_kernel.estimate(frame, "rich_length_training_loss_late")
    assert late.mean == pytest.approx(-0.5, abs=0.02)
    assert beyond_kernel.estimate(frame, "rich_length_training_loss").mean < -1
    assert abs(beyond_kernel.estimate(frame, "rich_step_feature_movement").mean) < 0.02


def test_summarise_reads_back_from_parquet(smoke, tmp_path):
    smoke.to_parquet(tmp_path / "frame.parquet")
    again = beyond_kernel.summarise(pd.read_parquet(tmp_path / "frame.parquet"))
    pd.testing.assert_frame_equal(again, beyond_kernel.summarise(smoke))
    assert again["quantity"].tolist() == list(beyond_kernel.BANDS)


def test_the_ratio_of_held_out_losses_is_rich_over_kernel(smoke):
    ratio = beyond_kernel.held_ratio(smoke, "class")
    assert list(ratio.columns) == [8, 16]
    rows = smoke[(smoke["teacher"] == "class") & (smoke["samples"] == 8) & (smoke["seed"] == 101)]
    rich, kernel = (select(rows[rows["regime"] == r], "held_loss") for r in ("rich", "kernel"))
    assert ratio.loc[101, 8] == pytest.approx(rich["value"].item() / kernel["value"].item())


def test_an_unknown_estimate_is_refused(smoke):
    with pytest.raises(ValueError, match="name"):
        beyond_kernel.estimate(smoke, "lazy_width_gap")
    with pytest.raises(ValueError, match="name"):
        beyond_kernel.estimate(smoke, "rich_depth_gap")


def test_held_out_sequences_are_new_and_the_sharp_head_has_its_two_norms():
    made = state.problem_of("test", 3, **PROBLEM)
    assert not torch.equal(made.held_tokens[:12], made.tokens)
    head = (
        query_vector(3, generator=generator(3, "test", role), norm=norm)
        for role, norm in (("value", 4.0), ("direction", 6.0))
    )
    raw = state.sharp_head(made.held_tokens, *head)
    expected = (raw - raw.mean()) / raw.std(correction=0)
    torch.testing.assert_close(made.held_targets, expected)


def test_the_edge_is_that_of_the_largest_step():
    frame = synthetic({"rich_step_edge_final": 1.0})
    frame.loc[frame["step_size"] == 6.0, "value"] *= 3
    assert beyond_kernel.estimate(frame, "rich_step_edge_final").mean == pytest.approx(3, rel=0.02)
