"""Send gradients while backward still computes others, where recent updates predict what there will be to send.

Ranks can only sum what they know about, and they describe their partial sums to each other only after backward. So this
module predicts: two equal reductions in a row are followed by a third. All ranks make the same prediction, because they
predict from what was sent to all. From a prediction until the next message, every rank takes part in one pending sum. A
rank that fails, or that has something else than predicted, contributes zeros, so no rank waits. If any rank did so, the
ranks that have sent their gradients compute them again.
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
        """Whether every rank contributes something, all of it dense and on the host, where threads send it."""
        return (
            all(any(each.present) for each in self.contributions)
            and not any(each.sparse for each in self.contributions)
            and all(tensor.device.type == "cpu" for tensor in self.like)
        )


class Overlap:
    """Predicts reductions, and sends gradients to a pending sum.

    Args:
        communicator: The communicator of the run.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._last: Prediction | None = None
        self._repeats = 0
        self._repeats_needed = REPEATS_BEFORE_PREDICTION
        self._prediction: Prediction | None = None
        self._pending: PendingSum | None = None
        self._early_send: EarlySend | None = None
        self._was_predicted = False
        self._summed: Tensors | None = None

    def observe(self, found: Prediction | None, *, steady: bool = True) -> None:
        """Record a reduction that all ranks have made, and predict the next one.

        Args:
            found: The reduction; None for one after which nothing can be predicted.
            steady: Whether shards stay where they are and ranks are not being timed, which early sending would disturb.
        """
        last = self._last
        # Whether a reduction can be sent early is only checked when it differs from the last one, to save time.
        is_known = found == last and found is not None and last is not None and found.like is last.like
        if found is not None and not is_known and not found.can_be_sent_early:
            found = None
        self._repeats = self._repeats + 1 if found is not None and found == last else 1
        self._last = found
        self._prediction = found if steady and self._repeats >= self._repeats_needed else None

    def begin_predicted(self, key: str, share: RankShare, like: Sequence[torch.Tensor]) -> EarlySend | None:
        """Begin the predicted sum, if it is the one that is about to be computed.

        Args:
            key: Identifies the computation and the sizes of its batches.
            share: The shards of this rank.
            like: Tensors with the shapes, dtypes and devices of the gradients.

        Returns:
            The receiver of this rank's gradients; None if another sum was predicted, or none.
        """
        prediction = self._prediction
        if prediction is None or prediction.key != key or prediction.like is not like:
            return None
        self._pending = self._communicator.begin_sum(prediction.contributions, like)
        announced = prediction.contributions[self._communicator.rank]
        self._early_send = EarlySend(self._pending, announced, share)
        return self._early_send

    def end_prediction(self) -> str:
        """Ensure that no rank waits for gradients of this rank; called before every message.

        Returns:
            The state of the gradients: `KEPT`, `SENT` or `SPOILED`.
        """
        prediction, send, pending = self._prediction, self._early_send, self._pending
        self._prediction = self._early_send = self._summed = None
        self._was_predicted = prediction is not None
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

    def wait(self) -> None:
        """Wait for the sum that was begun, if any; called after every message."""
        pending, self._pending = self._pending, None
        # Also where another rank has contributed zeros: the transfers must end before the next sum begins.
        if pending is not None:
            self._summed = pending.finish()

    def must_repeat(self, fates: Sequence[str]) -> bool:
        """Return whether all ranks must compute their shares again, because some have sent theirs in vain.

        Args:
            fates: The state of the gradients of each rank, as `end_prediction` returns it.
        """
        kept, sent = fates.count(KEPT), fates.count(SENT)
        if sent == len(fates):
            return False
        # Some rank has contributed zeros, or nothing was predicted.
        self._summed = None
        if self._was_predicted:
            self._repeats_needed = min(2 * self._repeats_needed, MAX_REPEATS)
        # Ranks that kept their sums could go on, but not alone: all ranks repeat the attempt together.
        return kept < len(fates)

    def pop_sums(self) -> Tensors | None:
        """Return the sums if they have arrived already, and forget them."""
        summed, self._summed = self._summed, None
        return summed


class EarlySend:
    """Sends the gradients of one rank to a pending sum while backward of its last shard computes them.

    It implements `EarlyReceiver`, the protocol that `shard_gradients` uses.

    Args:
        pending: The pending sum.
        announced: What this rank is expected to contribute.
        share: The shards of this rank.
    """

    def __init__(self, pending: PendingSum, announced: Contribution, share: RankShare) -> None:
        self._pending = pending
        self.announced = announced
        self._share = share
        self._earlier: list[PartialSum] = []
        self._shard = 0
        self._missing = set[int]()
        self._spoiled = False
        self._error: BaseException | None = None
        self.has_begun = False
        """Whether anything was sent, so that the partial sums are no longer intact."""
        for mask in announced.present:
            self._missing.update(index for index in range(mask.bit_length()) if mask >> index & 1)

    @property
    def is_complete(self) -> bool:
        """Whether everything was sent as it was announced."""
        return self.has_begun and not self._spoiled and not self._missing

    @contextmanager
    def sending(self, shard: int, earlier: list[PartialSum], parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Send each gradient that backward computes inside the ``with`` block, which must be that of the last shard.

        Args:
            shard: The number of the shard.
            earlier: The partial sums of the shards before it.
            parameters: The parameters that may get a gradient.
        """
        self._earlier, self._shard = earlier, shard
        # Earlier shards have reached a parameter that was not announced: the sum would lack its gradient.
        self._spoiled = any(
            tensor is not None and index not in self._missing
            for each in earlier
            for index, tensor in enumerate(each.tensors)
        )
        handles = [
            _register_gradient_hook(parameters[index], partial(self._on_gradient, index))
            for index in self._missing
            if parameters[index].requires_grad
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        # Raised here and not in the hook, where it would be reported as an error of the user's model.
        if self._error is not None:
            raise self._error

    def _on_gradient(self, index: int, parameter: torch.Tensor) -> None:
        """Send a gradient; called by backward, which must not see errors of the transfer."""
        if self._spoiled:
            return
        # A nested backward, as in reentrant checkpointing, has added to a gradient that is already being sent.
        if index not in self._missing:
            self._spoiled = True
            return
        try:
            self._send(index, parameter.grad)
            # The memory of the sum is that of an earlier shard, where there is one.
            parameter.grad = None
        except BaseException as error:  # noqa: BLE001 - raised again once backward is over
            self._spoiled, self._error = True, error

    def _send(self, index: int, gradient: torch.Tensor | None) -> None:
        """Add a gradient to the sums of the earlier shards, and send the result."""
        # The same tree as without early sending, for one parameter, so the bits are the same.
        sums = ShardSum(self._share.start)
        for each in self._earlier:
            sums.push(each.shard, [each.tensors[index]])
            each.tensors[index] = None
        sums.push(self._shard, [gradient])
        sums.merge_complete(self._share.stop)
        tensors = [each.tensors[0] for each in sums.partials]
        # Set before the check: `push` may already have added to the earlier sums in place.
        self.has_begun = True
        if not self._is_announced(index, [each.shard for each in sums.partials], tensors):
            self._spoiled = True
            return
        self._missing.discard(index)
        self._pending.add(index, tensors)

    def _is_announced(self, index: int, shards: Sequence[int], tensors: Sequence[torch.Tensor | None]) -> bool:
        """Check whether the partial sums of one tensor are those that all ranks expect."""
        return tuple(shards) == self.announced.shards and all(
            (tensor is not None) == bool(mask >> index & 1) and not (tensor is not None and tensor.is_sparse)
            for tensor, mask in zip(tensors, self.announced.present, strict=True)
        )

    def finish(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Send the sums of parameters that earlier shards reached and backward of the last one did not.

        Args:
            gradients: The gradients that backward of the last shard has computed, one per parameter.

        Returns:
            Whether the partial sums are no longer intact.
        """
        # Nothing was sent, so the device adds to its sums as usual and they can still be kept.
        if not self.has_begun:
            return False
        for index, gradient in enumerate(gradients):
            if index in self._missing:
                if not self._spoiled:
                    self._send(index, gradient)
            # A gradient that was not announced, or that was added after it had been sent.
            elif gradient is not None:
                self._spoiled = True
        return True


def _register_gradient_hook(parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Register a hook that is called whenever backward has added to a parameter's gradient."""
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]  # torch's gap
    return handle
