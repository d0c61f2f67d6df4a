"""The teacher: a fixed function, its Monte-Carlo error, and the error of m heads against it."""

import math
import subprocess
import sys

import pytest
import torch

from attention_dynamics.data.streams import generator
from attention_dynamics.data.tokens import query_vector, unit_ball_tokens
from attention_dynamics.models.attention import head_features, resolve_query
from attention_dynamics.models.parameters import (
    independent_initialisation,
    symmetric_initialisation,
)
from attention_dynamics.theory import (
    Teacher,
    TransportNorms,
    approximation_error,
    head_contributions,
    random_multi_anchor,
    transported_function,
)

T, d = 6, 4


@pytest.fixture(scope="module")
def transport():
    query = query_vector(d, generator=generator(0, "query"), dtype=torch.float64)
    return random_multi_anchor(
        4, T, d, generator=generator(0, "anchors"), norms=TransportNorms(2, 2, 2), query=query,
        dtype=torch.float64,
    )  # fmt: skip


@pytest.fixture(scope="module")
def tokens():
    return unit_ball_tokens(50, T, d, generator=generator(0, "tokens"), dtype=torch.float64)


def test_it_averages_over_its_heads(transport, tokens):
    # 2500 heads span three chunks
    teacher = Teacher(transport, generator=generator(0, "teacher"), heads=2500)
    values, errors = teacher.evaluate(tokens)
    z = head_contributions(tokens, transport, teacher.parameters)
    assert torch.allclose(values, z.mean(dim=1), rtol=1e-12, atol=1e-15)
    assert torch.allclose(errors, z.std(dim=1) / math.sqrt(2500), rtol=1e-10)
    assert torch.equal(values, teacher(tokens))
    assert torch.equal(errors, teacher.standard_error(tokens))
    assert torch.equal(transported_function(tokens, transport, teacher.parameters), z.mean(dim=1))


def test_chunks_of_samples_change_nothing(transport):
    long = unit_ball_tokens(1100, T, d, generator=generator(0, "long"), dtype=torch.float64)
    teacher = Teacher(transport, generator=generator(0, "teacher"), heads=1024)
    parts = torch.cat([teacher(part) for part in long.split(137)])
    assert torch.allclose(teacher(long), parts, rtol=1e-12, atol=1e-16)


@pytest.mark.parametrize("query", ["fixed", "last"])
def test_it_is_the_sum_over_anchors_whatever_the_engine(query, tokens):
    q = query_vector(d, generator=generator(0, "q"), dtype=torch.float64)
    transport = random_multi_anchor(
        3, T, d, generator=generator(0, "a"), norms=TransportNorms(2, 2, 0.05),
        query=q if query == "fixed" else "last", dtype=torch.float64, scale=0.7,
    )  # fmt: skip
    teachers = {
        engine: Teacher(transport, generator=generator(0, "teacher"), heads=300, engine=engine)
        for engine in ("auto", "eager", "reference")
    }
    c, U, W = teachers["auto"].parameters
    anchors, x = (
        head_features(X, W, U, transport.query, scale=0.7) for X in (transport.anchors, tokens)
    )
    queries, own = (0.7 * resolve_query(X, transport.query) for X in (transport.anchors, tokens))
    z = torch.zeros(50, 300, dtype=torch.float64)
    for r, beta in enumerate(transport.coefficients):  # each anchor by itself, nothing collapsed
        slope = 1 - anchors.s[r].tanh() ** 2
        size = slope * anchors.r[r].norm(dim=-1) * queries[r].norm()
        clipped = slope * (0.05 / size).clamp_max(1)
        z += beta * 2 * anchors.s[r].tanh() * x.s.tanh()
        along_a = 2 * slope * (anchors.a[r] * x.a).sum(dim=-1)
        along_r = clipped * (anchors.r[r] * x.r).sum(dim=-1) * (own @ queries[r])[:, None]
        z += beta * (1 - x.s.tanh() ** 2) * c**2 * (along_a + along_r)
    for teacher in teachers.values():
        values, errors = teacher.evaluate(tokens)
        assert torch.allclose(values, z.mean(dim=1), rtol=1e-11, atol=1e-15)
        assert torch.allclose(errors, z.std(dim=1) / math.sqrt(300), rtol=1e-9)


PEAK = """
import resource, torch
from attention_dynamics.data.streams import generator
from attention_dynamics.data.tokens import unit_ball_tokens
from attention_dynamics.theory import Teacher, TransportNorms, random_multi_anchor
torch.set_num_threads(1)
X = unit_ball_tokens(600, 16, 8, generator=generator(0))
transport = random_multi_anchor(16, 16, 8, generator=generator(1), norms=TransportNorms(3, 3, 3),
                                query=torch.full((8,), 0.3))
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
Teacher(transport, generator=generator(2), heads=32)(X[:8])
before = peak()
Teacher(transport, generator=generator(2), heads=8192)(X)
print(peak() - before)
"""


def test_its_memory_does_not_hold_the_heads_of_all_samples():
    # one number a head and sample is 39 MB in float64, the features (s, a, r) 334 MB in float32
    run = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    assert float(run.stdout) < 36


def test_masked_tokens_are_left_out(transport, tokens):
    teacher = Teacher(transport, generator=generator(0, "teacher"), heads=128)
    mask = torch.ones(50, T, dtype=torch.bool)
    mask[:, 4:] = False
    assert torch.allclose(teacher(tokens, mask), teacher(tokens[:, :4]), rtol=1e-12, atol=1e-16)


def test_the_standard_error_covers_independent_teachers(transport, tokens):
    reference = Teacher(transport, generator=generator(0, "reference"), heads=40000)(tokens)
    misses = []
    for k in range(40):
        teacher = Teacher(transport, generator=generator(0, "teacher", k), heads=400)
        values, errors = teacher.evaluate(tokens)
        misses.append((values - reference) / errors)
    deviation = torch.stack(misses)  # standard normal up to the error of the reference
    assert 0.8 < float(deviation.square().mean().sqrt()) < 1.25
    assert float((deviation.abs() < 1.96).double().mean()) > 0.9


def test_two_teachers_of_one_seed_agree_and_of_two_seeds_do_not(transport, tokens):
    first, again, other = (
        Teacher(transport, generator=generator(s, "teacher"), heads=64)(tokens) for s in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


def test_approximation_error_is_the_maximum_and_the_root_mean_square(transport, tokens):
    parameters = symmetric_initialisation(8, d, generator=generator(0, "m"), dtype=torch.float64)
    teacher = torch.linspace(-1, 1, 50, dtype=torch.float64)
    error = transported_function(tokens, transport, parameters) - teacher
    found = approximation_error(teacher, transport, parameters, tokens)
    assert found.sup == pytest.approx(float(error.abs().max()), rel=1e-13)
    assert found.rms == pytest.approx(float(error.square().mean().sqrt()), rel=1e-13)
    with pytest.raises(ValueError, match=r"teacher_values: expected shape \(n,\) with n = 50"):
        approximation_error(teacher[:-1], transport, parameters, tokens)


def test_paired_heads_approximate_like_half_as_many(transport, tokens):
    reference = Teacher(transport, generator=generator(0, "reference"), heads=20000)(tokens)

    def mean_square(draw, heads):
        errors = [
            approximation_error(
                reference,
                transport,
                draw(heads, d, generator=generator(k, "heads", heads), dtype=torch.float64),
                tokens,
            ).rms
            for k in range(60)
        ]
        return sum(e * e for e in errors) / len(errors)

    paired, unpaired = (
        mean_square(draw, 32) for draw in (symmetric_initialisation, independent_initialisation)
    )
    assert 1.4 < paired / unpaired < 2.8  # 2 in the mean
    assert 2.6 < unpaired / mean_square(independent_initialisation, 128) < 6.0  # 4 in the mean


def test_a_teacher_needs_two_heads(transport):
    with pytest.raises(ValueError, match="heads: expected an integer >= 2, got 1"):
        Teacher(transport, generator=generator(0), heads=1)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda x: (x[:0], None), ValueError, r"tokens: .* at least one .* got shape \(0, 6, 4\)"),
        (lambda x: (x.float(), None), TypeError, r"tokens: has dtype .*float32 .* in .*float64"),
        (lambda x: (x.tolist(), None), TypeError, r"tokens: expected a torch\.Tensor"),
        (lambda x: (x, torch.ones(60, T).bool()), ValueError, r"mask: expected .* got \(60, 6\)"),
    ],
)
def test_bad_sequences_are_refused_before_they_are_cut(transport, tokens, change, error, message):
    teacher = Teacher(transport, generator=generator(0), heads=4)
    bad, mask = change(tokens)
    with pytest.raises(error, match=message):
        teacher(bad, mask)
    with pytest.raises(error, match=message):
        transported_function(bad, transport, teacher.parameters, mask=mask)
    with pytest.raises(error, match=message):
        approximation_error(teacher(tokens), transport, teacher.parameters, bad, mask=mask)
