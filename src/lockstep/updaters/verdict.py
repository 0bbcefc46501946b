"""Whether a gradient is finite: known, or on the device until somebody looks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lockstep.precision import first_flagged


class Verdict:
    """What the check of a gradient said.

    Args:
        nonfinite: The name of the first parameter whose gradient is not finite; None if all are.

    >>> unread = Verdict.unread(["weight", "bias"], torch.tensor([0.0, 1.0]))
    >>> unread.flag, unread.nonfinite, unread.flag
    (tensor(1.), 'bias', None)
    """

    def __init__(self, nonfinite: str | None = None) -> None:
        self._nonfinite = nonfinite
        self._names: Sequence[str] = ()
        self._flags: torch.Tensor | None = None

    @classmethod
    def unread(cls, names: Sequence[str], flags: torch.Tensor) -> Verdict:
        """Make a verdict of flags on a device.

        Args:
            names: Of the parameters that have a gradient.
            flags: One float32 for each name, 1 where the gradient is not finite, else 0.
        """
        verdict = cls()
        verdict._names, verdict._flags = names, flags
        return verdict

    @property
    def flag(self) -> torch.Tensor | None:
        """1 if the gradient is not finite, else 0: 0-d, on its device; None where the host knows already."""
        return None if self._flags is None else self._flags.amax()

    @property
    def nonfinite(self) -> str | None:
        """The first parameter whose gradient is not finite, or None; waits for the device if it must."""
        if self._flags is not None:
            self._nonfinite = first_flagged(self._names, self._flags)
            self._flags = None
        return self._nonfinite
