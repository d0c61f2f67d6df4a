"""Memory that is written again and again: fresh pages cost more than the arithmetic on them."""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

# What is larger is given back: a workspace holds a few blocks, never an array of the whole batch.
_KEPT = 2**21


class Workspace(threading.local):
    """Named buffers of one thread, kept from block to block and from call to call."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, like: Tensor, *shape: int) -> Tensor:
        """Return uninitialised memory of that shape, in the dtype and on the device of ``like``.

        On a CPU the next call with the same name returns the same memory.
        """
        if like.device.type != "cpu":
            # An accelerator's allocator keeps memory itself, and knows which stream still uses it.
            return like.new_empty(shape)
        size = math.prod(shape)
        key = name, like.dtype
        buffer = self._kept.get(key)
        if buffer is None or buffer.numel() < size:
            with torch.inference_mode(False):  # what is made in it can't be written to outside
                buffer = torch.empty(size, dtype=like.dtype, device="cpu")
            if size <= _KEPT:
                self._kept[key] = buffer
        return buffer[:size].view(shape)


#: The workspace of the engines that run on blocks.
WORKSPACE = Workspace()
