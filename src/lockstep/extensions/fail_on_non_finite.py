"""End a run at the first loss or gradient that is not finite."""

from __future__ import annotations

import math
from typing import Final

import torch

from lockstep.errors import NonFiniteError
from lockstep.metrics import as_mean, read
from lockstep.trainer import READER, Extension, Trainer
from lockstep.triggers import TriggerSpec

MAX_HELD: Final = 1024
"""The number of unread values at which they are read before the trigger fires, so that memory stays bounded."""


class FailOnNonFinite(Extension):
    """Ends the run with a `NonFiniteError` at the first loss or gradient that is not finite.

    The weights are those before the first gradient that is not finite, because its update is skipped. Values that the
    host knows (all values on CPUs, and the check of a gradient unless the updater leaves it on the device) end the run
    after their own update. Losses on a GPU and checks that stay there (see `ParallelUpdater.why_it_waits`) are read
    when the trigger fires, which should therefore be that of your log, and when the run ends.

    Args:
        trigger: The trigger that decides when values are read from devices.
    """

    priority = READER - 1

    def __init__(self, trigger: TriggerSpec = (1, "epoch")) -> None:
        self.trigger = trigger
        self._unread: list[tuple[str, int, torch.Tensor]] = []

    def collect(self, trainer: Trainer) -> None:
        """Check what the host knows of an update, and keep the rest to be read later.

        Raises:
            NonFiniteError: If the loss or the gradient is not finite.
        """
        update = trainer.updater.iteration
        # Extensions observe other losses, such as those of a validation.
        names = [name for name in trainer.observation if name.startswith("main/")]
        # Gradients first: their error names a parameter.
        for name in sorted(names, key=lambda each: each.endswith("/loss")):
            if name.endswith(("/skipped", "/loss")):
                total = as_mean(trainer.observation[name]).total
                if isinstance(total, torch.Tensor):
                    self._unread.append((name, update, total))
                else:
                    _check(trainer, name, update, total)
        if len(self._unread) >= MAX_HELD:
            self(trainer)

    def __call__(self, trainer: Trainer) -> None:
        """Read and check the values that are on devices.

        Raises:
            NonFiniteError: If a loss or a gradient is not finite.
        """
        unread, self._unread = self._unread, []
        for (name, update, _), total in zip(unread, read([total for *_, total in unread]), strict=True):
            _check(trainer, name, update, total)

    def finalize(self, trainer: Trainer) -> None:
        """Read and check what is left at the end of a run, unless it ended with an error.

        Raises:
            NonFiniteError: If a loss or a gradient is not finite.
        """
        if trainer.error is None:
            self(trainer)


def _check(trainer: Trainer, name: str, update: int, total: float) -> None:
    """Raise the error if a loss is not finite, or if an update was skipped."""
    if name.endswith("skipped"):
        if not total:
            return
        skipped = trainer.updater.last_skipped()
        parameter = "" if skipped is None else skipped.parameter
        what = f"the gradient of {parameter!r}" if parameter else "a gradient"
        loss = "" if skipped is None or skipped.update != update else f", with a loss of {skipped.loss:g}"
    elif math.isfinite(total):
        return
    else:
        parameter, what, loss = "", f"`{name}`", ""
    raise NonFiniteError(
        f"FailOnNonFinite ends the run after update {update}: {what} is not finite{loss}. Check the data of this "
        "update and the loss function, lower the learning rate, or remove the extension to skip such updates.",
        parameter=parameter,
        tries=1,
    )
