"""Building C++ on demand: once, safely, and with a reason where it can't be done."""

import ctypes
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from fused_cases import Case, error, features_by_formula

from attention_dynamics.models import get_activation
from attention_dynamics.models.engines import fused, native, placed
from attention_dynamics.models.engines.fused import Fused
from attention_dynamics.models.places import find_places

SOURCE = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty cache, and a folder with one small source in it."""
    monkeypatch.setenv("ATTENTION_DYNAMICS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "answer.cpp").write_text(SOURCE)
    native._attempt.cache_clear()
    fused._kernel.cache_clear()
    placed._kernel.cache_clear()
    yield tmp_path
    native._attempt.cache_clear()
    fused._kernel.cache_clear()
    placed._kernel.cache_clear()


def answer(place):
    return native.library("answer.cpp", place / "sources").answer()


def kept(place):
    return sorted(path.name for path in (place / "cache").iterdir())


@pytest.mark.compiler
def test_a_source_is_built_once(place, monkeypatch):
    assert answer(place) == 42
    first = kept(place)
    assert len(first) == 1
    native._attempt.cache_clear()
    monkeypatch.setattr(native, "_build", lambda *_: pytest.fail("built twice"))
    assert answer(place) == 42
    assert kept(place) == first


@pytest.mark.compiler
def test_a_changed_source_or_header_is_built_anew(place):
    sources = place / "sources"
    (sources / "value.h").write_text("constexpr int VALUE = 1;\n")
    (sources / "answer.cpp").write_text(
        '#include "value.h"\nextern "C" int answer() { return VALUE; }\n'
    )
    assert answer(place) == 1
    native._attempt.cache_clear()
    (sources / "value.h").write_text("constexpr int VALUE = 2;\n")
    assert answer(place) == 2


@pytest.mark.compiler
def test_two_processes_may_build_at_once(place):
    code = (
        "import sys, pathlib\n"
        "from attention_dynamics.models.engines import native\n"
        "print(native.library('answer.cpp', pathlib.Path(sys.argv[1])).answer())\n"
    )
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(place / "sources")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    for run in runs:
        out, trouble = run.communicate(timeout=120)
        assert (out.decode().strip(), trouble.decode()) == ("42", "")
    assert len(kept(place)) == 1


@pytest.mark.compiler
def test_a_build_that_is_killed_leaves_nothing_to_load(place, monkeypatch):
    slow = place / "slow"
    slow.write_text(
        '#!/bin/sh\nfor last in "$@"; do :; done\n'
        'case "$1" in --version) echo slow; exit;; esac\n'
        'echo half > "$last"; touch "$(dirname "$0")/started"; exec sleep 60\n'
    )
    slow.chmod(0o755)
    code = (
        "import sys, pathlib\n"
        "from attention_dynamics.models.engines import native\n"
        "native.library('answer.cpp', pathlib.Path(sys.argv[1]))\n"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", code, str(place / "sources")],
        env={**os.environ, "CXX": str(slow)},
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )
    for _ in range(600):
        if (place / "started").exists():
            break
        time.sleep(0.1)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    assert (place / "started").exists()
    assert not list((place / "cache").glob("*.so"))
    assert answer(place) == 42


def test_without_a_compiler_there_is_a_reason(place, monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent")
    with pytest.raises(native.Unavailable, match="no C\\+\\+ compiler"):
        answer(place)
    case = Case()
    assert "no C++ compiler" in Fused().refusal(case.inputs, 8)


def test_a_broken_compiler_is_a_reason(place, monkeypatch):
    broken = place / "broken"
    broken.write_text("#!/bin/sh\necho 'out of order' >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(native.Unavailable, match=r"can't build answer.cpp: out of order"):
        answer(place)
    assert kept(place) == []


@pytest.mark.compiler
def test_a_source_that_does_not_compile_is_a_reason_found_once(place, monkeypatch):
    (place / "sources" / "answer.cpp").write_text("not C++\n")
    with pytest.raises(native.Unavailable, match=r"can't build answer\.cpp"):
        answer(place)
    assert kept(place) == []
    monkeypatch.setattr(native, "_build", lambda *_: pytest.fail("built twice"))
    with pytest.raises(native.Unavailable, match=r"can't build answer\.cpp"):
        answer(place)


@pytest.mark.compiler
def test_a_cache_that_cannot_be_written_is_a_reason(place, monkeypatch):
    (place / "file").write_text("in the way")  # holds for the superuser too
    monkeypatch.setenv("ATTENTION_DYNAMICS_CACHE", str(place / "file"))
    with pytest.raises(native.Unavailable, match="can't be kept or loaded"):
        answer(place)


@pytest.mark.compiler
def test_a_damaged_library_is_a_reason(place, monkeypatch):
    damage = lambda found, path, extra, target: target.write_bytes(b"half a library")  # noqa: E731
    monkeypatch.setattr(native, "_build", damage)
    with pytest.raises(native.Unavailable, match="can't be kept or loaded"):
        answer(place)


@pytest.mark.compiler
def test_a_cache_that_others_can_write_is_not_trusted(place):
    answer(place)
    native._attempt.cache_clear()
    (place / "cache").chmod(0o777)
    with pytest.raises(native.Unavailable, match="others can write"):
        answer(place)
    (place / "cache").chmod(0o700)
    native._attempt.cache_clear()
    assert answer(place) == 42


def results():
    sigma = get_activation("tanh")
    for m, T, query, masked in (
        (3, 9, "last", True),
        (8, 200, "fixed", False),
        (40, 33, "free", True),
    ):
        case = Case(m=m, T=T, d=9, n=70, query=query, masked=masked)
        s, a, _ = features_by_formula(case, case.parameters.U, case.parameters.W)
        got = Fused().features(case.inputs, case.parameters.U, case.parameters.W, case.scale)
        assert error(got.s, s, 1.0) < 1e-12
        assert error(got.a, a) < 1e-12
        f, gradients = Fused().step(case.inputs, case.parameters, sigma, case.scale, case.targets)
        yield from (*got, f, *gradients)
        single = case.cast(torch.float32)
        f, gradients = Fused().step(
            single.inputs, single.parameters, sigma, case.scale, single.targets
        )
        yield from (f, *gradients)
    for dtype in (torch.float64, torch.float32):
        for m in (3, 40):
            case = Case(m=m, T=9, d=5, n=70, query="last").cast(dtype)
            tokens = case.inputs.tokens[:1].repeat(70, 1, 1)
            tokens[..., 2] = case.inputs.tokens[..., 2]
            f, gradients = placed.step(
                find_places(tokens, tokens[:, -1]), case.parameters, 1.0, case.targets
            )
            yield from (f, *gradients)


@pytest.mark.compiler
@pytest.mark.parametrize("build", ["portable", "wide"])
def test_every_width_of_the_vectors_gives_the_same_numbers(place, monkeypatch, build):
    """Without knowledge of the processor, and with 64 bytes a vector on any processor."""
    expected = list(results())
    if build == "portable":
        monkeypatch.setattr(native, "instruction_set", lambda: "UNKNOWN")
    else:
        own = native.instruction_set()
        flags = (*native.INSTRUCTION_SETS.get(own, ()), "-DLANES_BYTES=64", "-Wno-psabi", "-O1")
        monkeypatch.setattr(native, "INSTRUCTION_SETS", {own: flags})
    native._attempt.cache_clear()
    fused._kernel.cache_clear()
    placed._kernel.cache_clear()
    for one, two in zip(results(), expected, strict=True):
        tolerance = 1e-12 if one.dtype == torch.float64 else 2e-5
        assert error(one.double(), two.double(), 1e-3) < tolerance
    for source in ("attention", "placed"):
        assert len([name for name in kept(place) if name.startswith(source)]) == 2


@pytest.mark.compiler
@pytest.mark.parametrize("source", ["attention", "placed"])
def test_the_kernel_builds_for_every_instruction_set(place, source):
    """What this processor can't run, its compiler can build."""
    path = os.path.join(os.path.dirname(native.__file__), f"{source}.cpp")
    compiler = native.compiler()
    empty = subprocess.run(
        [compiler, *native.INSTRUCTION_SETS["AVX512"], "-E", "-x", "c++", os.devnull],
        capture_output=True,
        check=False,
    )
    if empty.returncode:  # another architecture: its build is the portable one
        assert native.instruction_set() not in native.INSTRUCTION_SETS
        return
    target = place / "wide.so"
    command = [
        compiler,
        *native.FLAGS,
        *native.INSTRUCTION_SETS["AVX512"],
        "-O1",
        "-Werror",
        "-Wall",
    ]
    subprocess.run([*command, path, "-o", str(target)], check=True)
    if native.instruction_set() == "AVX512":
        assert getattr(ctypes.CDLL(str(target)), f"{source}_float")
