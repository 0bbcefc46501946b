"""Sum the gradients of all devices in the order of the tree, and run tensor hooks on the result.

If there are many elements, the threads of the devices sum slices of the gradients in parallel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias, TypeVar

import torch

from lockstep import plan
from lockstep.plan import Piece
from lockstep.precision import resolve_conj_neg, to_device
from lockstep.replicas.pool.replica_set import ReplicaSet
from lockstep.replicas.pool.settings import ThreadSettings
from lockstep.tree import PartialSum, Tensors, total

MIN_PARALLEL_ELEMENTS: Final = 400_000
"""The number of elements from which several threads sum. With fewer, one thread is done before a second one starts."""

Result = TypeVar("Result")

Finish: TypeAlias = Callable[[list[torch.Tensor]], Result]
"""A function that is called with sums in the threads that computed them. It may modify them and return a result."""


class TreeSum:
    """Sums partial sums over shards into the sum over all shards, with one entry per parameter.

    With few elements the calling thread adds whole tensors. With many, the thread of each device adds its own slice of
    all tensors, which is a range of elements at multiples of `plan.ALIGNMENT`. Additions are elementwise and pairwise
    in the order of `tree.merge_order`, so neither slices nor threads change a bit.

    Args:
        replicas: The replicas whose threads add.
        sizes: The number of elements of each parameter.
    """

    def __init__(self, replicas: ReplicaSet, sizes: Sequence[int]) -> None:
        self._replicas = replicas
        num_devices = len(replicas.devices)
        on_cpus = num_devices > 1 and all(device.type == "cpu" for device in replicas.devices)
        self.is_parallel = on_cpus and sum(sizes) >= MIN_PARALLEL_ELEMENTS
        """Whether elementwise work on all parameters is enough for several threads."""
        self._slices = plan.slices(sizes, num_devices) if self.is_parallel else []
        self._several = len(set(replicas.devices)) > 1

    def total(self, partials: Sequence[PartialSum], *, keep: bool) -> Tensors:
        """Sum the partial sums of all devices.

        Args:
            partials: The partial sums in ascending order of shards.
            keep: Whether to leave the partial sums unchanged instead of adding to them in place.

        Returns:
            The sum, with one entry per parameter: None if no shard had one, or the partial sum itself if there is only
            one.
        """
        # Partial sums stay on their devices until here, where they are needed in one place.
        if self._several:
            partials = move_partials(partials, self._replicas.devices[0])
        if len(partials) == 1:
            return partials[0].tensors
        if keep:
            partials = [
                PartialSum(each.shard, [None if tensor is None else tensor.clone() for tensor in each.tensors])
                for each in partials
            ]
        if not (self.is_parallel and self._can_be_sliced(partials)):
            return total(partials)
        return self.reduce(partials, _leave, None)[0]

    def reduce(
        self, partials: Sequence[PartialSum], finish: Finish[Result], settings: ThreadSettings | None
    ) -> tuple[Tensors, list[Result]]:
        """Sum the partial sums of all devices and process the sum, slice by slice while it is in the caches.

        Args:
            partials: The partial sums in ascending order of shards. They are changed in place.
            finish: The function to call with the sums of each slice.
            settings: The settings under which the calling thread computes, or None for those that it has now.

        Returns:
            The finished sum, with one entry per parameter, and the results of `finish` for the slices.
        """
        # Partial sums stay on their devices until here, where they are needed in one place.
        if self._several:
            partials = move_partials(partials, self._replicas.devices[0])
        if not (self.is_parallel and self._can_be_sliced(partials)):
            sums = total(partials)
            return sums, [finish_whole(sums, finish)]
        results: list[Result] = []

        def reduce_slice(place: int) -> None:
            sums = total(_slice_of(partials, self._slices[place]))
            # Appending to a list is atomic. The results are in no particular order.
            results.append(finish([tensor for tensor in sums if tensor is not None]))

        roots = _roots(partials)
        self._replicas.run(reduce_slice, settings=settings)
        return roots, results

    @staticmethod
    def _can_be_sliced(partials: Sequence[PartialSum]) -> bool:
        """Return whether a range of elements of each tensor is a view."""
        return all(
            tensor is None or (not tensor.is_sparse and tensor.is_contiguous())
            for partial in partials
            for tensor in partial.tensors
        )


def finish_whole(sums: Tensors, finish: Finish[Result]) -> Result:
    """Finish a sum of tensors of any layout as a whole.

    Args:
        sums: The sums. Conjugated and negated tensors are replaced in this list.
        finish: The function to call with the tensors that are present.

    Returns:
        The result of `finish`.
    """
    present: list[torch.Tensor] = []
    for index, tensor in enumerate(sums):
        if tensor is not None:
            # An operation in place on a lazily conjugated tensor would be an operation on its unconjugated memory.
            if tensor.is_conj() or tensor.is_neg():
                sums[index] = tensor = resolve_conj_neg(tensor)  # noqa: PLW2901 - stands in for it
            present.append(tensor)
    return finish(present)


def move_partials(partials: Sequence[PartialSum], device: torch.device) -> list[PartialSum]:
    """Return partial sums on one device. Tensors that are on it already are not copied.

    Args:
        partials: The partial sums.
        device: The device.
    """
    return [
        PartialSum(partial.shard, [None if tensor is None else to_device(tensor, device) for tensor in partial.tensors])
        for partial in partials
    ]


def apply_tensor_hooks(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Run the hooks that a user registered on a parameter on its gradient, once for the whole batch.

    Args:
        parameter: The parameter. It is not modified.
        gradient: The gradient to pass to the first hook.

    Returns:
        The result of the last hook that returned a tensor, or else the gradient itself.
    """
    if not parameter._backward_hooks:
        return gradient
    with torch.no_grad():
        for hook in parameter._backward_hooks.values():
            answer = hook(gradient)
            gradient = gradient if answer is None else answer
    return gradient


def _roots(partials: Sequence[PartialSum]) -> Tensors:
    """Return for each parameter the first tensor, in which the sum ends up when adding in place."""
    found: Tensors = list(partials[0].tensors)
    for index, tensor in enumerate(found):
        if tensor is None:
            others = (partial.tensors[index] for partial in partials)
            found[index] = next((other for other in others if other is not None), None)
    return found


def _slice_of(partials: Sequence[PartialSum], pieces: Sequence[Piece]) -> list[PartialSum]:
    """Return views of one slice of all partial sums."""
    return [
        PartialSum(
            partial.shard,
            [None if (tensor := partial.tensors[piece.tensor]) is None else _view(tensor, piece) for piece in pieces],
        )
        for partial in partials
    ]


def _view(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    return tensor if piece.whole else tensor.view(-1)[piece.start : piece.stop]


def _leave(_: list[torch.Tensor]) -> None:
    """Finish a sum that is complete as it is."""
