r"""The device of a sweep, and what has to be so before CUDA starts for its numbers to repeat."""

from __future__ import annotations

import os
import sys
import warnings

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
DETERMINISTIC = (":4096:8", ":16:8")  # the two settings with which cuBLAS repeats its digits


def prepare_device(device: str) -> None:
    r"""Make matrix products on CUDA repeat digit for digit, or say why they will not.

    cuBLAS reads the environment variable ``CUBLAS_WORKSPACE_CONFIG`` once, when CUDA starts. It is
    set here where that is still to come, for this process and those it starts; where CUDA runs
    already a UserWarning names the remedy. Other devices need nothing.
    """
    if not device.startswith("cuda") or os.environ.get(WORKSPACE) in DETERMINISTIC:
        return
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        warnings.warn(
            f"{WORKSPACE} is {os.environ.get(WORKSPACE)!r} and CUDA has started: matrix products "
            "may differ in their last digits from run to run; set "
            f"{WORKSPACE}={DETERMINISTIC[0]} in the environment before Python starts, or before "
            "the first use of CUDA",
            UserWarning,
            stacklevel=3,
        )
        return
    os.environ[WORKSPACE] = DETERMINISTIC[0]


def choose_device(name: str) -> str:
    """``"auto"`` is CUDA where there is one, else the CPU. Raises ValueError for one not there."""
    if name == "cpu":
        return name
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda"):
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise ValueError(f"device {name!r}: no CUDA device is available; use cpu or auto")
        if (torch.device(name).index or 0) >= count:
            raise ValueError(f"device {name!r}: this machine has {count} CUDA devices, from cuda:0")
    try:
        return str(torch.device(name))
    except RuntimeError as error:
        raise ValueError(f"device {name!r}: {error}; use auto, cpu or cuda") from None
