"""Serialize forward-mode differentiation, so that one thread at a time uses it.

torch keeps the levels of forward-mode differentiation for the whole process: `torch.autograd.forward_ad.dual_level` and
everything built on it (`jvp`, `jacfwd`, `hessian` and `linearize` of `torch.func`) crash in two threads at once, or
compute with the tangents of each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from torch._functorch import eager_transforms
from torch.autograd import forward_ad

LEVELS: Final = threading.RLock()
"""Held by the thread that is inside of a level."""


def serialize_forward_mode() -> None:
    """Serialize levels of forward-mode differentiation: threads wait for each other, in the whole process from now on.

    Calling this again has no effect. Levels may still be nested within a thread, as far as torch supports it.
    """
    with LEVELS:
        # `jvp` counts how deep it is nested in a variable of its own, before it enters a level.
        for module, name in ((forward_ad, "dual_level"), (eager_transforms, "jvp_nesting")):
            enter, leave = getattr(module, f"enter_{name}"), getattr(module, f"exit_{name}")
            if not isinstance(enter, partial):
                setattr(module, f"enter_{name}", partial(_enter, enter))
                setattr(module, f"exit_{name}", partial(_exit, leave))


def _enter(enter: Callable[[], int]) -> int:
    LEVELS.acquire()
    try:
        return enter()
    except BaseException:
        LEVELS.release()
        raise


def _exit(leave: Callable[..., None], **level: Any) -> None:
    try:
        leave(**level)
    finally:
        # It is not owned if the level was entered before the first call of `serialize_forward_mode`.
        if LEVELS._is_owned():  # type: ignore[attr-defined]  # noqa: SLF001 - no public way
            LEVELS.release()
