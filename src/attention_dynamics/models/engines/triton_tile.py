r"""Softmax attention of one tile: B samples and M heads, one pair a thread, for Triton kernels.

The coordinates of w = W q, U, a and r are tuples of tiles, hence registers: d needs no padding, and
a token is read once for all heads of a warp. Tokens come in blocks of up to 16, read twice: for
the logits and projections, which stay in registers, and for the sums, centred at the mean that is
known by then. From block to block the sums are rescaled to the new maximum and moved to the new
mean, so nothing ever cancels.

Multiply-adds are spelled out (``tl.fma``) and kernels are compiled to fuse no others: twin heads
have equal s, bit by bit.
"""

from __future__ import annotations

# The language of Triton has tuples without unpacking, and types of its own.
# ruff: noqa: RUF005
# mypy: ignore-errors
import triton
import triton.language as tl


@triton.constexpr_function
def four_from(offset):
    return f"ld.global.nc.v4.f32 {{$0, $1, $2, $3}}, [$4 + {4 * offset}];"


@triton.jit
def coordinates(row, first: tl.constexpr, d: tl.constexpr, WIDE: tl.constexpr):
    """Numbers first..first + d - 1 at each pointer of ``row``; ``WIDE`` (aligned float32): by four.

    With the offset in the instruction one address serves all tokens of a block.
    """
    x = ()
    if WIDE:
        for k in tl.static_range(0, d, 4):
            x = x + tl.inline_asm_elementwise(
                four_from(first + k), "=f,=f,=f,=f,l", [row],
                dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
            )  # fmt: skip
    else:
        for k in tl.static_range(d):
            x = x + (tl.load(row + (first + k)),)
    return x


@triton.jit
def columns(block, stride, valid, size: tl.constexpr):
    """Numbers ``block[k * stride]``, k < size: one coordinate after the other, for all heads."""
    out = ()
    for k in tl.static_range(size):
        out = out + (tl.load(block + k * stride, mask=valid, other=0.0),)
    return out


@triton.jit
def dot(x, y, d: tl.constexpr):
    total = x[0] * y[0]
    for k in tl.static_range(1, d):
        total = tl.fma(x[k], y[k], total)
    return total


@triton.jit
def add(total, weight, x, d: tl.constexpr):
    """Total + weight x, coordinate by coordinate."""
    out = ()
    for k in tl.static_range(d):
        out = out + (tl.fma(weight, x[k], total[k]),)
    return out


@triton.jit
def zeros(like, size: tl.constexpr):
    out = ()
    for _ in tl.static_range(size):
        out = out + (tl.zeros_like(like),)
    return out


@triton.jit
def head_of(block, m, M: tl.constexpr):
    """Heads (1, M) of a tile, the partners i and i + m/2 side by side, and which exist."""
    column = block * M + tl.arange(0, M)[None, :]
    half = (m + 1) // 2
    head = (column % 2) * half + column // 2
    valid = (column // 2 < half) & (head < m)
    return tl.where(valid, head, 0), valid


@triton.jit
def matrix_times(W, m, valid, q, like, d: tl.constexpr):
    """W q with both from memory, in a loop: registers would not hold W."""
    w = zeros(like, d)
    for k in tl.range(d, loop_unroll_factor=1):
        w = add(w, tl.load(q + k), columns(W + k * m, d * m, valid, d), d)
    return w


@triton.jit
def attend(
    rows, rows_again, keep, T, w, U, nothing,
    d: tl.constexpr, DX: tl.constexpr, BT: tl.constexpr, ONE: tl.constexpr, TAIL: tl.constexpr,
    MASKED: tl.constexpr, WIDE: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """s, Z, Z a and Z r of a tile; w carries log2(e), so that exp2 serves. Without SUMS only s."""
    top, Z, s = nothing - float("inf"), nothing, nothing
    A, R = zeros(nothing, d), zeros(nothing, d)
    for start in range(0, T, BT):
        window = tl.minimum(start, T - BT) if TAIL else start
        logits, projections, new_top = (), (), top
        for u in tl.static_range(BT):
            x = coordinates(rows + window * DX, u * DX, d, WIDE)
            logit = dot(x, w, d)
            if TAIL:
                logit = tl.where(window + u >= start, logit, -float("inf"))
            if MASKED:
                logit = tl.where(tl.load(keep + window + u) != 0, logit, -float("inf"))
            logits = logits + (logit,)
            projections = projections + (dot(x, U, d),)
            new_top = tl.maximum(new_top, logits[u])
        shift = tl.where(new_top == -float("inf"), 0.0, new_top)  # nothing kept so far
        scale = tl.exp2(top - shift)
        top, Z, weights = new_top, Z * scale, ()
        total = Z * s
        for u in tl.static_range(BT):
            weights = weights + (tl.exp2(logits[u] - shift),)
            Z += weights[u]
            total = tl.fma(weights[u], projections[u], total)
        mean = total / tl.where(Z > 0, Z, 1.0)
        if SUMS:
            if not ONE:
                moved = s - mean
                R = add(R, moved, A, d)
                R, A = add(zeros(nothing, d), scale, R, d), add(zeros(nothing, d), scale, A, d)
            for u in tl.static_range(BT):
                x = coordinates(rows_again + window * DX, u * DX, d, WIDE)
                A = add(A, weights[u], x, d)
                R = add(R, weights[u] * (projections[u] - mean), x, d)
        s = mean
    return s, Z, A, R


@triton.jit
def tanh(x):
    """Tanh x; the series where 1 - exp(-2|x|) would cancel, off by less than 1e-13 of the value."""
    z = x * x
    near = x * (
        1 + z * (-1 / 3 + z * (2 / 15 + z * (-17 / 315 + z * (62 / 2835 - z * 1382 / 155925))))
    )
    e = tl.exp(-2 * tl.abs(x))
    far = (1 - e) / (1 + e)
    return tl.where(z < 1 / 64, near, tl.where(x < 0, -far, far))


@triton.jit
def activate(s, SIGMA: tl.constexpr):
    """sigma(s) and sigma'(s)."""
    if SIGMA == "tanh":
        value = tanh(s)
        return value, 1 - value * value
    if SIGMA == "erf":
        return tl.erf(s * 0.7071067811865476), 0.7978845608028654 * tl.exp(-0.5 * s * s)
    return tl.erf(s), 1.1283791670955126 * tl.exp(-s * s)
