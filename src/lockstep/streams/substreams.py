"""Keep the random streams of one update apart when it makes more than one computation.

Streams are keyed by a position in 0..2³²-1, and shards of a run's first computations count up from 0. Every
other use has a substream of its own: substream i begins at i with its 32 bits in reverse order, so that few
substreams lie as far apart as they can. Two of 2ᵏ substreams never share a position before a run has had
2³²⁻ᵏ shards.
"""

from __future__ import annotations

from typing import Final

STEP: Final = 1
"""What a step function draws itself, between the computations it asks for."""
INITIALISATION: Final = 2
"""Parameters that get their shapes from the first batch."""
_FIRST_FURTHER: Final = 3


def substream(number: int) -> int:
    """Give the position at which a substream begins.

    >>> [substream(number) // 2**29 for number in range(8)]
    [0, 4, 2, 6, 1, 5, 3, 7]
    """
    return int(f"{number:032b}"[::-1], 2)


def computation_substream(ordinal: int) -> int:
    """Give the substream of an update's computation: the first has substream 0.

    Args:
        ordinal: How many computations the update made before.
    """
    return substream(_FIRST_FURTHER + ordinal - 1 if ordinal else 0)
