"""Derive the seed of a shard's random stream from the seed of the run and the position of the shard in the run.

Streams are keyed by a position in 0..2³²-1, and the shards of the first computation of each update count up from 0.
Every other use has a substream of its own. Substream i begins at the number whose 32 bits are those of i in reverse
order, so that a small number of substreams are as far apart as possible: two of 2ᵏ substreams share a position only
after a run has had 2³²⁻ᵏ shards.
"""

from __future__ import annotations

import operator
from functools import lru_cache
from typing import Final

SEED_BITS = 32
"""The number of bits of its seed that a CPU generator uses. It ignores the others without an error."""
NUM_SEEDS = 2**SEED_BITS
"""The number of different streams."""

_MASK_32 = 2**32 - 1
_MASK_64 = 2**64 - 1
# 2**64 divided by the golden ratio. Without this offset, seed 0 would give key 0.
_GOLDEN_64 = 0x9E3779B97F4A7C15


def stream_seed(seed: int, position: int) -> int:
    """Return the seed of the random stream of one shard: a permutation of the positions, keyed by the seed of the run.

    With f a fixed permutation of 32-bit words and a, b the halves of the 64-bit key of the seed::

        stream_seed = f(f((position + a) mod 2³²) xor b)

    With a hash into 32 bits, two shards of a run of 2¹⁶ shards would share a stream with a probability of 39 %. Here
    every step is invertible, so different positions below 2³² never share a stream.

    Args:
        seed: The seed of the run, which can be any integer. Seeds in -2⁶³..2⁶³-1 have different keys.
        position: ``update * num_shards + shard``, at least 0 and reduced modulo 2³².

    Returns:
        A number in 0..2³²-1.

    Raises:
        TypeError: If an argument is not an integer.
        ValueError: If the position is negative.

    Determinism: Integer arithmetic, which gives the same result on every machine. Part of the recipe.

    References:
        Chris Wellons, "Prospecting for Hash Functions", 2018 (the constants of f, "lowbias32").
        Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", 2014, section 3, with
        the constants of David Stafford, "Better Bit Mixing", 2011, variant 13 (the key).

    >>> [stream_seed(0, position) for position in range(3)]
    [2133699716, 379535711, 2825842526]
    >>> stream_seed(0, 2**32 + 1) == stream_seed(0, 1)
    True
    """
    position = operator.index(position)
    if position < 0:
        raise ValueError(f"`position` must be at least 0, got {position}.")
    key = _key(operator.index(seed))
    word = (position + (key & _MASK_32)) & _MASK_32
    for mask in (key >> 32, 0):
        # The permutation f: xor-shifts and multiplications by odd factors are all invertible modulo 2**32.
        word ^= word >> 16
        word = word * 0x7FEB352D & _MASK_32
        word ^= word >> 15
        word = word * 0x846CA68B & _MASK_32
        word ^= word >> 16 ^ mask
    return word


def check_seed(seed: int) -> None:
    """Check that a seed is in the range of streams, before a generator ignores its upper bits.

    Args:
        seed: The seed to check.

    Raises:
        ValueError: If the seed lies outside 0..2³²-1.
    """
    if not 0 <= seed <= _MASK_32:
        rule = f"must lie in 0..2**{SEED_BITS} - 1, as `stream_seed` returns it"
        raise ValueError(f"`seed` {rule}, got {seed}.")


@lru_cache(maxsize=64)
def _key(seed: int) -> int:
    """Reduce an integer of any size, including its sign, to 64 bits, 64 bits at a time from the lowest."""
    key = _MASK_64 if seed < 0 else 0
    rest = abs(seed)
    while True:
        key = _permute_64((key ^ rest & _MASK_64) + _GOLDEN_64 & _MASK_64)
        rest >>= 64
        if rest == 0:
            return key


def _permute_64(word: int) -> int:
    """Mix the bits of a 64-bit word by an invertible function."""
    word ^= word >> 30
    word = word * 0xBF58476D1CE4E5B9 & _MASK_64
    word ^= word >> 27
    word = word * 0x94D049BB133111EB & _MASK_64
    return word ^ word >> 31


STEP: Final = 1
"""The substream for what a step function draws itself, between the computations that it requests."""
INITIALISATION: Final = 2
"""The substream for parameters that get their shapes from the first batch."""
_FIRST_ADDITIONAL: Final = 3


def substream(number: int) -> int:
    """Return the position at which a substream begins.

    Args:
        number: The number of the substream, in 0..2³²-1.

    >>> [substream(number) // 2**29 for number in range(8)]
    [0, 4, 2, 6, 1, 5, 3, 7]
    """
    return int(f"{number:032b}"[::-1], 2)


def computation_substream(ordinal: int) -> int:
    """Return the position at which the substream of one of the computations of an update begins.

    The first computation uses substream 0.

    Args:
        ordinal: The number of computations that the update made before this one.
    """
    return substream(_FIRST_ADDITIONAL + ordinal - 1 if ordinal else 0)
