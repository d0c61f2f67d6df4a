r"""Heads over two processes: the numbers of one process, to rounding, and the same on both."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import distributed_ranks as ranks
import numpy as np
import pytest
import torch
import torch.distributed as dist

from attention_dynamics.commands import distributed as command
from attention_dynamics.models.parameters import Parameters, symmetric_initialisation
from attention_dynamics.models.shallow import ShallowTransformer
from attention_dynamics.training.descent import DescentConfig, projected_gradient_descent
from attention_dynamics.training.distributed import (
    distributed_descent,
    gather_heads,
    own_heads,
)

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
COMMAND = ("-m", "attention_dynamics.commands.distributed", "--device", "cpu")

pytestmark = pytest.mark.xdist_group("torchrun")


def torchrun(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TORCHRUN, *arguments],
        capture_output=True, text=True, timeout=240, cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    done = torchrun(ranks.__file__, str(folder), cwd=folder)
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"rank{rank}.pt") for rank in (0, 1)]


@pytest.mark.parametrize("name", ranks.SETTINGS)
def test_two_ranks_take_the_steps_of_one_process(found, name):
    given = ranks.problem(name)
    model = ShallowTransformer(given["whole"], **given["model"])
    expected = projected_gradient_descent(
        model, given["tokens"], given["targets"], given["config"], mask=given["mask"]
    )
    assert len(expected.history) == ranks.STEPS + 1 > 50
    if name == "projected":
        assert expected.history[["active_c", "active_U", "active_W"]].iloc[-1].min() > 0
    for rank in found:
        for iterate in ("initial", "final", "averaged"):
            for own, whole in zip(rank[name][iterate], getattr(expected, iterate), strict=True):
                torch.testing.assert_close(own, whole, rtol=1e-12, atol=1e-12)
        losses = torch.tensor(expected.history["loss"].to_numpy())
        torch.testing.assert_close(rank[name]["losses"], losses, rtol=1e-12, atol=0)
        assert rank[name]["own_heads"] == ranks.HEADS // 2
        assert rank[name]["left_at_final"]
    moved = (found[0][name]["final"][2] - found[0][name]["initial"][2]).abs().max()
    assert moved > 1e-2, "nothing was trained"


@pytest.mark.parametrize("name", ranks.SETTINGS)
def test_the_losses_are_equal_on_every_rank_bit_for_bit(found, name):
    assert torch.equal(found[0][name]["losses"], found[1][name]["losses"])
    assert found[0][name]["losses"].shape == (ranks.STEPS + 1,)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("other targets", "ValueError: sum of the targets: expected the same on every rank"),
        ("other steps", "ValueError: steps: expected the same on every rank, got [3.0, 4.0]"),
        ("diverged", "FloatingPointError: loss: "),
    ],
)
def test_every_rank_refuses_and_leaves_its_model_alone(found, name, message):
    for rank in found:
        assert rank[name].startswith(message)
        assert rank[f"{name}, untouched"]
    assert found[0][name] == found[1][name]


def test_the_command_trains_and_writes_the_losses(tmp_path):
    sizes = ("--heads", "16", "--samples", "24", "--length", "4", "--dimension", "3")
    done = torchrun(
        *COMMAND, *sizes, "--steps", "30", "--dtype", "float64", "--losses", "losses.csv",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("16 heads on 2 ranks, 30 steps") == 1, "rank 0 alone reports"
    table = np.genfromtxt(tmp_path / "losses.csv", delimiter=",", names=True)
    assert table["step"].tolist() == list(range(31))
    assert table["loss"][-1] < 0.9 * table["loss"][0]


def test_the_command_says_what_it_refuses(tmp_path):
    done = torchrun(*COMMAND, "--heads", "10", cwd=tmp_path)
    assert done.returncode != 0
    assert "must be a multiple of 2 * ranks = 4, got m = 10; take m = 8 or m = 12" in done.stderr


def test_the_command_without_torchrun_says_how_to_start_it(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    assert command.main(["--heads", "8"]) == 2
    assert "start this with torchrun --nproc-per-node 2" in capsys.readouterr().err


def whole(heads: int) -> Parameters:
    stream = torch.Generator().manual_seed(0)
    return symmetric_initialisation(heads, 3, generator=stream, dtype=torch.float64)


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_every_rank_holds_pairs_and_together_they_hold_each_head_once(count):
    parameters = whole(12)
    shares = [own_heads(parameters, rank, count) for rank in range(count)]
    assert all(share.is_symmetric() for share in shares)
    first, second = zip(*(share.W.chunk(2) for share in shares), strict=True)
    assert torch.equal(torch.cat(first + second), parameters.W)


def test_shares_are_copies():
    parameters = whole(4)
    own_heads(parameters, 0, 1).W.zero_()
    assert parameters.W.abs().min() > 0


@pytest.mark.parametrize(
    ("heads", "rank", "count", "message"),
    [
        (10, 0, 2, "multiple of 2 \\* ranks = 4, got m = 10; take m = 8 or m = 12"),
        (4, 0, 3, "at most one a pair of heads, 2 for m = 4, got 3"),
        (8, 2, 2, "rank: expected 0 to 1 of ranks = 2, got 2"),
        (8, 0, 0, "ranks"),
    ],
)
def test_heads_that_cannot_be_split_are_refused(heads, rank, count, message):
    with pytest.raises(ValueError, match=message):
        own_heads(whole(heads), rank, count)


def test_without_a_process_group_the_remedy_is_named():
    model = ShallowTransformer(whole(4), query="last")
    tokens, targets = torch.zeros(2, 2, 3).double(), torch.zeros(2).double()
    with pytest.raises(RuntimeError, match="torchrun --nproc-per-node 2 -m attention_dynamics"):
        distributed_descent(model, tokens, targets, DescentConfig(steps=1))
    with pytest.raises(RuntimeError, match="no process group"):
        gather_heads(whole(4))


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("setting", [{"batch_size": 4}, {"patience": 3}])
def test_what_a_split_network_cannot_do_is_refused(setting):
    model = ShallowTransformer(whole(4), query="last")
    tokens, targets = torch.zeros(2, 2, 3).double(), torch.zeros(2).double()
    with pytest.raises(ValueError, match=f"{next(iter(setting))}: expected None"):
        distributed_descent(model, tokens, targets, DescentConfig(steps=1, **setting))


@pytest.mark.usefixtures("one_rank")
def test_one_rank_is_the_ordinary_descent():
    given = ranks.problem("projected")
    models = [ShallowTransformer(given["whole"], **given["model"]) for _ in range(2)]
    data = given["tokens"], given["targets"], given["config"]
    result, expected = (
        distributed_descent(models[0], *data),
        projected_gradient_descent(models[1], *data),
    )
    for own, ordinary in zip(result.averaged, expected.averaged, strict=True):
        torch.testing.assert_close(own, ordinary, rtol=1e-12, atol=1e-12)
    assert result.step_size == expected.step_size == 0.5
