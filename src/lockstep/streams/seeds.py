"""Turn a run's seed and a shard's position in the run into the seed of that shard's stream."""

from __future__ import annotations

import operator
from functools import lru_cache

SEED_BITS = 32  # a CPU generator reads no more of its seed than this
SEEDS = 2**SEED_BITS  # so many streams there are

_MASK_32 = 2**32 - 1
_MASK_64 = 2**64 - 1
_GOLDEN_64 = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: keeps seed 0 from folding to key 0


def stream_seed(seed: int, position: int) -> int:
    """Give the seed of one shard's random stream: a permutation of positions, keyed by the run's seed.

    With f a fixed permutation of 32-bit words and a, b the halves of the seed's 64-bit key::

        stream_seed = f(f((position + a) mod 2³²) xor b)

    A hash into 32 bits would give two shards of a run of 2¹⁶ shards one stream with a probability
    of 39 %. Every step here can be undone, so positions below 2³² never share one.

    Args:
        seed: The run's seed; any integer. Seeds in -2⁶³..2⁶³-1 have different keys.
        position: ``update * num_shards + shard``; at least 0, counted modulo 2³².

    Returns:
        A number in 0..2³²-1.

    Raises:
        TypeError: An argument is not an integer.
        ValueError: The position is negative.

    Determinism: integer arithmetic; the same on every machine. Part of the recipe.

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
        # The permutation f; shifts of 15 and more and odd factors can all be undone.
        word ^= word >> 16
        word = word * 0x7FEB352D & _MASK_32
        word ^= word >> 15
        word = word * 0x846CA68B & _MASK_32
        word ^= word >> 16 ^ mask
    return word


def check_seed(seed: int) -> None:
    """Refuse a number that no stream has, before a generator silently drops its upper bits.

    Raises:
        ValueError: The seed lies outside 0..2³²-1.
    """
    if not 0 <= seed <= _MASK_32:
        rule = f"must lie in 0..2**{SEED_BITS} - 1, as `stream_seed` gives it"
        raise ValueError(f"`seed` {rule}, got {seed}.")


@lru_cache(maxsize=64)
def _key(seed: int) -> int:
    """Fold all bits of an integer into 64, sign included, 64 at a time from the lowest."""
    key = _MASK_64 if seed < 0 else 0
    rest = abs(seed)
    while True:
        key = _permute_64((key ^ rest & _MASK_64) + _GOLDEN_64 & _MASK_64)
        rest >>= 64
        if rest == 0:
            return key


def _permute_64(word: int) -> int:
    """Mix the bits of a 64-bit word."""
    word ^= word >> 30
    word = word * 0xBF58476D1CE4E5B9 & _MASK_64
    word ^= word >> 27
    word = word * 0x94D049BB133111EB & _MASK_64
    return word ^ word >> 31
