r"""On a GPU: the step of ten stacked seeds against the float32 roofline, and the width sweep.

Rows appear where ``torch.cuda.is_available()``; elsewhere one row says that there is no GPU.
"""

from __future__ import annotations

import time

import torch

from attention_dynamics.models.shallow import ShallowTransformer
from attention_dynamics.training import DescentConfig, Radii
from attention_dynamics.training.stacked import (
    stack,
    stacked_loss_and_gradients,
    stacked_projected_gradient_descent,
)
from benchmarks.instances import Instance, instance
from benchmarks.machine import gradient_work
from benchmarks.table import Case, Point, Row, Settings, agreement

GROUP = "gpu"
SEEDS = 10
WIDTHS = (8, 16, 32, 64, 128, 256)


def cases(settings: Settings) -> list[Case]:
    """The roofline of the stacked step, and the sweep; or the reason why there is neither."""
    if not torch.cuda.is_available():
        return [
            Case(
                "no GPU",
                lambda: [
                    Row(GROUP, "GPU rows", "", "", "", note="not run: torch finds no CUDA device")
                ],
            )
        ]
    return [
        Case("roofline of the stacked step", lambda: roofline(settings)),
        Case("width sweep", lambda: sweep(settings)),
    ]


def roofline(settings: Settings) -> list[Row | Point]:
    """Operations a second of the step, over what the float32 units can do."""
    m, n = (8, 64) if settings.quick else (256, 4000)
    problem = _on_gpu(instance(8, 16, m, n))
    data, query, initial = problem
    stacked = stack([initial] * SEEDS)
    targets = data.targets.expand(SEEDS, -1).contiguous()

    def step() -> object:
        return stacked_loss_and_gradients(stacked, data.tokens, targets, query=query)

    one = stacked_loss_and_gradients(
        stack([initial]), data.tokens, targets[:1], query=query, engine="reference"
    )
    losses, gradients = stacked_loss_and_gradients(stacked, data.tokens, targets, query=query)
    difference = agreement(
        (one[0][0], *(block[0] for block in one[1].parameters)),
        (losses[0], *(block[0] for block in gradients.parameters)),
        1e-4,
    )
    seconds = _device_seconds(step)
    flops = SEEDS * gradient_work(n, 16, 8, m, last=True).flops
    peak = _peak_flops()
    return [
        Row(
            GROUP, "stacked step, share of the float32 peak",
            f"d=8 T=16 m={m} n={n} x {SEEDS} seeds",
            "peak of the device", "ours", ratio=flops / seconds / peak,
            target=settings.target(0.7), unit="of the peak", ours_ms=1e3 * seconds,
            difference=difference, tolerance=1e-4,
            note=f"{torch.cuda.get_device_name(0)}, {1e-12 * peak:.1f} TFLOP/s by clock and units",
        )
    ]  # fmt: skip


def sweep(settings: Settings) -> list[Row | Point]:
    """Six widths of ten seeds, 4000 projected steps each, all stacked."""
    steps, n = (4, 64) if settings.quick else (4000, 4000)
    problems = [_on_gpu(instance(8, 16, m, n)) for m in WIDTHS]
    models = [
        ShallowTransformer(problem.initial, query=problem.query)
        for problem in problems
        for _ in range(SEEDS)
    ]
    config = DescentConfig(
        steps=steps, step_size=1.75 / 4000**0.5, radii=Radii(3.0, 3.0, 3.0), record_every=50
    )
    data = problems[0].data
    torch.cuda.synchronize()
    start = time.perf_counter()
    stacked_projected_gradient_descent(models, data.tokens, data.targets, config)
    torch.cuda.synchronize()
    minutes = (time.perf_counter() - start) / 60
    return [
        Row(
            GROUP, "whole width sweep", f"m=8..256 x {SEEDS} seeds x {steps} steps n={n}", "",
            "ours", ratio=minutes, target=settings.target(2.0), sense="at most", unit="minutes",
            note=torch.cuda.get_device_name(0),
        )
    ]  # fmt: skip


def _on_gpu(problem: Instance) -> Instance:
    data = type(problem.data)(*(tensor.cuda() for tensor in vars(problem.data).values()))
    query = problem.query if isinstance(problem.query, str) else problem.query.cuda()
    return Instance(data, query, problem.initial.to(device="cuda"))


def _device_seconds(run) -> float:  # type: ignore[no-untyped-def]
    """The median of twenty runs by the device's own events."""
    found = []
    for _ in range(25):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        found.append(1e-3 * begin.elapsed_time(end))
    return sorted(found[5:])[10]


def _peak_flops() -> float:
    """Lanes of the device x clock x 2: 64 float32 lanes a multiprocessor, or 128."""
    properties = torch.cuda.get_device_properties(0)
    lanes = 64 if (properties.major, properties.minor) in ((7, 0), (7, 5), (8, 0)) else 128
    clock = 1e3 * getattr(properties, "clock_rate", 1_755_000)
    return 2.0 * lanes * properties.multi_processor_count * clock
