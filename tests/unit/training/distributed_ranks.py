r"""What each rank does in the tests of heads over several processes; started by torchrun."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from attention_dynamics.data import generator, query_vector, unit_ball_tokens
from attention_dynamics.models.parameters import symmetric_initialisation
from attention_dynamics.models.shallow import ShallowTransformer
from attention_dynamics.training.descent import DescentConfig
from attention_dynamics.training.distributed import distributed_descent, gather_heads, own_heads
from attention_dynamics.training.projection import Radii

HEADS, SAMPLES, LENGTH, DIMENSION, STEPS = 12, 20, 5, 3, 60

#: name -> query, activation, logit exponent, radii, masked
SETTINGS: dict[str, tuple[str, str, float, Radii | None, bool]] = {
    "projected": ("fixed", "tanh", 0.0, Radii(0.4, 0.3, 0.5), False),
    "free": ("last", "erf", 0.0, None, False),
    "masked": ("last", "tanh", 0.0, Radii(None, 0.0, 0.5), True),
    "scaled": ("fixed", "erf_plain", -0.5, Radii(0.4, 0.3, 0.5), False),
}


def problem(name: str) -> dict[str, Any]:
    """The same numbers on every rank and in the test itself, in float64."""
    query, activation, exponent, radii, masked = SETTINGS[name]

    def stream(role: str) -> torch.Generator:
        return generator(3, "ranks", role)

    tokens = unit_ball_tokens(SAMPLES, LENGTH, DIMENSION, generator=stream("tokens")).double()
    mask = None
    if masked:
        mask = torch.rand(SAMPLES, LENGTH, generator=stream("mask")) < 0.7
        mask[:, 0] = True
    return {
        "whole": symmetric_initialisation(
            HEADS, DIMENSION, generator=stream("student"), dtype=torch.float64
        ),
        "model": {
            "query": "last"
            if query == "last"
            else query_vector(DIMENSION, generator=stream("query")).double(),
            "activation": activation,
            "logit_exponent": exponent,
        },
        "tokens": tokens,
        "targets": torch.randn(SAMPLES, generator=stream("targets"), dtype=torch.float64),
        "config": DescentConfig(steps=STEPS, step_size=0.5, radii=radii),
        "mask": mask,
    }


def main(folder: Path) -> None:
    """Run every setting, and what has to be refused, on the ranks there are."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {}
    for name in SETTINGS:
        given = problem(name)
        model = ShallowTransformer(own_heads(given["whole"], rank, ranks), **given["model"])
        result = distributed_descent(
            model, given["tokens"], given["targets"], given["config"], mask=given["mask"]
        )
        found[name] = {
            "initial": tuple(gather_heads(result.initial)),
            "final": tuple(gather_heads(result.final)),
            "averaged": tuple(gather_heads(result.averaged)),
            "losses": result.losses,
            "own_heads": model.heads,
            "left_at_final": all(
                torch.equal(a, b) for a, b in zip(model.snapshot(), result.final, strict=True)
            ),
        }
    given = problem("projected")
    model = ShallowTransformer(own_heads(given["whole"], rank, ranks), **given["model"])
    for name, arguments in {
        "other targets": (given["tokens"], given["targets"] + rank, given["config"]),
        "other steps": (given["tokens"], given["targets"], DescentConfig(steps=3 + rank)),
        "diverged": (
            given["tokens"], given["targets"] * 1e160, DescentConfig(steps=50, step_size=1e9),
        ),
    }.items():  # fmt: skip
        before = model.snapshot()
        try:
            distributed_descent(model, *arguments)
        except (ValueError, FloatingPointError) as error:
            found[name] = f"{type(error).__name__}: {error}"
        found[f"{name}, untouched"] = all(
            torch.equal(a, b) for a, b in zip(model.snapshot(), before, strict=True)
        )
    torch.save(found, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
