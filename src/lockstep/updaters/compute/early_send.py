"""Use gradients while backward still computes others: send those of a predicted sum, or add them to earlier shards.

Large gradients are added to the sums of earlier shards at once, so that fewer are held.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Final, TypeAlias

import torch
from torch import nn

from lockstep.communicators import Contribution, PendingSum
from lockstep.replicas import move_partials
from lockstep.tree import PartialSum, ShardSum
from lockstep.updaters.compute.shares import RankShare

LARGE: Final = 2**18
"""Elements. The call of a hook takes longer than it takes to add a smaller tensor."""


def can_be_merged(parameter: torch.Tensor) -> bool:
    """Return whether it pays to add the gradient of a parameter to the sums during backward.

    Args:
        parameter: The parameter.
    """
    return parameter.numel() >= LARGE and parameter.device.type == "cpu" and parameter.requires_grad


@contextmanager
def on_gradients(
    parameters: Sequence[tuple[int, nn.Parameter]], call: Callable[[int, torch.Tensor], None]
) -> Iterator[None]:
    """Call a function with an index and its parameter whenever backward has added to the gradient.

    Args:
        parameters: The parameters, each with its index; those that require no gradient are left out.
        call: The function.
    """
    handles = [
        each.register_post_accumulate_grad_hook(partial(call, index))  # type: ignore[no-untyped-call]  # torch's gap
        for index, each in parameters
        if each.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class GradientMerge:
    """Adds the gradients of one shard to the sums of a device, one parameter after another, and frees them.

    Args:
        sums: The sums of the device, to which the shard is pushed when its backward is over.
        shard: The number of the shard.

    Attributes:
        spoiled: Whether backward has added to a gradient that was merged already, as nested backwards may, so that the
            sum has another order.

    Determinism: the additions are those of `ShardSum.push`, in the same order for every parameter.
    """

    def __init__(self, sums: ShardSum, shard: int) -> None:
        self.spoiled = False
        self._merged: set[int] = set()
        if len(sums.partials) > 1:
            # Complete before the shard begins, as in `push`.
            sums.merge_complete(shard)
        # The sums that are added to when the shard is pushed, from the last to the first.
        self._chain: list[PartialSum] = sums.partials[sums.count_after(shard) - 1 :][::-1]

    @contextmanager
    def merging(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Return a context for the backward of the shard.

        Args:
            parameters: The parameters that may get a gradient, in the order of the sums.
        """
        chosen = enumerate(parameters) if self._chain else ()
        with on_gradients([(index, each) for index, each in chosen if can_be_merged(each)], self._merge):
            yield

    @torch.no_grad()
    def _merge(self, index: int, parameter: torch.Tensor) -> None:
        """Add a gradient to the sums; called by backward."""
        gradient = parameter.grad
        self.spoiled |= index in self._merged
        if gradient is None or gradient.is_sparse or any(_is_sparse(each.tensors[index]) for each in self._chain):
            return
        self._merged.add(index)
        parameter.grad = None
        for each in self._chain:
            left, each.tensors[index] = each.tensors[index], None
            gradient = gradient if left is None else left.add_(gradient)
        self._chain[-1].tensors[index] = gradient


def _is_sparse(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.is_sparse


HOST: Final = torch.device("cpu")

Given: TypeAlias = "tuple[list[PartialSum], torch.device, torch.Event | None]"
"""What a device has of one parameter, where, and the event after which another stream can read it; None on CPUs."""


class EarlySend:
    """Sends the gradients of one rank to a pending sum as soon as all of its devices have computed them.

    Args:
        pending: The pending sum.
        announced: What this rank is expected to contribute.
        share: The shards of this rank.
        home: The device of the sums.
        streams: The streams on which what several devices have given is merged, by device. They are added here, and
            kept from one update to the next, because each keeps memory.
    """

    def __init__(
        self,
        pending: PendingSum,
        announced: Contribution,
        share: RankShare,
        home: torch.device,
        streams: dict[torch.device, torch.Stream],
    ) -> None:
        self._pending = pending
        self._home, self._streams = home, streams
        for device, stream in streams.items():
            # What it has allocated before may still be in use there.
            stream.wait_stream(torch.accelerator.current_stream(device))
        self.announced = announced
        self._share = share
        self._lock = threading.Lock()
        self._num_devices = sum(map(bool, share.shards_by_device))
        self._given: dict[int, dict[int, Given]] = {}
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
            given[place] = partials, (device := _device_of(partials)), _event_on(device)
            if len(given) < self._num_devices:
                return
            parts = [given.pop(at) for at in sorted(given)]
            if {each for _, each, _ in parts} == {self._home} and (len(parts) == 1 or self._home == HOST):
                # On the stream of backward.
                self._send(index, [each for own, _, _ in parts for each in own])
                return
            with ExitStack() as stack:
                self._send(index, self._at_home(parts, stack))

    def _send(self, index: int, partials: Iterable[PartialSum]) -> None:
        """Add up what all devices have of one parameter, and send the sum."""
        # The same tree as without early sending, for one parameter, so the bits are the same.
        merged, announced = self._share.merged(partials), self.announced
        # Dense ones, as all ranks expect them.
        if Contribution.of(merged) == Contribution(announced.shards, tuple(m >> index & 1 for m in announced.present)):
            del self._given[index]
            self._pending.add(index, [each.tensors[0] for each in merged])
        else:
            self.is_spoiled = True

    def _at_home(self, given: Sequence[Given], stack: ExitStack) -> Iterator[PartialSum]:
        """Yield what devices have given on the device of the sums, and enter the streams on which it can be added."""
        # On streams of their own, so that no backward waits for that of another device or for a transfer.
        for device in {self._home, *(device for _, device, _ in given)} - {HOST}:
            self._streams[device] = self._streams.get(device) or torch.Stream(device)
            stack.enter_context(self._streams[device])
        for partials, device, event in given:
            if event is not None:
                self._streams[device].wait_event(event)
                for tensor in _present(partials):
                    # It is freed here, and belongs to the stream of backward.
                    tensor.record_stream(self._streams[device])
            yield from move_partials(partials, self._home)


def _present(partials: Sequence[PartialSum]) -> Iterator[torch.Tensor]:
    """Iterate over the dense tensors of partial sums of one tensor each."""
    return (tensor for each in partials for tensor in each.tensors if tensor is not None and not tensor.is_sparse)


def _device_of(partials: Sequence[PartialSum]) -> torch.device:
    """Return the device of partial sums, which are all on one."""
    return next((tensor.device for tensor in _present(partials)), HOST)


def _event_on(device: torch.device) -> torch.Event | None:
    """Return an event after which another stream can read what the current one has been given; None for a CPU."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device).record_event()


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
