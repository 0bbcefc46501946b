"""Turn the partial sums of this process into the sum over ranks.

Plainly that takes two round trips: the ranks tell each other which partial sums each has, in the control
message of the attempt, and then sum. Two heuristics save time on the way, each by itself: gradients are sent
while backward still computes others (`overlap`), or inside of the control message (`inline`). Both are behind
this one interface, no bit of a sum depends on them, and with both switched off only the plain way is left.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from lockstep.communicators import Communicator, Contribution, Table
from lockstep.replicas import move_partials
from lockstep.tree import PartialSum, ShardSum, Tensors
from lockstep.updaters.compute import RankShare
from lockstep.updaters.ranks.inline import SMALL, SMALL_BETWEEN_MACHINES, InlineGradients
from lockstep.updaters.ranks.overlap import EarlySend, Overlap, Prediction

_COMPACT: Final = json.JSONEncoder(separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class Heuristics:
    """Which ways to save time between ranks are used; the same on all ranks.

    Attributes:
        early_sending: Send gradients during backward, where the last updates predict what there will be.
        inline_gradients: Send small gradients inside of the control message.
    """

    early_sending: bool = True
    inline_gradients: bool = True


DEFAULTS: Final = Heuristics()
"""What updaters use; docs/communication.md has the measurements behind it."""


class RankSum:
    """Sums over ranks; the steps of one sum are `begin`, `announce`, `exchange` and `sum`.

    Args:
        communicator: Joins the ranks.
        heuristics: See `Heuristics`.
        one_machine: Whether all ranks are on one machine.
    """

    def __init__(self, communicator: Communicator, heuristics: Heuristics, *, one_machine: bool) -> None:
        self._communicator = communicator
        self._early = Overlap(communicator) if heuristics.early_sending else None
        self._inline = None
        if heuristics.inline_gradients:
            limit = SMALL if one_machine else SMALL_BETWEEN_MACHINES
            self._inline = InlineGradients(communicator.rank, communicator.size, limit)
        self._no_table = Table(communicator.size)
        self._like: Sequence[torch.Tensor] = ()
        self._key: str | None = None
        self._send: EarlySend | None = None
        self._partials: list[PartialSum] = []

    def begin(self, key: str | None, share: RankShare, like: Sequence[torch.Tensor]) -> EarlySend | None:
        """Begin a sum, before the gradients are computed.

        Args:
            key: Which computation of which batches it is; None where its partial sums cannot be sent before
                they are complete.
            share: The shards of this rank.
            like: Tensors of the shapes, dtypes and devices of the gradients.

        Returns:
            What takes the gradients while backward makes them; None where nothing does.
        """
        self._key, self._like, self._send = key, like, None
        if self._early is not None and key is not None:
            self._send = self._early.begin(key, share, like)
        return self._send

    def announce(self, devices: Sequence[Sequence[PartialSum]], share: RankShare) -> Contribution:
        """Take over this rank's partial sums, and describe them for the other ranks.

        Args:
            devices: The partial sums of each device.
            share: The shards of this rank.
        """
        send, self._send = self._send, None
        if send is not None and send.has_begun:
            self._partials = []  # they are on their way
            return send.announced
        self._partials = merge_devices(devices, share, self._like[0].device)
        contribution = Contribution.of(self._partials)
        if self._inline is not None:
            self._inline.pack(self._partials, contribution, self._like)
        return contribution

    def exchange(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Send a control message to every rank, and return those of all.

        Every message goes this way, for what the heuristics have under way ends with it on all ranks.
        """
        early, inline = self._early, self._inline
        if early is not None:
            message = {**message, "early": early.close()}
        # A table with room travels even where it is empty, or a rank would wait for what does not come.
        table = self._no_table if inline is None else inline.table
        said = self._communicator.exchange_with(_COMPACT.encode(message).encode(), table)
        messages = list(map(json.loads, said))
        if early is not None:
            early.settle()
        return messages

    def must_repeat(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Tell whether all ranks must compute their shares again, for some were sent early in vain."""
        return self._early is not None and self._early.judge([each["early"] for each in messages])

    def sum(self, contributions: tuple[Contribution, ...], *, steady: bool) -> Tensors:
        """Return the sum over ranks, one entry for each parameter; None where no rank has a gradient.

        Args:
            contributions: What every rank has announced.
            steady: Whether the next sum may be expected to be like this one.
        """
        partials, self._partials = self._partials, []
        like, early, inline = self._like, self._early, self._inline
        found = None if early is None else early.take()
        is_inline = False
        if found is None and inline is not None:
            found = inline.sum(partials, contributions, like)
            is_inline = found is not None
        if found is None:
            found = self._communicator.sum_partials(partials, contributions, like)
        if early is not None:
            # What is sent inside of the message comes no later than what is sent before it.
            known = None if self._key is None or is_inline else Prediction(self._key, contributions, like)
            early.learn(known, steady=steady)
        return found

    def reset_prediction(self) -> None:
        """Expect no sum like the last: the ranks have met for something else."""
        if self._early is not None:
            self._early.learn(None)


def merge_devices(devices: Sequence[Sequence[PartialSum]], share: RankShare, device: torch.device) -> list[PartialSum]:
    """Add up the partial sums of this rank's devices as far as that needs none of another rank.

    Args:
        devices: The partial sums of each of them.
        share: The shards of this rank.
        device: Where the sums are to be.
    """
    if len(devices) == 1 and len(devices[0]) == 1:
        return [*devices[0]]
    merged = ShardSum(share.first)
    for partials in devices:
        for partial in partials if len(devices) == 1 else move_partials(partials, device):
            merged.push(partial.shard, partial.tensors)
    merged.merge_complete(share.stop)
    return merged.partials
