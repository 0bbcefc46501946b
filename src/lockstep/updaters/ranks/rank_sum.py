"""Compute the sum over ranks from the partial sums of each process.

Ranks can only sum what they know about, and they describe their partial sums to each other in the control message of
the attempt, after backward. Small gradients travel in this message, as far as the last reduction has made room for
them. Others are summed after it, or during backward where recent updates predict what there will be to send: two equal
reductions in a row are followed by a third. All ranks make the same prediction, because they predict from what was sent
to all. From a prediction until the next message, every rank takes part in one pending sum. A rank that fails, or that
has something else than predicted, contributes zeros, so no rank waits. If any rank did so, the ranks that have sent
their gradients compute them again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

import torch

from lockstep.communicators import Communicator, Contribution, PendingSum, SmallSum, SumAudit
from lockstep.replicas import move_partials
from lockstep.tree import PartialSum, Tensors
from lockstep.updaters.compute.early_send import EarlySend
from lockstep.updaters.compute.shares import RankShare

SMALL_BYTES: Final = 2**20
"""The number of bytes that a rank may send with its message, to all others together, if all are on one machine."""
SMALL_BYTES_OVER_NETWORK: Final = 2**16
"""The same limit over a network. At 1 Gbit/s this many bytes take half a millisecond, about as long as a round trip."""
REPEATS_BEFORE_PREDICTION: Final = 2
"""The number of equal reductions in a row before the first prediction. It doubles after each wrong prediction."""
MAX_REPEATS: Final = 1024
"""The largest number of equal reductions that is required before a prediction."""

KEPT: Final = "kept"
SENT: Final = "sent"
SPOILED: Final = "spoiled"
"""What a rank did with its partial sums: it kept all of them, sent all of them, or neither."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the next reduction is expected to be.

    Attributes:
        key: Identifies the computation and the sizes of its batches.
        contributions: What every rank contributes.
        like: Tensors with the shapes, dtypes and devices of the gradients.
    """

    key: str
    contributions: tuple[Contribution, ...]
    like: Sequence[torch.Tensor] = field(compare=False)

    @property
    def can_be_sent_early(self) -> bool:
        """Whether every rank contributes something, all of it dense and on one device."""
        return (
            all(any(each.present) for each in self.contributions)
            and not any(each.sparse for each in self.contributions)
            and len({tensor.device for tensor in self.like}) == 1
        )


class RankSum:
    """Sums gradients over ranks; the steps of one sum are `begin_sum`, `announce`, `exchange` and `sum`.

    Args:
        communicator: The communicator of the run.
        one_machine: Whether all ranks are on one machine.

    Attributes:
        must_repeat: Whether all ranks must compute their shares again, because some were sent early in vain; as of the
            last exchange.
        partials: What this rank has announced and not summed yet.
    """

    def __init__(self, communicator: Communicator, *, one_machine: bool) -> None:
        self._communicator = communicator
        self._limit = SMALL_BYTES if one_machine else SMALL_BYTES_OVER_NETWORK
        if not communicator.exact:
            # Messages hold terms as they are, and every sum must be rounded, or else the bits would depend on how often
            # the like was summed before.
            self._limit = 0
        self._small = SmallSum(communicator.rank, communicator.size)
        self._like: Sequence[torch.Tensor] = ()
        self._key: str | None = None
        self.partials: list[PartialSum] = []
        self._last: Prediction | None = None
        self._repeats = 0
        self._repeats_needed = REPEATS_BEFORE_PREDICTION
        self._prediction: Prediction | None = None
        self._pending: PendingSum | None = None
        self._early_send: EarlySend | None = None
        self._summed: Tensors | None = None
        self._was_wrong = False
        self._streams: dict[torch.device, torch.Stream] = {}
        self.must_repeat = False

    def begin_sum(self, key: str | None, share: RankShare, like: Sequence[torch.Tensor]) -> EarlySend | None:
        """Begin a sum, before the gradients are computed.

        Args:
            key: Identifies the computation and the sizes of its batches; None where partial sums cannot be sent before
                they are complete.
            share: The shards of this rank.
            like: Tensors with the shapes, dtypes and devices of the gradients.

        Returns:
            The receiver of gradients during backward; None if another sum was predicted, or none.
        """
        self._key, self._like, self._early_send = key, like, None
        prediction = self._prediction
        if prediction is not None and prediction.key == key and prediction.like is like:
            self._pending = self._communicator.begin_sum(prediction.contributions, like)
            announced = prediction.contributions[self._communicator.rank]
            self._early_send = EarlySend(self._pending, announced, share, like[0].device, self._streams)
        return self._early_send

    def announce(self, devices: Sequence[Sequence[PartialSum]], share: RankShare) -> Contribution:
        """Store this rank's partial sums, and return their description for the other ranks.

        Args:
            devices: The partial sums of each device.
            share: The shards of this rank.
        """
        if self._early_send is not None and self._early_send.has_begun:
            # The partial sums have been sent already, or were spoiled on the way and will be computed again.
            self.partials = []
            return self._early_send.announced
        self.partials = merge_devices(devices, share, self._like[0].device)
        contribution = Contribution.of(self.partials)
        self._small.pack(self.partials, contribution, self._like)
        return contribution

    def exchange(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Send a control message to every rank, and return the messages of all ranks.

        All messages use this method, because a sum that was begun ends with each message on all ranks.

        Args:
            message: The message of this rank.
        """
        predicted = self._prediction is not None
        # Before the message: a rank that has it may rely on all early sums being complete or abandoned. The bodies of
        # all messages have one length, even where a rank has nothing to add.
        own = {**message, "early": self._end_prediction()}
        messages: list[dict[str, Any]] = self._communicator.exchange_json(own, self._small.table)
        pending, self._pending = self._pending, None
        # Also where another rank has contributed zeros: the transfers must end before the next sum begins.
        self._summed = None if pending is None else pending.finish()
        states = {each["early"] for each in messages}
        if states != {SENT}:
            # Some rank has contributed zeros, or nothing was predicted.
            self._summed = None
            self._was_wrong = self._was_wrong or predicted
        # Ranks that kept their sums could go on, but not alone: all ranks repeat the attempt together.
        self.must_repeat = len(states) > 1 or SPOILED in states
        return messages

    def _end_prediction(self) -> str:
        """Ensure that no rank waits for gradients of this rank, and return their state."""
        prediction, send, pending = self._prediction, self._early_send, self._pending
        self._prediction = self._early_send = None
        if prediction is None or (send is not None and send.is_complete):
            return KEPT if prediction is None else SENT
        # From here on the pending sum is worthless, here by its zeros and on the other ranks by this rank's answer.
        self._pending = None
        # Another computation than the predicted one, or an error: the other ranks may have begun the sum, so this rank
        # must begin it too and contribute zeros.
        if pending is None:
            pending = self._communicator.begin_sum(prediction.contributions, prediction.like)
        pending.abandon()
        return SPOILED if send is not None and send.has_begun else KEPT

    def sum(self, contributions: tuple[Contribution, ...], *, steady: bool, audit: SumAudit | None = None) -> Tensors:
        """Return the sum over ranks, one entry per parameter; None where no rank has a gradient.

        Args:
            contributions: What every rank has announced.
            steady: Whether shards stay where they are and ranks are not being timed, so that the next sum is likely to
                equal this one in form, and early sending disturbs nothing.
            audit: What the sum is compared with, on all ranks; None to compute it once.
        """
        partials, self.partials = self.partials, []
        found, self._summed = self._summed, None
        is_small = False
        if self._was_wrong:
            self._repeats_needed = min(2 * self._repeats_needed, MAX_REPEATS)
            self._was_wrong = False
        # Every rank takes the same way here, because each condition depends only on what was sent to all.
        if found is None and audit is None:
            found = self._small.add_up(partials, contributions, self._like)
            is_small = found is not None
        if found is None:
            self._small.grow(contributions, self._like, limit=self._limit)
            found = self._communicator.sum_partials(partials, contributions, self._like, audit=audit)
        # Sending what fits into the message early would gain nothing.
        known = None if self._key is None or is_small else Prediction(self._key, contributions, self._like)
        self._predict(known, steady=steady)
        return found

    def reset_prediction(self) -> None:
        """Predict no sum after an exchange for something else, which says nothing about predictions."""
        self._was_wrong = False
        self._predict(None, steady=False)

    def _predict(self, found: Prediction | None, *, steady: bool) -> None:
        """Predict the next sum by the last one; None for one after which nothing can be predicted."""
        last = self._last
        # Whether a sum can be sent early is only checked when it differs from the last one, to save time.
        is_known = found is not None and last is not None and found == last and found.like is last.like
        if found is not None and not is_known:
            found = found if found.can_be_sent_early and self._communicator.sends_early else None
        self._repeats = self._repeats + 1 if found is not None and found == last else 1
        self._last = found
        self._prediction = found if steady and self._repeats >= self._repeats_needed else None


def merge_devices(devices: Sequence[Sequence[PartialSum]], share: RankShare, device: torch.device) -> list[PartialSum]:
    """Sum the partial sums of this rank's devices, as far as that does not involve other ranks.

    Args:
        devices: The partial sums of each device.
        share: The shards of this rank.
        device: The device that the result is on.
    """
    if len(devices) == 1 and len(devices[0]) == 1:
        return [*devices[0]]
    moved = devices if len(devices) == 1 else (move_partials(partials, device) for partials in devices)
    return share.merged(chain.from_iterable(moved))
