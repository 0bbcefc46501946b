"""Compute the sum over ranks from the partial sums of each process.

Without heuristics this takes two round trips: the ranks describe their partial sums to each other in the control
message of the attempt, and then sum. Two independent heuristics save time: gradients are sent while backward still
computes others (`overlap`), or inside the control message (`inline`). Both are hidden behind this interface, and
neither changes the result.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from lockstep.communicators import Communicator, Contribution, MessageTable
from lockstep.replicas import move_partials
from lockstep.tree import PartialSum, ShardSum, Tensors
from lockstep.updaters.compute import RankShare
from lockstep.updaters.ranks.inline import INLINE_BYTES, INLINE_BYTES_OVER_NETWORK, InlineGradients
from lockstep.updaters.ranks.overlap import EarlySend, Overlap, Prediction

_COMPACT: Final = json.JSONEncoder(separators=(",", ":"))
_DECODER: Final = json.JSONDecoder()  # `json.loads` finds out the encoding first


@dataclass(frozen=True, slots=True)
class Heuristics:
    """The optimizations that are used between ranks; the same on all ranks.

    Attributes:
        early_sending: Whether to send gradients during backward, where recent updates predict them.
        inline_gradients: Whether to send small gradients inside the control message.
    """

    early_sending: bool = True
    inline_gradients: bool = True


DEFAULTS: Final = Heuristics()
"""The heuristics that updaters use; docs/communication-speed.md has the measurements behind this choice."""


class RankSum:
    """Sums gradients over ranks; the steps of one sum are `begin_sum`, `announce`, `exchange` and `sum`.

    Args:
        communicator: The communicator of the run.
        heuristics: The optimizations to use.
        one_machine: Whether all ranks are on one machine.
    """

    def __init__(self, communicator: Communicator, heuristics: Heuristics, *, one_machine: bool) -> None:
        self._communicator = communicator
        self._early = Overlap(communicator) if heuristics.early_sending else None
        self._inline = None
        if heuristics.inline_gradients:
            limit = INLINE_BYTES if one_machine else INLINE_BYTES_OVER_NETWORK
            self._inline = InlineGradients(communicator.rank, communicator.size, limit)
        self._no_table = MessageTable(communicator.size)
        self._like: Sequence[torch.Tensor] = ()
        self._key: str | None = None
        self._early_send: EarlySend | None = None
        self._partials: list[PartialSum] = []

    def begin_sum(self, key: str | None, share: RankShare, like: Sequence[torch.Tensor]) -> EarlySend | None:
        """Begin a sum, before the gradients are computed.

        Args:
            key: Identifies the computation and the sizes of its batches; None where partial sums cannot be sent before
                they are complete.
            share: The shards of this rank.
            like: Tensors with the shapes, dtypes and devices of the gradients.

        Returns:
            The receiver of gradients during backward; None if there is none.
        """
        self._key, self._like, self._early_send = key, like, None
        if self._early is not None and key is not None:
            self._early_send = self._early.begin_predicted(key, share, like)
        return self._early_send

    def announce(self, devices: Sequence[Sequence[PartialSum]], share: RankShare) -> Contribution:
        """Store this rank's partial sums, and return their description for the other ranks.

        Args:
            devices: The partial sums of each device.
            share: The shards of this rank.
        """
        send, self._early_send = self._early_send, None
        if send is not None and send.has_begun:
            # The partial sums have been sent already, or were spoiled on the way and will be computed again.
            self._partials = []
            return send.announced
        self._partials = merge_devices(devices, share, self._like[0].device)
        contribution = Contribution.of(self._partials)
        if self._inline is not None:
            self._inline.pack(self._partials, contribution, self._like)
        return contribution

    def exchange(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Send a control message to every rank, and return the messages of all ranks.

        All messages use this method, because the transfers of the heuristics end with each message on all ranks.

        Args:
            message: The message of this rank.
        """
        early, inline = self._early, self._inline
        # Before the message: a rank that has it may rely on all early sums being complete or abandoned.
        if early is not None:
            message = {**message, "early": early.end_prediction()}
        # A table is sent even if this rank's body is empty: all ranks must take part in the same transfers.
        table = self._no_table if inline is None else inline.table
        replies = self._communicator.exchange_with_table(_COMPACT.encode(message).encode(), table)
        messages = [_DECODER.decode(each.decode()) for each in replies]
        if early is not None:
            early.wait()
        return messages

    def must_repeat(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether all ranks must compute their shares again, because some were sent early in vain.

        Args:
            messages: The messages of all ranks.
        """
        return self._early is not None and self._early.must_repeat([each["early"] for each in messages])

    def sum(self, contributions: tuple[Contribution, ...], *, steady: bool) -> Tensors:
        """Return the sum over ranks, one entry per parameter; None where no rank has a gradient.

        Args:
            contributions: What every rank has announced.
            steady: Whether the next sum is likely to equal this one in form.
        """
        partials, self._partials = self._partials, []
        like, early, inline = self._like, self._early, self._inline
        # Every rank takes the same way here, because each condition depends only on what was sent to all.
        found = None if early is None else early.pop_sums()
        is_inline = False
        if found is None and inline is not None:
            found = inline.sum(partials, contributions, like)
            is_inline = found is not None
        if found is None:
            found = self._communicator.sum_partials(partials, contributions, like)
        if early is not None:
            # A sum that fits into the message gains nothing from early sending, so it is not predicted.
            known = None if self._key is None or is_inline else Prediction(self._key, contributions, like)
            early.observe(known, steady=steady)
        return found

    def reset_prediction(self) -> None:
        """Predict no sum after an exchange for something else."""
        if self._early is not None:
            self._early.observe(None)


def merge_devices(devices: Sequence[Sequence[PartialSum]], share: RankShare, device: torch.device) -> list[PartialSum]:
    """Sum the partial sums of this rank's devices, as far as that does not involve other ranks.

    Args:
        devices: The partial sums of each device.
        share: The shards of this rank.
        device: The device that the result is on.
    """
    if len(devices) == 1 and len(devices[0]) == 1:
        return [*devices[0]]
    # The limits keep subtrees open that contain shards of other ranks: adding them up here would change the bits.
    merged = ShardSum(share.start)
    for partials in devices:
        for partial in partials if len(devices) == 1 else move_partials(partials, device):
            merged.push(partial.shard, partial.tensors)
    merged.merge_complete(share.stop)
    return merged.partials
