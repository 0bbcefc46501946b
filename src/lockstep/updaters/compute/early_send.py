"""Send the gradients of a predicted sum while backward still computes others."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from lockstep.communicators import Contribution, PendingSum
from lockstep.tree import PartialSum, ShardSum
from lockstep.updaters.compute.merging import on_gradients
from lockstep.updaters.compute.shares import RankShare


class EarlySend:
    """Sends the gradients of one rank to a pending sum as soon as all of its devices have computed them.

    Args:
        pending: The pending sum.
        announced: What this rank is expected to contribute.
        share: The shards of this rank.
    """

    def __init__(self, pending: PendingSum, announced: Contribution, share: RankShare) -> None:
        self._pending = pending
        self.announced = announced
        self._share = share
        self._lock = threading.Lock()
        self._num_devices = sum(map(bool, share.shards_by_device))
        self._given: dict[int, dict[int, list[PartialSum]]] = {}
        """What devices have given of each parameter that was not sent yet, by its index and that of the device."""
        for mask in announced.present:
            self._given.update({index: {} for index in range(mask.bit_length()) if mask >> index & 1})
        self.indices = frozenset(self._given)
        """The indices of the parameters that were announced."""
        self.has_begun = False
        """Whether a device has given something, so that its partial sums are no longer intact."""
        self.is_spoiled = False
        """Whether something else was computed than was announced."""

    @property
    def is_complete(self) -> bool:
        """Whether everything was sent as it was announced."""
        return self.has_begun and not self.is_spoiled and not self._given

    def add(self, index: int, place: int, partials: list[PartialSum]) -> None:
        """Add what a device has of one parameter, and send the sum once all devices have added theirs.

        Args:
            index: The index of the parameter.
            place: The index of the device.
            partials: Its partial sums, of one tensor each.
        """
        # Set before the check: the additions may already have changed sums in place.
        self.has_begun = True
        with self._lock:
            given = self._given.get(index)
            if given is None or place in given:
                # The device has run its shards again.
                self.is_spoiled = True
                return
            given[place] = partials
            if len(given) < self._num_devices:
                return
            # The same tree as without early sending, for one parameter, so the bits are the same.
            sums = ShardSum(self._share.start)
            for at in sorted(given):
                for each in given.pop(at):
                    sums.push(each.shard, each.tensors)
            sums.merge_complete(self._share.stop)
            tensors = [each.tensors[0] for each in sums.partials]
            if self._is_announced(index, [each.shard for each in sums.partials], tensors):
                del self._given[index]
                self._pending.add(index, tensors)
            else:
                self.is_spoiled = True

    def _is_announced(self, index: int, shards: Sequence[int], tensors: Sequence[torch.Tensor | None]) -> bool:
        """Check whether the partial sums of one tensor are those that all ranks expect."""
        return tuple(shards) == self.announced.shards and all(
            (tensor is not None) == bool(mask >> index & 1) and not (tensor is not None and tensor.is_sparse)
            for tensor, mask in zip(tensors, self.announced.present, strict=True)
        )


class DeviceSend:
    """Passes the gradients of one device to the early sending of its rank, in backward of the last shard of the device.

    Args:
        send: The early sending of the rank.
        place: The index of the device.
        shard: The number of the shard.
        earlier: The partial sums of the shards before it.
    """

    def __init__(self, send: EarlySend, place: int, shard: int, earlier: list[PartialSum]) -> None:
        self._send, self._place, self._shard, self._earlier = send, place, shard, earlier
        self._missing = set(send.indices)
        self._has_given = False
        self._error: BaseException | None = None

    @contextmanager
    def sending(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Pass on each gradient that backward computes inside the ``with`` block.

        Args:
            parameters: The parameters that may get a gradient.
        """
        # Earlier shards have reached a parameter that was not announced: the sum would lack its gradient.
        reached = (index for each in self._earlier for index, tensor in enumerate(each.tensors) if tensor is not None)
        if not self._missing.issuperset(reached):
            self._send.is_spoiled = True
        with on_gradients([(index, parameters[index]) for index in self._missing], self._on_gradient):
            yield
        # Raised here and not in the hook, where it would be reported as an error of the user's model.
        if self._error is not None:
            raise self._error

    def _on_gradient(self, index: int, parameter: torch.Tensor) -> None:
        """Pass on a gradient; called by backward, which must not see errors of the transfer."""
        if self._send.is_spoiled:
            return
        # A nested backward, as in reentrant checkpointing, has added to a gradient that is already being sent.
        if index not in self._missing:
            self._send.is_spoiled = True
            return
        try:
            self._give(index, parameter.grad)
            # The memory of the sum is that of an earlier shard, where there is one.
            parameter.grad = None
        except BaseException as error:  # noqa: BLE001 - raised again once backward is over
            self._send.is_spoiled, self._error = True, error

    def _give(self, index: int, gradient: torch.Tensor | None) -> None:
        """Pass on what this device has of one parameter."""
        self._has_given = True
        self._missing.discard(index)
        partials = [PartialSum(each.shard, [each.tensors[index]]) for each in self._earlier]
        for each in self._earlier:
            each.tensors[index] = None
        self._send.add(index, self._place, [*partials, PartialSum(self._shard, [gradient])])

    def finish(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Pass on the sums of parameters that earlier shards reached and backward of this one did not.

        Args:
            gradients: The gradients that backward has left, one per parameter.

        Returns:
            Whether the partial sums are no longer intact. If nothing was given, the device adds to its sums as usual.
        """
        if not self._has_given:
            return False
        for index, gradient in enumerate(gradients):
            if index in self._missing:
                if not self._send.is_spoiled:
                    self._give(index, gradient)
            # A gradient that was not announced, or that was added after it had been sent.
            elif gradient is not None:
                self._send.is_spoiled = True
        return True
