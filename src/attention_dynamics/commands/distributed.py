r"""Train one large student on several ranks: what torchrun starts.

::

    torchrun --nproc-per-node 2 -m attention_dynamics.commands.distributed --heads 1024
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from attention_dynamics.data import generator, query_vector, unit_ball_tokens
from attention_dynamics.models.parameters import (
    independent_initialisation,
    symmetric_initialisation,
)
from attention_dynamics.models.shallow import ShallowTransformer, forward
from attention_dynamics.training.descent import DescentConfig
from attention_dynamics.training.distributed import (
    DistributedResult,
    distributed_descent,
    own_heads,
)
from attention_dynamics.training.projection import Radii

NAME = "distributed training"


def main(arguments: Sequence[str] | None = None) -> int:
    """Train on the ranks that torchrun started; rank 0 prints. Returns 0, or 2 after a message."""
    options = _parser().parse_args(arguments)
    if "RANK" not in os.environ:
        print(
            "no ranks: start this with torchrun --nproc-per-node 2 -m "
            "attention_dynamics.commands.distributed",
            file=sys.stderr,
        )
        return 2
    cuda = options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available())
    device = "cpu"
    if cuda:
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        started = time.perf_counter()
        result = train(options, device)
        if dist.get_rank() == 0:
            _report(options, result, time.perf_counter() - started)
    except ValueError as error:
        if dist.get_rank() == 0:
            print(f"attention-dynamics: {error}", file=sys.stderr)
        return 2
    finally:
        dist.destroy_process_group()
    return 0


def train(options: argparse.Namespace, device: str) -> DistributedResult:
    """Fit the values of a teacher of 16 unpaired heads; every rank draws the same numbers."""
    d, dtype = options.dimension, getattr(torch, options.dtype)
    query = query_vector(d, generator=generator(options.seed, NAME, "query")).to(device, dtype)
    tokens = unit_ball_tokens(
        options.samples, options.length, d, generator=generator(options.seed, NAME, "tokens")
    ).to(device, dtype)
    teacher = independent_initialisation(
        16, d, generator=generator(options.seed, NAME, "teacher"), dtype=dtype, device=device
    )
    student = symmetric_initialisation(
        options.heads, d, generator=generator(options.seed, NAME, "student"), dtype=dtype
    )
    own = own_heads(student, dist.get_rank(), dist.get_world_size()).to(device=device)
    model = ShallowTransformer(own, query=query)
    config = DescentConfig(
        steps=options.steps, step_size=options.eta, radii=Radii(*(options.rho,) * 3)
    )
    targets = forward(teacher, tokens, query=query)
    return distributed_descent(model, tokens, targets, config)


def _report(options: argparse.Namespace, result: DistributedResult, seconds: float) -> None:
    losses = result.losses
    print(
        f"{options.heads} heads on {dist.get_world_size()} ranks, {options.steps} steps in "
        f"{seconds:.2f} s"
    )
    print(f"loss {float(losses[0]):.6g} at the start, {float(losses[-1]):.6g} at the end")
    if options.losses is not None:
        table = np.column_stack((np.arange(len(losses)), losses.numpy()))
        np.savetxt(
            options.losses, table, delimiter=",", header="step,loss", comments="", fmt="%.17g"
        )
        print(f"losses: {options.losses}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node RANKS -m attention_dynamics.commands.distributed",
        description="Train one large shallow Transformer, its heads split over the ranks.",
    )
    for name, default, meaning in (
        ("heads", 1024, "m, a multiple of twice the ranks"),
        ("samples", 512, "n"),
        ("length", 16, "T"),
        ("dimension", 8, "d"),
        ("steps", 200, "tau"),
        ("seed", 0, "of tokens, teacher and student"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, help=f"{meaning} (default {default})"
        )
    parser.add_argument("--rho", type=float, default=3.0, help="radius of c, U and W (default 3)")
    parser.add_argument("--eta", type=float, help="step size (default 1/sqrt(tau))")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64"))
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--losses", type=Path, help="write the losses into this CSV file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
