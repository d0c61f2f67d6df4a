r"""Named random streams: a seed and a list of names give one generator, never a shared one."""

from __future__ import annotations

import hashlib
import json
import operator

import numpy as np
import torch

_STATE_WORDS = 624  # the state of MT19937, PyTorch's generator on the CPU
_STATE_OFFSET = 24  # bytes before the state words in torch.Generator.get_state()


def stream_key(seed: int, *names: str | int) -> bytes:
    r"""``(seed, name_1, ..., name_k)`` -> its encoding as JSON, which is one-to-one.

    Text is quoted and numbers are not, so ``("a", 1)``, ``("a1",)`` and ``("a", "1")`` differ.

    Raises TypeError if the seed is not an integer, or a name neither text nor an integer.
    """
    parts: list[str | int] = [_integer("seed", seed)]
    for name in names:
        parts.append(name if isinstance(name, str) else _integer("name", name))
    return json.dumps(parts, ensure_ascii=True, separators=(",", ":")).encode("ascii")


def stream_seed(seed: int, *names: str | int) -> int:
    r"""The first 64 bits of ``SHA-256(stream_key(seed, *names))``, for programs that want a number.

    Sums and concatenations that agree give different numbers: ``stream_seed(1, 2)`` and
    ``stream_seed(2, 1)`` have nothing in common.
    """
    return int.from_bytes(hashlib.sha256(stream_key(seed, *names)).digest()[:8], "big")


def generator(seed: int, *names: str | int) -> torch.Generator:
    r"""A CPU generator whose whole state is ``SHAKE-256(stream_key(seed, *names))``.

    ``torch.Generator.manual_seed`` on the CPU keeps the low 32 bits of its argument and drops the
    rest, so some pair among 10^5 streams would be expected to coincide. Here all 624 state words
    come from the hash, and ``initial_seed()`` reports :func:`stream_seed`. Numbers are drawn on the
    CPU and moved afterwards, so that every device sees the same ones.

    Raises TypeError if the seed is not an integer, or a name neither text nor an integer.
    """
    key = stream_key(seed, *names)
    stream = torch.Generator(device="cpu").manual_seed(stream_seed(seed, *names))
    words = np.frombuffer(hashlib.shake_256(key).digest(4 * _STATE_WORDS), dtype="<u4")
    state = stream.get_state()
    # torch stores each 32-bit word in 64 bits
    packed = torch.from_numpy(words.astype("=u8").view(np.uint8))
    state[_STATE_OFFSET : _STATE_OFFSET + packed.numel()] = packed
    stream.set_state(state)
    return stream


def _integer(argument: str, value: object) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(
            f"{argument} = {value!r} is a {type(value).__name__}: a stream is named by a seed that "
            "is an integer and by names that are text or integers. Turn other values into text, "
            "for example str(value) or repr(value)."
        )
    return operator.index(value)
