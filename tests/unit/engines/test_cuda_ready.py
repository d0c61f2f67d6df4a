"""The kernels as a GPU would get them: compiled ahead of time, by the assembler Triton brings."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from attention_dynamics.models.engines import triton_kernel
from attention_dynamics.models.engines.triton_launch import Stack, _Launch

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="kernels to be interpreted can't be compiled"
)


def compiled(
    kernel, architecture, dtype, *, length, heads, dimension, fixed, one_pass, masked=False,
    **constants,
):  # fmt: skip
    """The kernel with the constants that a launch of this size would give it on a GPU."""
    tokens = torch.zeros(1, 8, length, dimension, dtype=dtype)
    query = tokens[:, 0, 0] if fixed else tokens[:, :, 0]
    U, W = tokens.new_zeros(1, heads, dimension), tokens.new_zeros(1, heads, dimension, dimension)
    mask = tokens[..., 0] == 0 if masked else None
    given = _Launch(Stack(tokens, query, mask), U, W, 1.0, one_pass=one_pass).constants
    wide = dtype == torch.float32
    given = given | constants | {"WIDE": wide, "DX": -(-dimension // 4) * 4 if wide else dimension}
    options = {name: given.pop(name) for name in OPTIONS}
    number = "*fp32" if wide else "*fp64"
    signature = {
        name: "constexpr" if name in given
        else "i32" if name in triton_kernel.SIZES
        else "*u8" if name == "keep"
        else number
        for name in kernel.arg_names
    }  # fmt: skip
    return triton.compile(
        ASTSource(kernel, signature, given),
        target=GPUTarget("cuda", architecture, 32),
        options=options,
    )


def resources(built, folder):
    """Registers a thread, bytes of stack (spilled registers), and the instructions."""
    path = folder / "kernel.cubin"
    path.write_bytes(built.asm["cubin"])

    def output(tool, *arguments):
        command = [str(TOOLS / tool), *arguments, str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    usage = re.search(r"REG:(\d+) STACK:(\d+)", output("cuobjdump", "--dump-resource-usage"))
    return int(usage[1]), int(usage[2]), output("nvdisasm", "-c")


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("fixed", [False, True], ids=["per-sample", "fixed"])
@pytest.mark.parametrize("length", [2, 50], ids=["one block", "several"])
def test_every_variant_compiles(length, fixed, masked):
    size = {"length": length, "heads": 3, "dimension": 2, "fixed": fixed, "masked": masked}
    features, gradient = triton_kernel.features_kernel, triton_kernel.gradient_kernel
    compiled(features, 90, torch.float32, **size, one_pass=False, SUMS=True)
    compiled(gradient, 90, torch.float32, **size, one_pass=True, SIGMA="erf", OUTER=not fixed)
    compiled(gradient, 80, torch.float32, **size, one_pass=False, SIGMA=None, OUTER=False)


@pytest.mark.parametrize("architecture", [80, 90])
def test_features_leave_registers_for_three_programs(architecture, tmp_path):
    built = compiled(
        triton_kernel.features_kernel, architecture, torch.float32, length=16, heads=256,
        dimension=8, fixed=False, one_pass=False, SUMS=False,
    )  # fmt: skip
    registers, stack, instructions = resources(built, tmp_path)
    assert registers <= 168  # three programs of 128 threads a multiprocessor
    assert stack == 0
    assert "LDG.E.128" in instructions


def test_the_one_pass_step_stays_in_registers(tmp_path):
    built = compiled(
        triton_kernel.gradient_kernel, 90, torch.float32, length=16, heads=256, dimension=8,
        fixed=False, one_pass=True, SIGMA="tanh", OUTER=True,
    )  # fmt: skip
    registers, stack, instructions = resources(built, tmp_path)
    assert registers <= 255
    assert stack <= 64  # a few invariants of the loop over samples, none in that over tokens
    assert "LDG.E.128" in instructions
    assert "HMMA" not in instructions  # nothing is rounded to TF32


def test_double_precision_uses_the_same_kernels(tmp_path):
    built = compiled(
        triton_kernel.gradient_kernel, 90, torch.float64, length=5, heads=4, dimension=3,
        fixed=True, one_pass=True, SIGMA="tanh", OUTER=False,
    )  # fmt: skip
    _, stack, instructions = resources(built, tmp_path)
    assert stack == 0
    assert "DFMA" in instructions
    assert "cvt.rn.f32.f64" not in built.asm["ptx"]  # no detour through single precision
    assert "ex2.approx" not in built.asm["ptx"]
