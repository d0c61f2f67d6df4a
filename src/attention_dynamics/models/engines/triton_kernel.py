r"""Triton kernels: features and gradients, without matrix products of the library and atomics.

What bounds the speed is the rate of float32 multiply-adds: 8d flops a (sample, token, head) and
4d^2 a (sample, head), against 4d bytes a (sample, token) and one exp. Matrix units would round to
TF32, and products with rows of d = 8 or 17 would mostly multiply padding.

Gradients of a slice of samples stay in registers; slices are added in a fixed order. For d <= 8
and m <= 256 a tile holds all heads of its samples, so that one pass makes the step: 8 warps a
multiprocessor with 255 registers a thread, kept busy by unrolled products that don't depend on
each other. Of its instructions six in ten are the multiply-adds counted above; token loads, the
softmax and its bookkeeping are the rest. Otherwise alpha is computed again when the weights are
known: 12d flops, not 8d.
"""

from __future__ import annotations

# The language of Triton has tuples without unpacking, and types of its own.
# ruff: noqa: RUF005
# mypy: ignore-errors
import triton
import triton.language as tl

from attention_dynamics.models.engines.triton_tile import (
    activate,
    add,
    attend,
    columns,
    coordinates,
    dot,
    head_of,
    matrix_times,
    zeros,
)

# Compiled once for all sizes: only shapes of the registers are constants.
SIZES = ["n", "T", "m", "slices", "blocks", "x_stack", "q_stack"]


@triton.jit
def place(m, n, slices, blocks, M: tl.constexpr):
    """Which problem, slice, samples and heads are those of this program."""
    program = tl.program_id(0)
    part = program // blocks
    i, valid = head_of(program % blocks, m, M)
    size = tl.cdiv(n, slices)
    first = (part % slices) * size
    return part // slices, part, i, valid, first, tl.minimum(first + size, n)


@triton.jit
def sample(j, n, stack, stride, i, m):
    """Row of sample j of a problem, one address a thread.

    Adding i >= m, which is 0, keeps addresses out of the registers that a warp shares: from there
    they would be copied before every load.
    """
    return stride.to(tl.int64) * stack + tl.minimum(j, n - 1) + (i >= m)


@triton.jit(do_not_specialize=SIZES)
def features_kernel(
    X, X_again, keep, Q, W, U, s_out, a_out, r_out, n, T, m, slices, blocks, x_stack, q_stack,
    d: tl.constexpr, DX: tl.constexpr, BT: tl.constexpr, ONE: tl.constexpr, TAIL: tl.constexpr,
    B: tl.constexpr, M: tl.constexpr, FIXED: tl.constexpr, MASKED: tl.constexpr,
    WIDE: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Write s (S, n, m) and, with SUMS, a and r (S, n, d, m)."""
    stack, _, i, valid, first, stop = place(m, n, slices, blocks, M)
    U_i = columns(U + stack * d * m + i, m, valid, d)
    W_i = W + stack * d * m * (1 if FIXED else d) + i
    fixed_w = columns(W_i, m, valid, d) if FIXED else U_i
    nothing = tl.zeros((B, M), U.dtype.element_ty)
    for start in range(first, stop, B):
        j = start + tl.arange(0, B)[:, None]
        row = sample(j, n, stack, x_stack, i, m)
        if FIXED:
            w = fixed_w
        else:
            q = Q + sample(j, n, stack, q_stack, i, m) * d
            w = matrix_times(W_i, m, valid, q, nothing, d)
        s, Z, A, R = attend(
            X + row * T * DX, X_again + row * T * DX, keep + row * T, T, w, U_i, nothing,
            d, DX, BT, ONE, TAIL, MASKED, WIDE, SUMS,
        )  # fmt: skip
        there = (j < stop) & valid
        out = stack.to(tl.int64) * n + j
        tl.store(s_out + out * m + i, s, mask=there)
        if SUMS:
            for k in tl.static_range(d):
                tl.store(a_out + (out * d + k) * m + i, A[k] / Z, mask=there)
                tl.store(r_out + (out * d + k) * m + i, R[k] / Z, mask=there)


@triton.jit(do_not_specialize=SIZES)
def gradient_kernel(
    X, X_again, keep, Q, W, U, G, c, y, f_out, P_out, sums, n, T, m, slices, blocks, x_stack,
    q_stack, d: tl.constexpr, DX: tl.constexpr, BT: tl.constexpr, ONE: tl.constexpr,
    TAIL: tl.constexpr, B: tl.constexpr, M: tl.constexpr, FIXED: tl.constexpr,
    MASKED: tl.constexpr, WIDE: tl.constexpr, SIGMA: tl.constexpr, OUTER: tl.constexpr,
):  # fmt: skip
    """Sums over a slice: g sigma, G a, and G r q^T (OUTER) or G r (FIXED); else G r goes to P.

    The weights G = g c sigma'(s) are read, (S, n, m), unless SIGMA names an activation: then the
    tile holds all heads, f is summed here and g = f - y. ``sums`` is (S, slices, rows, m).
    """
    stack, part, i, valid, first, stop = place(m, n, slices, blocks, M)
    U_i = columns(U + stack * d * m + i, m, valid, d)
    W_i = W + stack * d * m * (1 if FIXED else d) + i
    fixed_w = columns(W_i, m, valid, d) if FIXED else U_i
    matrix = columns(W_i, m, valid, d * d) if OUTER else ()
    c_i = tl.load(c + stack * m + i, mask=valid, other=0.0) if SIGMA is not None else 0.0
    nothing = tl.zeros((B, M), U.dtype.element_ty)
    in_c, in_U = nothing, zeros(nothing, d)
    in_W = zeros(nothing, d * d if OUTER else d if FIXED else 0)
    for start in range(first, stop, B):
        j = start + tl.arange(0, B)[:, None]
        row, there = sample(j, n, stack, x_stack, i, m), j < stop
        out = stack.to(tl.int64) * n + tl.minimum(j, n - 1)
        if FIXED:
            w = fixed_w
        else:
            q_row = Q + sample(j, n, stack, q_stack, i, m) * d
            if OUTER:
                q, w = coordinates(q_row, 0, d, False), ()
                for k in tl.static_range(d):
                    w = w + (dot(matrix[k * d : k * d + d], q, d),)
            else:
                w = matrix_times(W_i, m, valid, q_row, nothing, d)
        s, Z, A, R = attend(
            X + row * T * DX, X_again + row * T * DX, keep + row * T, T, w, U_i, nothing,
            d, DX, BT, ONE, TAIL, MASKED, WIDE, True,
        )  # fmt: skip
        if SIGMA is None:
            weight = tl.load(G + out * m + i, mask=there & valid, other=0.0) / Z
        else:
            value, slope = activate(s, SIGMA)
            pairs = tl.sum(tl.reshape(c_i * value, (B, M // 2, 2)), axis=2)
            f = tl.sum(pairs, axis=1)[:, None]
            tl.store(f_out + out, f, mask=there)
            g = tl.where(there, f - tl.load(y + out), 0.0)
            in_c = tl.fma(g, value, in_c)
            weight = g * c_i * slope / Z
        in_U = add(in_U, weight, A, d)
        if OUTER:
            sum_W = ()
            for k in tl.static_range(d):
                sum_W = sum_W + add(in_W[k * d : k * d + d], weight * R[k], q, d)
            in_W = sum_W
        elif FIXED:
            in_W = add(in_W, weight, R, d)
        else:
            for k in tl.static_range(d):
                tl.store(P_out + (out * d + k) * m + i, weight * R[k], mask=there & valid)
    parts = (in_c,) + in_U + in_W
    for k in tl.static_range(len(parts)):
        target = sums + (part.to(tl.int64) * len(parts) + k) * m + i
        tl.store(target, tl.sum(parts[k], axis=0)[None, :], mask=valid)
