"""Training against length: shape, nested samples, one teacher, every quantity against a formula."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from attention_dynamics.experiments import _nested_problem, sequence_length
from attention_dynamics.experiments._nested_problem import nested_tokens
from attention_dynamics.models import attention, shallow
from attention_dynamics.models.parameters import Parameters
from attention_dynamics.running import Experiment, sweep
from attention_dynamics.theory.constants import head_lipschitz

SMALL = replace(sequence_length.PROFILES["smoke"].configs[0], length=7, heads=6)
SIZES = {"seed": 3, "name": "test", "role": "samples"}


@pytest.fixture(scope="module")
def smoke():
    return sweep(sequence_length, "smoke")


def test_the_module_has_the_shape_of_an_experiment():
    assert isinstance(sequence_length, Experiment)
    assert set(sequence_length.PROFILES) == {"smoke", "book", "paper"}
    assert sequence_length.Config.__dataclass_params__.frozen
    for profile in sequence_length.PROFILES.values():
        assert {config.case for config in profile.configs} == set(sequence_length.CASES)


def test_bands_sizes_and_seeds_are_those_fixed_before_the_run():
    free, flat, one = (None, 0.05), (-0.1, 0.1), (-1.15, -0.85)
    assert {name: band.ends for name, band in sequence_length.BANDS.items()} == {
        "relative_loss_averaged_means_fixed": free,
        "relative_loss_averaged_means_last": free,
        "relative_loss_means_fixed": free,
        "relative_loss_means_last": free,
        "gradient_means_fixed": free,
        "gradient_means_last": free,
        "gradient_iid_fixed": free,
        "gradient_iid_last": free,
        "relative_loss_means_fixed_late": (-0.05, 0.05),
        "relative_loss_means_last_late": (-0.05, 0.05),
        "relative_loss_iid_last_late": free,
        "target_variance_means_fixed_late": flat,
        "target_variance_iid_last_late": flat,
        "target_variance_iid_fixed_late": one,
        "loss_centred_iid_fixed_late": one,
        "top_means_fixed_late": flat,
        "top_iid_last_late": flat,
        "top_iid_fixed_late": one,
        "beyond_iid_fixed_late": one,
    }
    book, paper, smoke = (sequence_length.PROFILES[name] for name in ("book", "paper", "smoke"))
    assert (book.seeds, paper.seeds) == (tuple(range(8)), tuple(range(10)))
    assert not set(smoke.seeds) & set(paper.seeds)
    assert {c.length for c in paper.configs} == {4, 16, 64, 256, 1024, 4096}
    assert {(c.samples, c.steps, c.heads) for c in paper.configs} == {(1000, 500, 64)}
    assert all(c.step_size == pytest.approx(1.75 / 500**0.5) for c in paper.configs)


def test_a_cell_is_a_pure_function_of_config_and_seed():
    first = sequence_length.run(SMALL, 5)
    pd.testing.assert_frame_equal(sequence_length.run(SMALL, 5), first, check_exact=True)
    assert tuple(first.columns) == sequence_length.COLUMNS
    assert first["quantity"].str.endswith("_means_fixed").all()
    fixed = ("active_heads", "gradient_bound")  # the second is a mean over other heads
    other = sequence_length.run(SMALL, 6)
    changed = ~first["quantity"].str.startswith(fixed)
    assert (other["value"] != first["value"])[changed].all()


@pytest.mark.parametrize("length", [1, 4, 5, 16, 33])
@pytest.mark.parametrize("law", _nested_problem.LAWS)
def test_a_shorter_sequence_is_the_end_of_a_longer_one(law, length):
    short = nested_tokens(3, length, 2, law=law, **SIZES)
    long = nested_tokens(3, 40, 2, law=law, **SIZES)
    assert short.shape == (3, length, 2)
    assert short.dtype == torch.float64
    assert torch.equal(long[:, -length:], short)
    assert len(long.flatten().unique()) == long.numel()  # no block comes twice


def test_both_laws_share_the_noise_and_have_the_variance_they_should_have():
    z = nested_tokens(2000, 9, 3, law="iid", **SIZES)
    x = nested_tokens(2000, 9, 3, law="sequence_means", **SIZES)
    assert z.norm(dim=-1).max() <= 1
    assert x.norm(dim=-1).max() <= 1
    b = 2 * x - z
    torch.testing.assert_close(b, b[:, :1].expand_as(b))
    for sample in (z.flatten(0, 1), b[:, 0]):  # uniform in the ball of R^3
        torch.testing.assert_close(
            sample.T.cov(), torch.eye(3, dtype=torch.float64) / 5, atol=0.02, rtol=0
        )
    assert abs(float((z * b).mean())) < 0.01


def test_all_lengths_of_a_seed_share_teacher_student_query_and_last_token(monkeypatch):
    made = []

    class Recorded(_nested_problem.Teacher):
        def __init__(self, transport, **options):
            super().__init__(transport, **options)
            made.append(self)

    monkeypatch.setattr(_nested_problem, "Teacher", Recorded)
    short, student = sequence_length.problem(SMALL, 0)
    long, again = sequence_length.problem(replace(SMALL, length=64), 0)
    first, second = made
    assert first.transport.anchors.shape[1] == SMALL.anchor_length == 16
    assert torch.equal(first.transport.anchors, second.transport.anchors)
    assert torch.equal(first.transport.coefficients, second.transport.coefficients)
    assert all(map(torch.equal, first.parameters, second.parameters))
    assert all(map(torch.equal, student, again))
    assert torch.equal(short.query, long.query)
    assert torch.equal(short.tokens, long.tokens[:, -7:])
    torch.testing.assert_close(short.targets, second(long.tokens[:, -7:]))
    assert float(first.transport.coefficients.abs().sum()) == pytest.approx(1)


def test_a_last_query_is_passed_on():
    given, _ = sequence_length.problem(replace(SMALL, query="last"), 0)
    assert given.query == "last"


def test_unknown_laws_and_queries_are_refused():
    with pytest.raises(ValueError, match="law: expected one of"):
        nested_tokens(2, 4, 2, law="sphere", **SIZES)
    with pytest.raises(ValueError, match="length"):
        nested_tokens(2, 0, 2, law="iid", **SIZES)
    with pytest.raises(ValueError, match="query: expected one of"):
        sequence_length.run(replace(SMALL, query="first"), 0)
    with pytest.raises(ValueError, match="law: expected one of"):
        sequence_length.run(replace(SMALL, token_law="sphere"), 0)
    with pytest.raises(ValueError, match="m must be even"):
        sequence_length.run(replace(SMALL, heads=5), 0)


def test_one_number_is_descent_along_the_mean_gradient():
    random = torch.Generator().manual_seed(0)
    features = torch.randn(9, 5, generator=random, dtype=torch.float64) + 1
    v = torch.randn(5, generator=random, dtype=torch.float64)
    mean, theta, eta = features.mean(dim=0), torch.zeros_like(v), 0.03
    for _ in range(4):
        theta = theta - 2 * eta * mean * (mean @ (theta - v))
    found = sequence_length.one_number(features @ features.T, features @ v, 4, eta)
    torch.testing.assert_close(found, features @ theta)


@pytest.mark.parametrize("query", ["fixed", "last"])
@pytest.mark.parametrize("law", _nested_problem.LAWS)
def test_every_quantity_against_its_formula(law, query):
    config = replace(SMALL, token_law=law, query=query)
    rows = sequence_length.run(config, 1).set_index("quantity")["value"]
    found = {name.removesuffix(f"_{config.case}"): value for name, value in rows.items()}
    given, initial = sequence_length.problem(config, 1)
    expected = reference(config, given, initial)
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=2e-3, abs=1e-6), name


def reference(config, given, initial):
    """Everything in float64, from the forward formula, automatic differentiation and loops."""
    X, y = given.tokens.double(), given.targets.double()
    q = given.query if isinstance(given.query, str) else given.query.double()
    phi0 = initial.to(dtype=torch.float64)
    n, k, eta, m = len(y), config.steps, config.step_size, config.heads

    def f(*blocks):
        return shallow.forward(Parameters(*blocks), X, query=q, engine="reference")

    def jacobian(phi):
        blocks = torch.autograd.functional.jacobian(f, tuple(phi))
        return torch.cat([J.flatten(1) for J in blocks], dim=1)

    phi, iterates, losses = tuple(phi0), [], []
    for _ in range(k):
        iterates.append(phi)
        leaves = [block.clone().requires_grad_() for block in phi]
        loss = (f(*leaves) - y).square().mean()
        losses.append(loss.item())
        gradients = torch.autograd.grad(loss, leaves)
        phi = tuple(b - eta * g for b, g in zip(phi, gradients, strict=True))
    averaged = tuple(torch.stack(blocks).mean(dim=0) for blocks in zip(*iterates, strict=True))
    for block, start in zip(phi, phi0, strict=True):  # the projection had nothing to do
        moved = (block - start).reshape(m, -1).norm(dim=1).max() * m**0.5
        assert moved < config.projection_radius
    J = jacobian(phi0)
    K = J @ J.T
    tangent, single = torch.zeros_like(y), torch.zeros_like(y)
    theta, mean = torch.zeros(J.shape[1], dtype=torch.float64), J.mean(dim=0)
    for _ in range(k):
        tangent = tangent - 2 * eta / n * K @ (tangent - y)
        theta = theta - 2 * eta * mean * (mean @ theta - y.mean())
    single, trained = J @ theta, f(*phi)
    variance = float(y.var(correction=0))
    centred = J - mean
    spectrum = torch.linalg.eigvalsh(K)
    weights = attention.attention_weights(attention.logits(X, phi0.W, q))
    M = attention.softmax_covariance(weights, X)
    traces = M.diagonal(dim1=-2, dim2=-1).sum(-1)
    squares = jacobian(phi).square().sum(dim=1)
    root, radius = m**0.5, config.projection_radius
    R = phi0.U.norm(dim=1).numpy() + radius / root
    G = 1 + (1 + radius / root) ** 2 * np.mean(head_lipschitz(R, 1.0) ** 2)

    def spread(values):
        return float((values - values.mean()).square().mean())

    losses.append(float((trained - y).square().mean()))
    loss_averaged = float((f(*averaged) - y).square().mean())
    return {
        "target_variance": variance,
        "target_square": float((y**2).mean()),
        "loss": min(losses),
        "loss_averaged": loss_averaged,
        "relative_loss": min(losses) / variance,
        "relative_loss_averaged": loss_averaged / variance,
        "active_heads": 0.0,
        "gradient": float(squares.max().sqrt()),
        "gradient_rms": float(squares.mean().sqrt()),
        "gradient_bound": G**0.5,
        "top": float(torch.linalg.eigvalsh(centred.T @ centred / n)[-1]),
        "effective_rank": float(spectrum.sum() ** 2 / spectrum.square().sum()),
        "loss_centred": spread(trained - y),
        "relative_centred": spread(trained - y) / variance,
        "relative_centred_tangent": spread(tangent - y) / variance,
        "relative_centred_one_number": spread(single - y) / variance,
        "beyond": (spread(tangent - single) / variance) ** 0.5,
        "beyond_network": (spread(trained - single) / variance) ** 0.5,
        "trace": float(traces.mean()),
        "trace_largest": float(traces.max()),
    }


def test_what_is_known_without_measuring_holds(smoke):
    table = smoke.pivot(index=["length", "seed"], columns="quantity", values="value")
    for case in sequence_length.CASES:
        column = {name: table[f"{name}_{case}"] for name in ("loss", "loss_centred", "trace")}
        assert (column["loss"] <= table[f"target_square_{case}"]).all()  # f = 0 at the start
        assert (table[f"trace_largest_{case}"] <= 1).all()
        assert (column["trace"] > 0).all()
        assert (table[f"gradient_{case}"] < table[f"gradient_bound_{case}"]).all()
        bounds = table[f"gradient_bound_{case}"].groupby("seed").nunique()
        assert (bounds == 1).all()  # the bound has no T


def synthetic(changes=()):
    random = np.random.default_rng(0)
    exponents = {
        name.removesuffix("_late"): np.clip(0, *(0 if e is None else e for e in band.ends))
        for name, band in sequence_length.BANDS.items()
    }
    exponents = {name: -1.0 if e == -0.85 else -0.01 for name, e in exponents.items()} | dict(
        changes
    )
    return pd.DataFrame(
        {"length": T, "seed": seed, "quantity": quantity,
         "value": (1 + seed) * T**exponent * np.exp(0.01 * random.standard_normal())}
        for quantity, exponent in exponents.items()
        for seed in range(5) for T in (4, 64, 256, 1024)
    )  # fmt: skip


def test_summarise_finds_the_theory_and_late_slopes_skip_short_sequences():
    frame = synthetic()
    late = frame["quantity"].isin(["top_iid_fixed", "target_variance_iid_fixed"])
    frame.loc[late & (frame["length"] == 4), "value"] = 1e6
    summary = sequence_length.summarise(frame).set_index("quantity")
    assert list(summary.index) == list(sequence_length.BANDS)
    assert summary["inside"].all()
    assert summary.loc["top_iid_fixed_late", "slope"] == pytest.approx(-1, abs=0.03)
    # over all lengths a jump at T = 4 is seen
    jump = (frame["quantity"] == "relative_loss_means_fixed") & (frame["length"] == 4)
    frame.loc[jump, "value"] *= 1e-3
    summary = sequence_length.summarise(frame).set_index("quantity")
    assert not summary.loc["relative_loss_means_fixed", "inside"]
    assert summary.loc["relative_loss_means_fixed_late", "inside"]


@pytest.mark.parametrize(
    ("quantity", "exponent"),
    [("relative_loss_means_fixed", 0.1), ("top_iid_fixed", -0.5), ("gradient_iid_last", 0.2)],
)
def test_summarise_reports_a_miss(quantity, exponent):
    summary = sequence_length.summarise(synthetic({quantity: exponent})).set_index("quantity")
    missed = set(summary.index[~summary["inside"]])
    assert missed
    assert missed <= {quantity, f"{quantity}_late"}


def test_summarise_reads_a_sweep(smoke):
    assert len(sequence_length.summarise(smoke)) == len(sequence_length.BANDS)
