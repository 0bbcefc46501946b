"""Keep freed memory in the process, for the next update needs it again.

The C library of Linux gives large blocks back to the system as soon as they are free, and gradients and
activations are large: each update then pays for thousands of page faults, most of all in threads, whose
arenas are trimmed the hardest. On two cores that took a tenth of the time of an update.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Final

KEPT: Final = 2**30
"""Bytes of free memory at the end of an arena that are kept."""

AHEAD: Final = 2**26
"""Bytes by which an arena grows at least; as much as a thread's arena has in one piece."""

LARGEST: Final = 2**25
"""Bytes from which a block is a mapping of its own, given back when it is free; the most that can be set."""

M_TRIM_THRESHOLD: Final = -1
M_TOP_PAD: Final = -2
M_MMAP_THRESHOLD: Final = -3
USERS_WORDS: Final = (
    "GLIBC_TUNABLES",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_TRIM_THRESHOLD_",
)


def keep_freed_memory() -> bool:
    """Ask the C library to keep freed memory; for the whole process, and for good.

    Nothing is asked where the user has said in the environment how memory is to be kept
    (`MALLOC_TRIM_THRESHOLD_` and its like), or where the C library is not glibc.

    Returns:
        Whether the library agreed.
    """
    if sys.platform != "linux" or any(word in os.environ for word in USERS_WORDS):
        return False
    library = ctypes.CDLL(None)
    try:
        mallopt = library.mallopt
    except AttributeError:
        return False
    settings = ((M_TRIM_THRESHOLD, KEPT), (M_TOP_PAD, AHEAD), (M_MMAP_THRESHOLD, LARGEST))
    answers = [mallopt(name, value) for name, value in settings]
    return answers == [1, 1, 1]
