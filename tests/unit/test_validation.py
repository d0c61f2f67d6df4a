"""Boundary checks: what passes, what is refused, and what the refusal says."""

import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attention_dynamics import validation


def test_shapes_with_known_and_open_sizes():
    value = torch.zeros(2, 3)
    validation.require_shape("x", value, ("n", "d"))
    validation.require_shape("x", value, ("n", "d"), {"d": 3, "m": 9})
    with pytest.raises(ValueError, match=r"^x: expected shape \(n, d\) with d = 4, got \(2, 3\)$"):
        validation.require_shape("x", value, ("n", "d"), {"d": 4})
    with pytest.raises(ValueError, match=r"^x: expected shape \(n,\), got \(2, 3\); flatten it$"):
        validation.require_shape("x", value, ("n",), remedy="flatten it")
    with pytest.raises(TypeError, match=r"x: expected a torch.Tensor of shape \(n,\), got list"):
        validation.require_shape("x", [1.0], ("n",))


def test_matrices_may_have_leading_axes():
    for value in (torch.zeros(2, 3), torch.zeros(5, 2, 3), torch.zeros(5, 0, 2, 3)):
        validation.require_matrix("x", value, ("n", "d"), {"d": 3, "m": 9})
    with pytest.raises(ValueError, match=r"x: expected shape \(\*batch, n, d\) with d = 4, got"):
        validation.require_matrix("x", torch.zeros(5, 2, 3), ("n", "d"), {"d": 4}, remedy="no")
    with pytest.raises(ValueError, match=r"x: expected shape \(\*batch, d, d\), got \(3,\)"):
        validation.require_matrix("x", torch.zeros(3), ("d", "d"))
    with pytest.raises(TypeError, match=r"x: expected a torch.Tensor of shape .*, got list"):
        validation.require_matrix("x", [1.0], ("n", "d"))


def test_working_dtype_lifts_half_precision_only():
    lifted = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert validation.working_dtype(dtype) == lifted.get(dtype, dtype)


def test_dtypes_may_differ_only_where_the_computation_does_not():
    validation.require_floating("x", torch.zeros(1, dtype=torch.float16), torch.float32)
    with pytest.raises(TypeError, match=r"x: has dtype torch.float32 .* x.to\(torch.float64\)"):
        validation.require_floating("x", torch.zeros(1), torch.float64)
    with pytest.raises(
        TypeError, match=r"x: expected a floating-point tensor, got torch.complex64"
    ):
        validation.require_floating("x", torch.zeros(1, dtype=torch.complex64))


def test_the_first_value_that_is_not_finite_is_given():
    value = torch.zeros(2, 3)
    validation.require_finite("x", value)
    value[1, 2] = torch.inf
    with pytest.raises(ValueError, match=r"x: expected finite values, got inf at index \(1, 2\)"):
        validation.require_finite("x", value)
    with pytest.raises(ValueError, match=r"; look at the step size$"):
        validation.require_finite("x", value, remedy="look at the step size")
    with pytest.raises(ValueError, match=r"got nan at index \(\)"):
        validation.require_finite("x", torch.tensor(torch.nan))


def test_a_value_that_cannot_be_looked_at_is_passed_over():
    assert validation.known_truth(torch.tensor(True)) is True
    assert validation.known_truth(torch.tensor(False)) is False
    assert validation.known_truth(torch.zeros((), device="meta").bool()) is None
    seen = []
    torch.func.vmap(lambda x: seen.append(validation.known_truth(x > 0)) or x)(torch.ones(3))
    assert seen == [None]
    validation.require_finite("x", torch.zeros(3, device="meta"))


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (torch.zeros(2, 3), TypeError, r"got torch.float32; for an additive mask pass mask == 0"),
        (torch.ones(2, 3, dtype=torch.int64), TypeError, r"got torch.int64; .* pass mask.bool\(\)"),
        ([[True]], TypeError, r"mask: .* got list"),
        (torch.ones(3, 2, dtype=torch.bool), ValueError, r"mask: .* n = 2, T = 3, got \(3, 2\)"),
        (torch.tensor([[True] * 3, [False] * 3]), ValueError, r"no key is left for sample 1"),
    ],
)
def test_masks(mask, error, message):
    with pytest.raises(error, match=message):
        validation.require_mask(mask, 2, 3)


def test_integers_and_options():
    validation.require_integer("steps", 3, minimum=1)
    validation.require_integer("steps", np.int64(3), minimum=1)
    for bad in (0, 1.0, True, "3"):
        with pytest.raises(ValueError, match=r"steps: expected an integer >= 1, got .*; raise it"):
            validation.require_integer("steps", bad, minimum=1, remedy="raise it")
    validation.require_one_of("law", "iid", ("iid", "sphere"))
    with pytest.raises(ValueError, match=r"law: expected one of 'iid', 'sphere', got 'cube'; why"):
        validation.require_one_of("law", "cube", ("iid", "sphere"), remedy="why")


def test_numbers():
    for good in (0, 1.5, np.float32(2), torch.tensor(3.0)):
        validation.require_number("radius", good)
    for bad in (-1, math.nan, math.inf):
        with pytest.raises(ValueError, match=rf"radius: expected .* >= 0, got {bad}; why"):
            validation.require_number("radius", bad, remedy="why")
    with pytest.raises(ValueError, match=r"radius: expected a finite number > 0, got 0"):
        validation.require_number("radius", 0, positive=True)
    for bad in ("3", None, (1, 2)):
        with pytest.raises(TypeError, match=r"radius: expected a finite number >= 0, got .*, a "):
            validation.require_number("radius", bad)


def test_only_cpu_generators_are_taken():
    validation.require_cpu_generator(torch.Generator())
    with pytest.raises(TypeError, match=r"generator: expected a torch.Generator, got NoneType"):
        validation.require_cpu_generator(None)


class _Sizes(TorchDispatchMode):
    """Numbers in each tensor that an operator returned."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        shared = {tensor.untyped_storage().data_ptr() for tensor in args if torch.is_tensor(tensor)}
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if torch.is_tensor(tensor) and tensor.untyped_storage().data_ptr() not in shared:
                self.seen.append(tensor.numel())
        return out


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_looking_for_what_is_not_finite_takes_no_memory(dtype):
    value = torch.full((30, 20), torch.finfo(dtype).max, dtype=dtype)
    value[0] *= -1
    with _Sizes() as sizes:
        validation.require_finite("x", value)
        validation.require_finite("x", value[:0])
    assert max(sizes.seen) == 1
    for bad in (torch.nan, torch.inf, -torch.inf):
        value[3, 4] = bad
        with pytest.raises(ValueError, match=r"at index \(3, 4\)"):
            validation.require_finite("x", value)
        with pytest.raises(ValueError, match=r"at index \(4, 3\)"):
            validation.require_finite("x", value.mT)
