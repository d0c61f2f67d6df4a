"""The experiment on stacks: its shape, its bands, its quantities against formulas of their own."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from attention_dynamics.experiments import _stacks_problem, stacks
from attention_dynamics.models import shallow_stack
from attention_dynamics.models.stack_parameters import stack_initialisation
from attention_dynamics.running import Experiment, sweep
from attention_dynamics.theory.stack_bounds import stack_constants

SMALL = replace(stacks.PROFILES["smoke"].configs[0], depth=3, length=5, steps=8, step_size=0.2)


@pytest.fixture(scope="module")
def smoke():
    return sweep(stacks, "smoke")


def test_the_module_has_the_shape_of_an_experiment():
    assert isinstance(stacks, Experiment)
    assert set(stacks.PROFILES) == {"smoke", "book", "paper"}
    assert stacks.Config.__dataclass_params__.frozen


def test_bands_sizes_and_seeds_are_those_fixed_before_the_run():
    ends = {name: band.ends for name, band in stacks.BANDS.items()}
    both = [f"{out}_{L}" for out in ("last", "each") for L in (1, 2, 3, 4)]
    deep = [case for case in both if not case.endswith("1")]
    assert ends == {
        **dict.fromkeys((f"trend_{case}" for case in both), (None, 0.1)),
        **dict.fromkeys((f"extra_{case}" for case in deep), (-0.05, 0.05)),
        **dict.fromkeys((f"gradient_{case}" for case in both), (None, 0.05)),
        "trend_mixed": (None, 0.1),
        "trend_unpaired": (None, 0.1),
        "scale_readout": (0.95, 1.05),
        "scale_inner": (1.9, 2.1),
        "scale_loss": (1.7, 2.3),
        "depth_last": (0.9, 1.1),
        "depth_each": (0.9, 1.1),
        "depth_unpaired": (None, 1.0),
    }
    book, paper, smoke = (stacks.PROFILES[name] for name in ("book", "paper", "smoke"))
    assert book.seeds == paper.seeds == tuple(range(5))
    assert not set(smoke.seeds) & set(paper.seeds)
    assert {c.length for c in book.configs} == {4, 8, 16, 32}
    assert {c.length for c in paper.configs} == {4, 8, 16, 64, 256}
    assert {c.depth for c in paper.configs} == {1, 2, 3, 4}
    assert {(c.samples, c.steps, c.heads) for c in book.configs} == {(16, 30, 16)}
    assert {(c.samples, c.steps, c.heads) for c in paper.configs} == {(32, 60, 32)}
    assert {c.step_size for p in (book, paper) for c in p.configs} == {0.25}


def test_a_cell_is_a_pure_function_of_config_and_seed():
    first = stacks.run(SMALL, 5)
    pd.testing.assert_frame_equal(stacks.run(SMALL, 5), first, check_exact=True)
    assert tuple(first.columns) == stacks.COLUMNS
    other = stacks.run(SMALL, 6)
    changed = ~first["quantity"].isin(["active", "gradient_inner_start"])
    assert (other["value"] != first["value"])[changed].all()


def test_depths_and_lengths_share_teacher_tokens_and_layers():
    short, y = _stacks_problem.stack_problem("t", 1, SMALL, "cpu")
    deep, same = _stacks_problem.stack_problem("t", 1, replace(SMALL, depth=1), "cpu")
    long, _ = _stacks_problem.stack_problem("t", 1, replace(SMALL, length=16), "cpu")
    assert torch.equal(short, deep)
    assert torch.equal(y, same)
    assert torch.equal(short, long[:, -5:])
    assert short.norm(dim=-1).max() <= 1
    _, doubled = _stacks_problem.stack_problem("t", 1, replace(SMALL, target_scale=2.0), "cpu")
    torch.testing.assert_close(doubled, 2 * y)


def test_each_token_asks_the_teacher_from_the_last_place():
    config = replace(SMALL, outputs="each", length=4)
    tokens, y = _stacks_problem.stack_problem("t", 2, config, "cpu")
    _, last = _stacks_problem.stack_problem("t", 2, replace(config, outputs="last"), "cpu")
    assert y.shape == (config.samples, 4)
    torch.testing.assert_close(y[:, -1], last, rtol=1e-5, atol=1e-7)
    swapped = tokens[:, [0, 3, 2, 1]]

    class Asked:
        def __call__(self, X):
            return X[:, -1].sum(dim=-1)

    torch.testing.assert_close(
        _stacks_problem.answers(Asked(), swapped, "each"), swapped.sum(dim=-1)
    )


@pytest.mark.parametrize("outputs", shallow_stack.OUTPUTS)
@pytest.mark.parametrize("start", ["paired", "mixed", "unpaired"])
def test_every_quantity_against_its_formula(outputs, start):
    config = replace(SMALL, outputs=outputs, start=start)
    found = stacks.run(config, 1).set_index("quantity")["value"].to_dict()
    X, y = _stacks_problem.stack_problem(stacks.NAME, 1, config, "cpu")
    X, y = X.double(), y.double()
    stream = stacks.generator(1, stacks.NAME, "student")
    phi0 = stack_initialisation(3, 4, 3, generator=stream, start=start)
    phi0 = phi0.map(torch.Tensor.double)

    def f(phi, outputs=outputs, tokens=X):
        return shallow_stack.forward(phi, tokens, outputs=outputs)

    def flat(layer):
        return torch.cat([block.flatten() for block in layer])

    def gradient(value):
        leaves = phi.map(lambda block: block.detach().clone().requires_grad_())
        parts = [block for layer in leaves.layers() for block in layer]
        return torch.autograd.grad(value(leaves), parts)

    goal, phi, losses, total = y + f(phi0), phi0, [], phi0.map(torch.zeros_like)
    for k in range(config.steps + 1):
        losses.append(float((f(phi) - goal).square().mean()))
        if k == config.steps:
            break
        total = total.zip(phi, torch.add)
        parts = iter(gradient(lambda leaves: (f(leaves) - goal).square().mean()))
        phi = phi.map(lambda block, parts=parts: block - config.step_size * next(parts))
    averaged = total.map(lambda block: block / config.steps)
    variance = float(y.var(correction=0))
    away = [
        float((flat(now) - flat(then)).norm())
        for now, then in zip(phi.layers(), phi0.layers(), strict=True)
    ]
    read = [shallow_stack.hidden_tokens(p, X)[-1] for p in (phi0, phi)]
    moved = (read[1] - read[0]).norm(dim=-1).square().mean().sqrt()

    def norms():
        rows = []
        for x in X[:8]:
            parts = gradient(lambda leaves, x=x: f(leaves, "last", x[None]).sum())
            layers = [flat(parts[i : i + 3]).norm() for i in range(0, len(parts), 3)]
            rows.append(torch.stack(layers))
        return torch.stack(rows)

    end, final = norms(), phi
    phi = phi0
    begin = norms()
    expected = {
        "target_variance": variance,
        "relative_start": float(y.square().mean()) / variance,
        "relative_loss": min(losses) / variance,
        "relative_loss_final": losses[-1] / variance,
        "relative_loss_averaged": float((f(averaged) - goal).square().mean()) / variance,
        "moved_readout": away[-1],
        "moved_inner": math.hypot(*away[:-1]),
        "moved_tokens": float(moved),
        "longest_token": float(read[1].norm(dim=-1).max()),
        "active": 0.0,
        "gradient_start": float(begin.norm(dim=1).max()),
        "gradient_inner_start": float(begin[:, :-1].norm(dim=1).max()),
        "gradient_end": float(end.norm(dim=1).max()),
        "gradient_inner_end": float(end[:, :-1].norm(dim=1).max()),
    }
    if start == "paired":
        limits = stack_constants(phi0, final).gradients
        ratios = [float(end[:, place].max()) / limits[place] for place in range(3)]
        expected |= {"bound_ratio_readout": ratios[2], "bound_ratio_inner": max(ratios[:2])}
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=2e-3, abs=1e-6), name


def test_what_is_known_without_measuring_holds(smoke):
    cells = smoke.pivot(
        index=["depth", "length", "outputs", "start", "target_scale", "seed"],
        columns="quantity", values="value",
    ).reset_index()  # fmt: skip
    assert (cells["relative_loss"] <= cells["relative_start"] * (1 + 1e-6)).all()
    paired = cells[cells["start"] == "paired"]
    assert (paired["gradient_inner_start"] < 1e-6).all()
    assert (paired["bound_ratio_readout"] <= 1).all()
    assert (paired["bound_ratio_inner"].dropna() <= 1).all()
    assert (paired["moved_readout"] > paired["moved_inner"].fillna(0)).all()
    free = cells[(cells["start"] == "unpaired") & (cells["depth"] > 1)]
    assert (free["gradient_inner_start"] > 1e-2).all()


def synthetic(**exponents):
    """Losses and gradients of known exponents in T and in the scale, for five seeds."""
    random = np.random.default_rng(0)
    rows = []
    for depth, outputs, start in (
        *((L, out, "paired") for L in (1, 2, 3, 4) for out in ("last", "each")),
        (4, "last", "mixed"), (1, "last", "unpaired"), (4, "last", "unpaired"),
    ):  # fmt: skip
        for T in (4, 16, 64):
            for seed in range(5):
                extra = T ** exponents.get("extra", 0.0) if depth > 1 else 1.0
                down = 0.8 if start == "unpaired" and depth > 1 else 1.0
                values = {
                    "relative_loss": (0.5 + 0.1 * seed) * extra * down
                    * T ** exponents.get(start, 0.0),
                    "gradient_end": (1 + seed) * T ** exponents.get("gradient", 0.0),
                }  # fmt: skip
                cell = dict(depth=depth, outputs=outputs, start=start, length=T, seed=seed)
                rows += [
                    cell | dict(target_scale=1.0, quantity=name, value=value
                                * math.exp(1e-3 * random.standard_normal()))
                    for name, value in values.items()
                ]  # fmt: skip
    for scale in (0.25, 0.5, 1.0):
        for depth in (1, 2):
            for seed in range(5):
                power = exponents.get("loss", 2.0)
                change = 1 - 0.1 * scale**power if depth == 2 else 1.0
                cell = dict(depth=depth, outputs="last", start="paired", length=8, seed=seed)
                values = {
                    "relative_loss_final": (1 + seed) * change,
                    "moved_readout": scale,
                    "moved_inner": scale ** exponents.get("inner", 2.0) * (1 + seed),
                }
                rows += [
                    cell | dict(target_scale=scale, quantity=name, value=value)
                    for name, value in values.items()
                ]
    return pd.DataFrame(rows)


def test_summarise_finds_the_theory():
    summary = stacks.summarise(synthetic()).set_index("quantity")
    assert list(summary.index) == list(stacks.BANDS)
    assert summary["inside"].all()
    assert summary.loc["scale_loss", "estimate"] == pytest.approx(2, abs=1e-6)
    assert summary.loc["depth_unpaired", "estimate"] == pytest.approx(0.8, rel=1e-2)


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({"mixed": 0.2}, {"trend_mixed"}),
        ({"gradient": 0.1}, {f"gradient_{o}_{L}" for o in ("last", "each") for L in range(1, 5)}),
        ({"inner": 1.0}, {"scale_inner"}),
        ({"loss": 1.0}, {"scale_loss"}),
    ],
)
def test_summarise_reports_a_miss(change, missed):
    summary = stacks.summarise(synthetic(**change)).set_index("quantity")
    assert set(summary.index[~summary["inside"]]) == missed


def test_an_upward_ratio_is_a_miss():
    summary = stacks.summarise(synthetic(extra=0.08)).set_index("quantity")
    extra = {f"extra_{out}_{L}" for out in ("last", "each") for L in (2, 3, 4)}
    assert extra <= set(summary.index[~summary["inside"]])


def test_summarise_reads_a_sweep_and_leaves_out_what_it_lacks(smoke):
    summary = stacks.summarise(smoke)
    lacking = {f"{kind}_{out}_{L}" for kind in ("trend", "extra", "gradient")
               for out in ("last", "each") for L in (2, 3)}  # fmt: skip
    assert set(stacks.BANDS) - set(summary["quantity"]) == lacking
