"""Send the gradients of a predicted sum while backward still computes others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from lockstep.communicators import Contribution, PendingSum
from lockstep.tree import PartialSum, ShardSum
from lockstep.updaters.compute.merging import on_gradients
from lockstep.updaters.compute.shares import RankShare


class EarlySend:
    """Sends the gradients of one rank to a pending sum while backward of its last shard computes them.

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
        with on_gradients([(index, parameters[index]) for index in self._missing], self._on_gradient):
            yield
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
