"""Fire at the first call only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.triggers.trigger import Progress, Trigger


class Once(Trigger):
    """Fires at its first call.

    Args:
        call_on_resume: Whether it also fires at the first call after a saved state was loaded.
    """

    _saved = ("fired",)

    def __init__(self, *, call_on_resume: bool = False) -> None:
        self.call_on_resume = call_on_resume
        self._fired = False

    def __call__(self, progress: Progress) -> bool:  # noqa: ARG002 - independent of the progress
        """Return whether this is the first call."""
        first, self._fired = not self._fired, True
        return first

    @property
    def finished(self) -> bool:
        """Whether it has fired."""
        return self._fired

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state; with ``call_on_resume``, the trigger can fire again."""
        super().load_state_dict(state)
        self._fired = self._fired and not self.call_on_resume
