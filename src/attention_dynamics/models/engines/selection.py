"""Which engine serves a call: the caller's, else the fastest that does not refuse.

Nobody has to choose. ``ATTENTION_DYNAMICS_ENGINE`` replaces what ``"auto"`` means, and an engine
that can't serve a call is replaced by ``eager`` with one line of log a reason.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attention_dynamics.models._pass import Inputs
from attention_dynamics.models.engines.base import Engine

log = logging.getLogger("attention_dynamics")

#: The environment variable that replaces what "auto" means.
ENVIRONMENT = "ATTENTION_DYNAMICS_ENGINE"


def _reference() -> Engine:
    from attention_dynamics.models.engines.reference import Reference

    return Reference()


def _eager() -> Engine:
    from attention_dynamics.models.engines.eager import Eager

    return Eager()


def _compiled() -> Engine:
    from attention_dynamics.models.engines.compiled import Compiled

    return Compiled()


def _fused() -> Engine:
    from attention_dynamics.models.engines.fused import Fused

    return Fused()


def _triton() -> Engine:
    from attention_dynamics.models.engines.triton import Triton

    return Triton()


# Imported when first asked for: most processes need one engine.
_BUILDERS: dict[str, Callable[[], Engine]] = {
    "reference": _reference,
    "eager": _eager,
    "compiled": _compiled,
    "fused": _fused,
    "triton": _triton,
}
#: Names of the engines, as ``engine=`` takes them.
NAMES = tuple(_BUILDERS)
# What auto tries, best first; eager serves whatever the others refuse.
_ORDER = {"cpu": ("fused",), "cuda": ("triton", "compiled")}


@cache
def get(name: str) -> Engine:
    """Return the engine of that name, built once. Raises ValueError for an unknown name."""
    if name not in _BUILDERS:
        known = ", ".join(repr(known) for known in ("auto", *NAMES))
        raise ValueError(f"engine: expected one of {known}, got {name!r}; 'auto' chooses for you")
    return _BUILDERS[name]()


def choose(engine: str, inputs: Inputs, heads: int, *tensors: Tensor) -> Engine:
    """Return the engine that serves ``inputs``: the one named, or the fastest for ``"auto"``.

    ``tensors`` are all others that enter the computation. Whatever autograd, ``torch.func``, a
    tracer or the meta device has to look into goes to the reference. Raises ValueError for an
    unknown name.
    """
    engine = asked_for(engine)
    named = engine != "auto"
    if looked_into(inputs.tokens, inputs.query, *tensors):
        return get("reference")
    candidates = (engine,) if named else _ORDER.get(inputs.tokens.device.type, ())
    for name in candidates:
        candidate = get(name)
        reason = candidate.refusal(inputs, heads)
        if reason is None:
            return candidate
        report(name, reason, logging.WARNING if named else logging.INFO)
    return get("eager")


def available() -> dict[str, str]:
    """Each engine's name with the reason why it can't be used on this machine, '' if it can."""
    probe = _probe()
    return {name: get(name).refusal(probe, 2) or "" for name in NAMES}


def describe() -> str:
    """One line: the engine that ``"auto"`` takes on this machine, and why."""
    probe = _probe()
    device = probe.tokens.device.type
    given = asked_for("auto")
    order = _ORDER.get(device, ()) if given == "auto" else (given,)
    reasons: list[str] = []
    for name in order:
        reason = get(name).refusal(probe, 2)
        if reason is None:
            return f"engine {name} on {device}" + _because(given, reasons)
        reasons.append(f"{name}: {reason}")
    return f"engine eager on {device}" + _because(given, reasons)


def plain(*tensors: Tensor) -> bool:
    """Whether these are numbers in the memory of the CPU that nothing differentiates or traces.

    Their values may then be looked at: it costs no wait for a device.
    """
    return not looked_into(*tensors) and all(t.device.type == "cpu" for t in tensors)


def asked_for(engine: str) -> str:
    """Return the engine a caller names, or what the environment says in place of "auto".

    Raises ValueError for an unknown name.
    """
    if engine == "auto":
        engine = os.environ.get(ENVIRONMENT) or "auto"
    if engine != "auto":
        get(engine)
    return engine


def looked_into(*tensors: Tensor) -> bool:
    """Whether derivatives are taken of the tensors, or they are not plain numbers in memory."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return True
    if torch._C._len_torch_dispatch_stack() or forward_ad._current_level >= 0:
        return True
    recording = torch.is_grad_enabled()
    return any(
        (recording and tensor.requires_grad)
        or tensor.device.type == "meta"
        or type(tensor) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer)
        or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        or tensor.is_neg()  # the numbers in memory have the other sign
        for tensor in tensors
    )


@cache
def report(name: str, reason: str, level: int) -> None:
    """Log once that an engine can't serve, at that level: WARNING where the caller named it."""
    log.log(level, "engine %s can't be used (%s); another one gives the same results", name, reason)


def _because(given: str, reasons: list[str]) -> str:
    parts = [f"{ENVIRONMENT}={given}"] if given != "auto" else []
    parts += reasons or ([] if parts else ["the fastest here"])
    return f" ({'; '.join(parts)})"


def _probe() -> Inputs:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Inputs(torch.zeros(1, 2, 2, device=device), torch.zeros(2, device=device), None)
