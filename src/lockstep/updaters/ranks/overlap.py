"""Send gradients while backward still computes others, where the last updates predict what there will be.

A sum over ranks needs to know what each of them brings before the first number travels, and the ranks say
so only when they meet, after backward. So this predicts: two reductions in a row that were alike are followed
by a third. All ranks predict the same, for they predict from what all were told. From a prediction to the
next message every rank takes part in one pending sum: one that fails or has something else brings zeros for
it, so none waits. If any rank had something else, those that gave away what they had compute it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lockstep.communicators import Communicator, Contribution, PendingSum
from lockstep.tree import PartialSum, ShardSum, Tensors
from lockstep.updaters.compute import RankShare

PATIENCE: Final = 2
"""Alike reductions in a row before the first prediction; twice as many after each wrong one."""
LONGEST: Final = 1024
"""The most that are asked for."""

KEPT: Final = "kept"
GIVEN: Final = "given"
SPOILED: Final = "spoiled"
"""What a rank did with its partial sums: they are all its own, all in the pending sum, or neither."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the next reduction is expected to be.

    Attributes:
        key: Which computation of which batches.
        contributions: What every rank brings.
        like: Tensors of the shapes, dtypes and devices of the gradients.
    """

    key: str
    contributions: tuple[Contribution, ...]
    like: Sequence[torch.Tensor] = field(compare=False)

    @property
    def can_be_sent_early(self) -> bool:
        """Whether every rank brings something, all of it dense and on the host, where threads send it."""
        return (
            all(any(each.present) for each in self.contributions)
            and not any(each.sparse for each in self.contributions)
            and all(tensor.device.type == "cpu" for tensor in self.like)
        )


class Overlap:
    """Predicts reductions, and brings gradients to a pending sum.

    Args:
        communicator: Joins the ranks.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._last: Prediction | None = None
        self._alike = 0
        self._patience = PATIENCE
        self._prediction: Prediction | None = None
        self._pending: PendingSum | None = None
        self._send: EarlySend | None = None
        self._tried = False
        self._summed: Tensors | None = None

    def learn(self, found: Prediction | None, *, steady: bool = True) -> None:
        """Take note of a reduction that all ranks made, and predict the next one.

        Args:
            found: The reduction; None for one that tells nothing of the next.
            steady: Whether shards stay where they are, and nobody times them, which sending would disturb.
        """
        last = self._last
        is_known = found == last and found is not None and last is not None and found.like is last.like
        if found is not None and not is_known and not found.can_be_sent_early:
            found = None
        self._alike = self._alike + 1 if found is not None and found == last else 1
        self._last = found
        self._prediction = found if steady and self._alike >= self._patience else None

    def begin(self, key: str, share: RankShare, like: Sequence[torch.Tensor]) -> EarlySend | None:
        """Begin the sum that was predicted, if this is it.

        Args:
            key: Which computation of which batches is to come.
            share: The shards of this rank.
            like: Tensors of the shapes, dtypes and devices of the gradients.
        """
        prediction = self._prediction
        if prediction is None or prediction.key != key or prediction.like is not like:
            return None
        self._pending = self._communicator.begin_sum(prediction.contributions, like)
        announced = prediction.contributions[self._communicator.rank]
        self._send = EarlySend(self._pending, announced, share)
        return self._send

    def close(self) -> str:
        """Make sure that no rank waits for this one's gradients; called before every message.

        Returns:
            What became of them.
        """
        prediction, send, pending = self._prediction, self._send, self._pending
        self._prediction = self._send = self._summed = None
        self._tried = prediction is not None
        if prediction is None or (send is not None and send.is_whole):
            return KEPT if prediction is None else GIVEN
        self._pending = None
        if pending is None:
            pending = self._communicator.begin_sum(prediction.contributions, prediction.like)
        pending.abandon()
        return SPOILED if send is not None and send.has_begun else KEPT

    def settle(self) -> None:
        """Wait for the sum that was begun, if there is one; called after every message."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._summed = pending.finish()

    def judge(self, fates: Sequence[str]) -> bool:
        """Tell whether all ranks must compute their shares again, for some have given theirs away in vain.

        Args:
            fates: What became of each rank's gradients.
        """
        kept, given = fates.count(KEPT), fates.count(GIVEN)
        if given == len(fates):
            return False
        self._summed = None
        if self._tried:
            self._patience = min(2 * self._patience, LONGEST)
        return kept < len(fates)

    def take(self) -> Tensors | None:
        """Return the sums, if they are there already."""
        summed, self._summed = self._summed, None
        return summed


class EarlySend:
    """Brings the gradients of one rank to a pending sum, as backward of its last shard makes them.

    To `shard_gradients` it is an `EarlyReceiver`.

    Args:
        pending: The sum.
        announced: What this rank is to bring.
        share: The shards of this rank.
    """

    def __init__(self, pending: PendingSum, announced: Contribution, share: RankShare) -> None:
        self._pending = pending
        self.announced = announced
        self._share = share
        self._before: list[PartialSum] = []
        self._shard = 0
        self._brought: dict[int, torch.Tensor | None] = {}
        self._left = set[int]()
        self._spoiled = False
        self._error: BaseException | None = None
        self.has_begun = False
        """Whether anything was brought, so that the partial sums are no longer what they were."""
        for mask in announced.present:
            self._left.update(index for index in range(mask.bit_length()) if mask >> index & 1)

    @property
    def is_whole(self) -> bool:
        """Whether everything was brought as it was announced."""
        return self.has_begun and not self._spoiled and not self._left

    @contextmanager
    def watching(self, shard: int, before: list[PartialSum], parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Bring what backward makes inside of the ``with``, which is that of this rank's last shard.

        Args:
            shard: Its number.
            before: The partial sums of the shards before it.
            parameters: Those that may get a gradient.
        """
        self._before, self._shard = before, shard
        self._spoiled = any(
            tensor is not None and index not in self._left
            for each in before
            for index, tensor in enumerate(each.tensors)
        )
        handles = [
            _after(parameters[index], partial(self._made, index))
            for index in self._left
            if parameters[index].requires_grad
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        if self._error is not None:
            raise self._error

    def _made(self, index: int, parameter: torch.Tensor) -> None:
        """Bring a gradient; called by backward, which is to know nothing of errors in here."""
        if self._spoiled:
            return
        if index not in self._left:
            self._spoiled = True  # backward inside of backward has added to what is on its way
            return
        try:
            self._bring(index, parameter.grad)
        except BaseException as error:  # noqa: BLE001 - raised again once backward is over
            self._spoiled, self._error = True, error

    def _bring(self, index: int, gradient: torch.Tensor | None) -> None:
        """Add a gradient to what the shards before it came to, and bring that."""
        sums = ShardSum(self._share.first)
        for each in self._before:
            sums.push(each.shard, [each.tensors[index]])
        sums.push(self._shard, [gradient])
        sums.merge_complete(self._share.stop)
        tensors = [each.tensors[0] for each in sums.partials]
        self.has_begun = True
        if not self._is_announced(index, [each.shard for each in sums.partials], tensors):
            self._spoiled = True
            return
        self._left.discard(index)
        self._brought[index] = gradient
        self._pending.bring(index, tensors)

    def _is_announced(self, index: int, shards: Sequence[int], tensors: Sequence[torch.Tensor | None]) -> bool:
        """Tell whether partial sums of one tensor are those that all ranks expect."""
        return tuple(shards) == self.announced.shards and all(
            (tensor is not None) == bool(mask >> index & 1) and not (tensor is not None and tensor.is_sparse)
            for tensor, mask in zip(tensors, self.announced.present, strict=True)
        )

    def end(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Bring what backward of the last shard did not reach, but shards before it did.

        Args:
            gradients: What it has made.

        Returns:
            Whether the partial sums are no longer what they were.
        """
        if not self.has_begun:
            return False
        for index, gradient in enumerate(gradients):
            if index in self._left:
                if not self._spoiled:
                    self._bring(index, gradient)
            elif self._brought.get(index) is not gradient:
                self._spoiled = True  # one that was not announced, or was exchanged after it had been brought
        return True


def _after(parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Have a hook called whenever backward has added to a parameter's gradient."""
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]  # torch's gap
    return handle
