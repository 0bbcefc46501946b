"""Separate the random streams of one update that makes more than one computation.

Streams are keyed by a position in 0..2³²-1, and the shards of the first computation of each update count up from 0.
Every other use has a substream of its own. Substream i begins at the number whose 32 bits are those of i in reverse
order, so that a small number of substreams are as far apart as possible: two of 2ᵏ substreams share a position only
after a run has had 2³²⁻ᵏ shards.
"""

from __future__ import annotations

from typing import Final

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
