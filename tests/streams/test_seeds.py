"""Laws of `stream_seed`."""

from __future__ import annotations

from hashlib import blake2s

import pytest
from hypothesis import given, strategies as st

from lockstep.streams import stream_seed
from lockstep.streams.seeds import _key

WORDS = st.integers(0, 2**32 - 1)
SEEDS = st.one_of(st.integers(), st.integers(-(2**200), 2**200))


@given(seed=SEEDS, position=WORDS)
def test_position_is_found_again(seed: int, position: int) -> None:
    """What has an inverse maps no two positions to one stream."""
    assert position_of(seed, stream_seed(seed, position)) == position


@given(seed=SEEDS, word=WORDS)
def test_every_stream_belongs_to_a_position(seed: int, word: int) -> None:
    assert stream_seed(seed, position_of(seed, word)) == word


def test_a_hash_in_its_place_would_collide() -> None:
    """Show that the law above is not empty: among 2¹⁸ hashed positions some 8 pairs share a stream."""
    positions = range(2**18)
    hashed = {blake2s(position.to_bytes(4, "big"), digest_size=4).digest() for position in positions}
    assert len(hashed) < len(positions)
    assert len({stream_seed(7, position) for position in positions}) == len(positions)


@given(seed=SEEDS, position=st.integers(0, 2**100))
def test_positions_count_modulo_two_to_the_32(seed: int, position: int) -> None:
    assert stream_seed(seed, position) == stream_seed(seed, position % 2**32)


@given(seed=SEEDS, position=WORDS, bit=st.integers(0, 199))
def test_every_bit_of_the_seed_counts(seed: int, position: int, bit: int) -> None:
    other = seed ^ 1 << bit
    assert _key(seed) != _key(other)
    # One position may agree by chance (2⁻³²); four in a row do not.
    assert [stream_seed(seed, position + k) for k in range(4)] != [stream_seed(other, position + k) for k in range(4)]


@given(seed=st.integers(1, 2**63 - 1))
def test_the_sign_of_the_seed_counts(seed: int) -> None:
    assert _key(seed) != _key(-seed)


def test_neighbours_differ_in_about_half_their_bits() -> None:
    flips = [(stream_seed(0, k) ^ stream_seed(0, k + 1)).bit_count() for k in range(4096)]
    assert abs(sum(flips) / len(flips) - 16) < 0.25  # 6 standard errors: sqrt(8 / 4096) = 0.044


def test_the_numbers_are_frozen() -> None:
    """A run's recipe names a seed; other numbers here would be other runs."""
    assert [stream_seed(0, position) for position in range(4)] == [
        2133699716,
        379535711,
        2825842526,
        709996483,
    ]
    assert [stream_seed(seed, 5) for seed in (1, -1, 2**63)] == [1835230850, 3066293667, 1363555560]
    assert [stream_seed(seed, 5) for seed in (2**64, 2**130 + 3)] == [3426735718, 844217382]


def test_a_negative_position_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^`position` must be at least 0, got -1\.$"):
        stream_seed(0, -1)


@pytest.mark.parametrize("arguments", [(0.0, 1), (0, 1.0), ("0", 1), (0, None)])
def test_what_is_no_integer_is_refused(arguments: tuple[int, int]) -> None:
    with pytest.raises(TypeError):
        stream_seed(*arguments)


def position_of(seed: int, word: int) -> int:
    """Undo `stream_seed`, step by step."""
    key = _key(seed)
    return (unpermute(unpermute(word) ^ key >> 32) - key) % 2**32


def unpermute(word: int) -> int:
    word ^= word >> 16
    word = word * pow(0x846CA68B, -1, 2**32) % 2**32
    word ^= word >> 15 ^ word >> 30
    word = word * pow(0x7FEB352D, -1, 2**32) % 2**32
    return word ^ word >> 16
