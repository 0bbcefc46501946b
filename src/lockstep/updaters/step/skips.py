"""Notice updates that are skipped because their gradient is not finite: warn once, and end a run of nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch

from lockstep.errors import NonFiniteError, NonFiniteWarning, warn
from lockstep.metrics import read
from lockstep.updaters.attempt.attempt import Attempt, DeferredCheck
from lockstep.updaters.result import SkippedUpdate, UpdateResult
from lockstep.updaters.state.training import TrainingState

HELD: Final = 512
"""The number of the latest unread checks that are kept one by one; older ones are merged."""


@dataclass(frozen=True, slots=True)
class UnreadCheck:
    """The check of an update, or of several successive ones, that is still on the device.

    Attributes:
        first: The number of complete updates before the first of them.
        last: The number of complete updates before the last of them.
        check: The check, or the elementwise maximum of their flags.
        result: The result of the last of them.
    """

    first: int
    last: int
    check: DeferredCheck
    result: UpdateResult


class SkippedUpdates:
    """Counts updates in a row that were skipped, and names the first in a warning.

    An update that is applied calls nothing here: that a run of skipped updates has ended shows in the number of the
    next one that is skipped. Checks on a device are kept there until `read` is called.

    Args:
        training: The training state, which counts the updates.
        max_skipped: The number of skipped updates in a row that is an error; None if no number is.
    """

    def __init__(self, training: TrainingState, max_skipped: int | None) -> None:
        self._training = training
        self._max_skipped = max_skipped
        self._has_warned = self._has_warned_of_empty = False
        self._unread: list[UnreadCheck] = []
        self.forget()

    def forget(self) -> None:
        """Start anew, because a state was loaded."""
        self._unread.clear()
        self._run, self._end = 0, 0
        self.last: SkippedUpdate | None = None
        """The last skipped update; None before the first."""

    def note(self, attempt: Attempt) -> None:
        """Note the final attempt of an update before it is committed.

        Args:
            attempt: The attempt, whose gradient may be finite.

        Raises:
            NonFiniteError: If this is the last of the skipped updates that are allowed in a row.
        """
        check, iteration = attempt.overflow_check, self._training.iteration
        if isinstance(check, DeferredCheck):
            self._unread.append(UnreadCheck(iteration, iteration, check, attempt.result(applied=False)))
            if len(self._unread) >= 2 * max(HELD, self._max_skipped or 0):
                self._merge_older()
        elif check.nonfinite is not None:
            # Only where an optimizer or a hook had a check read that its predecessors had not.
            self._count_unread()
            self._count(iteration, iteration, check.nonfinite, attempt.result(applied=False))
            self._raise_if_too_many()

    def note_empty(self) -> None:
        """Note an update of which no shard has a weight above 0."""
        if not self._has_warned_of_empty:
            self._has_warned_of_empty = True
            warn(
                f"Update {self._training.iteration + 1} was skipped: all samples of its batch together have weight 0, "
                "as where every label is ignored or masked, so that there is no mean and no gradient. Weights, "
                "optimizer and scheduler stay as they are. This warning is given once per run.",
                NonFiniteWarning,
            )

    def read(self) -> SkippedUpdate | None:
        """Read the checks that are still on the device, and return the last skipped update, or None.

        There is one transfer if all gradients were finite.

        Raises:
            NonFiniteError: If the last updates were skipped, and are as many as `max_skipped`.
        """
        if self._unread:
            latest = self._unread[-1].last
            self._count_unread()
            if latest + 1 == self._end:
                self._raise_if_too_many()
        return self.last

    def _count_unread(self) -> None:
        unread, self._unread = self._unread, []
        for each, flag in zip(unread, read([each.check.found_inf for each in unread]), strict=True):
            if flag:
                self._count(each.first, each.last, str(each.check.nonfinite), each.result)

    def _count(self, first: int, last: int, parameter: str, result: UpdateResult) -> None:
        """Count updates whose gradients are known not to be finite, or of which at least one is not.

        Args:
            first: The number of complete updates before the first of them.
            last: The number of complete updates before the last of them.
            parameter: The first parameter whose gradient is not finite.
            result: The result of the last of them.
        """
        # An update of a step function has several gradients, and one that failed is repeated under its number.
        if last + 1 != self._end:
            self._run = self._run + 1 if first == self._end else 1
        self._end = last + 1
        self.last = SkippedUpdate(self._end, parameter, result.loss.item())
        if not self._has_warned:
            self._has_warned = True
            number = f"Update {self._end}" if first == last else f"An update before {self._end + 1}"
            warn(
                f"{number} was skipped: the gradient of {parameter!r} is not finite, with a loss of "
                f"{self.last.loss:g}. {self._explanation(self.last)} A log counts skipped updates as `main/skipped`. "
                "This warning is given once per run.",
                NonFiniteWarning,
            )

    def _raise_if_too_many(self) -> None:
        """Raise an error if the number of skipped updates in a row is reached, and allow as many again."""
        if self._max_skipped is None or self._run < self._max_skipped or self.last is None:
            return
        run, self._run, self._end = self._run, 0, 0
        raise NonFiniteError(
            f"{run} updates in a row (`max_skipped`) had to be skipped: the gradient of {self.last.parameter!r} is not "
            f"finite, with a loss of {self.last.loss:g}. {self._explanation(self.last)} A smaller learning rate, a "
            "warm-up and gradient clipping keep weights and gradients finite. To go on regardless, pass a larger "
            "`max_skipped`, or None.",
            parameter=self.last.parameter,
            tries=run,
        )

    def _explanation(self, skipped: SkippedUpdate) -> str:
        """Return what the weights and the loss tell about the reason, and what to do."""
        for name, parameter in self._training.replicas.model.named_parameters():
            if not bool(torch.isfinite(parameter).all()):
                return (
                    f"The weights themselves are not finite (the first is {name!r}), so every update will be skipped. "
                    "Load a state from before."
                )
        if math.isfinite(skipped.loss):
            return (
                "The loss is finite, so the gradient overflowed in backward, or a function has no finite derivative, "
                "such as a root at 0 or one whose limit an infinity in the batch reaches: lower the loss scale, if "
                "there is one. While a dynamic loss scale adapts, a few skipped updates are usual."
            )
        return (
            "The weights are finite, so the batch or the loss function is the reason: with on_exhausted='raise' the "
            "run stops at such a batch, and `find_nonfinite()` then lists its shards and samples."
        )

    def _merge_older(self) -> None:
        """Merge the older half of the checks into one, without waiting for the device."""
        half = len(self._unread) // 2
        older, self._unread = self._unread[:half], self._unread[half:]
        latest = older[-1]
        # The names differ where a parameter was frozen or a shard reached others.
        alike = [each.check.flags for each in older if each.check.names == latest.check.names]
        merged = DeferredCheck(latest.check.names, torch.stack(alike).amax(0))
        self._unread.insert(0, UnreadCheck(older[0].first, latest.last, merged, latest.result))
