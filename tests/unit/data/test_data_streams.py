"""Streams: reproducible constants, independent whatever their names add up or join to."""

import hashlib
import itertools

import numpy as np
import pytest
import torch

from attention_dynamics.data.streams import generator, stream_key, stream_seed


def first_draws(*names, count=4):
    return tuple(torch.rand(count, generator=generator(*names), dtype=torch.float64).tolist())


def test_streams_are_reproducible_constants():
    # Pinned: another value means that every figure of the book would be drawn from other numbers.
    assert stream_seed(0) == 15041073954064335159
    assert stream_seed(0, "tokens") == 7314444201450723271
    assert stream_seed(7, "width", 64, "teacher") == 5884580897233334123
    assert first_draws(0, "tokens", count=2) == pytest.approx(
        [0.6394160143094171, 0.14857005979375126], rel=0, abs=1e-15
    )


def test_the_same_names_give_the_same_stream():
    assert first_draws(3, "a", 1) == first_draws(3, "a", 1)


def test_names_that_join_or_add_to_the_same_give_other_streams():
    names = [
        (0,), (1,), (0, ""), (0, "a", 1), (0, "a1"), (0, "a", "1"), (0, "a,1"), (0, '"a",1'),
        (0, "1", "a"), (0, 1, "a"), (1, 0, "a"), (0, "ab", "c"), (0, "a", "bc"), (0, "abc"),
        (1, 2), (2, 1), (0, 3), (3, 0), (3,), (12,), (-3,), (0, "é"), (0, "\\u00e9"),
        (10**30,), (2**32,), (2**64,),
    ]  # fmt: skip
    draws = [first_draws(*name) for name in names]
    assert len(set(draws)) == len(names)


def test_streams_whose_seeds_share_their_low_32_bits_differ():
    # manual_seed keeps 32 bits of its argument on the CPU: the reason for setting the whole state.
    low = [torch.rand(1, generator=torch.Generator().manual_seed(5 + k * 2**32)) for k in (0, 1)]
    assert torch.equal(*low)
    assert first_draws(5) != first_draws(5 + 2**32)


def test_the_whole_state_comes_from_the_hash():
    stream = generator(11, "state")
    words = np.frombuffer(hashlib.shake_256(stream_key(11, "state")).digest(4 * 624), dtype="<u4")
    twister = np.random.MT19937()
    state = twister.state
    state["state"]["key"], state["state"]["pos"] = words.copy(), 624
    twister.state = state
    raw = twister.random_raw(2000)
    drawn = torch.empty(1000, dtype=torch.int64).random_(0, 2**31, generator=stream)
    # each 64-bit draw of torch takes two words, the second of which is its low half
    assert np.array_equal(drawn.numpy(), raw[1::2] % 2**31)


def test_neighbouring_streams_are_uncorrelated():
    rows = torch.stack([torch.randn(4000, generator=generator(0, "s", k)) for k in range(20)])
    correlation = torch.corrcoef(rows) - torch.eye(20)
    assert correlation.abs().max() < 6 / 4000**0.5


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        ((1.5,), "seed"),
        ((True,), "seed"),
        (("0",), "seed"),
        ((0, 1.5), "name"),
        ((0, None), "name"),
    ],
)
def test_other_types_are_refused(arguments, argument):
    with pytest.raises(TypeError, match=f"{argument} = .*integer"):
        generator(*arguments)


def test_numpy_integers_are_integers():
    assert stream_seed(np.int64(4), np.int32(2)) == stream_seed(4, 2)


def test_a_grid_of_seeds_and_widths_has_no_coincidence():
    grid = itertools.product(range(20), (8, 16, 32, 64, 128, 256))
    seeds = [stream_seed(seed, "width", width) for seed, width in grid]
    assert len(set(seeds)) == len(seeds)
