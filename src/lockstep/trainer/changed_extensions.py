"""Compare the extensions of a saved state with those of the trainer that loads it."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Any

from lockstep.errors import StateError
from lockstep.state import check_keys


def check_extensions(state: Mapping[str, Any], names: Collection[str], *, strict: bool, warn: bool) -> None:
    """Check the extensions that a saved state of a trainer names; warn of those that were added or removed since.

    Args:
        state: The saved state of the trainer. It is not changed.
        names: The names of the trainer's extensions.
        strict: Whether a difference is an error.
        warn: Whether this process prints the warning.

    Raises:
        StateError: If `strict` and extensions were added or removed; or if the state contradicts itself, whether
            strict or not.
    """
    saved = state["extensions"]
    check_keys(state["triggers"], saved, of="the triggers of Trainer")
    unknown = {*state["pending"], state["due"]} - {None, *saved}
    if unknown:
        raise StateError(f"The state of Trainer must name its extensions as pending, got {sorted(unknown)}.")
    if strict:
        check_keys(saved, names, of="the extensions of Trainer")
    added = [name for name in names if name not in saved]
    removed = [name for name in saved if name not in names]
    if warn and (added or removed):
        changes = [f"added {', '.join(added)}"] if added else []
        changes += [f"removed {', '.join(removed)}"] if removed else []
        warnings.warn(
            f"The extensions of this Trainer are not those of the saved state: {' and '.join(changes)}. Extensions "
            "that were added start without a saved state, and the state of those that were removed is ignored. To "
            "refuse such a state, call load_state_dict(state, strict=True).",
            stacklevel=3,
        )
