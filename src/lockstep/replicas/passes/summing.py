"""Sum the gradients of all devices in the tree's order, in slices side by side where that pays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias, TypeVar

import torch

from lockstep import plan
from lockstep.plan import Piece
from lockstep.precision import resolved, sent
from lockstep.replicas.pool import ReplicaSet, ThreadSettings
from lockstep.tree import PartialSum, Tensors, merge_order, total

SIDE_BY_SIDE: Final = 400_000
"""Elements. With fewer parameters one thread has added them up before a second has begun."""

Told = TypeVar("Told")

Finish: TypeAlias = Callable[[list[torch.Tensor]], Told]
"""Called with sums in the threads that made them; may change them in place, and tell something of them."""


class TreeSum:
    """Sums partial sums over shards into the sum over all, one entry for each parameter.

    With few elements the calling thread adds whole tensors. With many, every device's thread adds its own
    slice of all of them, which is a run of elements at multiples of `plan.ALIGNMENT`. Additions are
    elementwise and pairwise in the order of `tree.merge_order`, so neither slices nor threads change a bit.

    Args:
        replicas: Their threads add.
        sizes: The number of elements of each parameter.
    """

    def __init__(self, replicas: ReplicaSet, sizes: Sequence[int]) -> None:
        self._replicas = replicas
        num_devices = len(replicas.devices)
        on_cpus = num_devices > 1 and all(device.type == "cpu" for device in replicas.devices)
        self.side_by_side = on_cpus and sum(sizes) >= SIDE_BY_SIDE
        """Whether elementwise work on all parameters is worth more than one thread."""
        self._slices = plan.slices(sizes, num_devices) if self.side_by_side else []
        self._several = len(set(replicas.devices)) > 1

    def total(self, partials: Sequence[PartialSum], *, keep: bool) -> Tensors:
        """Sum partial sums of all devices.

        Args:
            partials: In ascending order of shards.
            keep: Whether to leave the partial sums as they are; else they are added to in place.

        Returns:
            The sum, one entry for each parameter: None where no shard had one, a partial sum where it is the
            only one.
        """
        if self._several:
            partials = gather(partials, self._replicas.devices[0])
        if len(partials) == 1:
            return partials[0].tensors
        if not (self.side_by_side and self._can_be_cut(partials)):
            return _total_apart(partials) if keep else total(partials)
        roots = _fresh_roots(partials) if keep else _roots(partials)

        def add(place: int) -> None:
            pieces = self._slices[place]
            views = _slice_of(partials, pieces)
            if not keep:
                total(views)
                return
            for index, piece in enumerate(pieces):
                into = roots[piece.tensor]
                if into is not None:
                    _add_apart([(each.shard, each.tensors[index]) for each in views], _view(into, piece))

        self._replicas.run(add)
        return roots

    def finished(
        self, partials: Sequence[PartialSum], finish: Finish[Told], settings: ThreadSettings
    ) -> tuple[Tensors, list[Told]]:
        """Sum partial sums of all devices and finish the sum, slice by slice while it is in the caches.

        Args:
            partials: In ascending order of shards; changed in place.
            finish: Called with the sums of each slice.
            settings: What the calling thread computes under.

        Returns:
            The finished sum, one entry for each parameter, and what `finish` told of each slice.
        """
        if self._several:
            partials = gather(partials, self._replicas.devices[0])
        if not (self.side_by_side and self._can_be_cut(partials)):
            sums = total(partials)
            return sums, [finish_whole(sums, finish)]
        told: list[Told] = []

        def reduce(place: int) -> None:
            sums = total(_slice_of(partials, self._slices[place]))
            told.append(finish([tensor for tensor in sums if tensor is not None]))

        roots = _roots(partials)  # before additions take tensors over
        self._replicas.run(reduce, settings=settings)
        return roots, told

    @staticmethod
    def _can_be_cut(partials: Sequence[PartialSum]) -> bool:
        """Tell whether all tensors lie in memory so that a run of elements is a view."""
        return all(
            tensor is None or (not tensor.is_sparse and tensor.is_contiguous())
            for partial in partials
            for tensor in partial.tensors
        )


def finish_whole(sums: Tensors, finish: Finish[Told]) -> Told:
    """Finish a sum of tensors of any layout as a whole; conjugated ones are replaced in `sums`."""
    present: list[torch.Tensor] = []
    for index, tensor in enumerate(sums):
        if tensor is not None:
            if tensor.is_conj() or tensor.is_neg():
                sums[index] = tensor = resolved(tensor)  # noqa: PLW2901 - stands in for it
            present.append(tensor)
    return finish(present)


def gather(partials: Sequence[PartialSum], device: torch.device) -> list[PartialSum]:
    """Return partial sums on one device; those that are there stay as they are."""
    return [
        PartialSum(partial.shard, [None if tensor is None else sent(tensor, device) for tensor in partial.tensors])
        for partial in partials
    ]


def _roots(partials: Sequence[PartialSum]) -> Tensors:
    """Return the tensors that in-place additions end up in: of each parameter the first there is."""
    found: Tensors = list(partials[0].tensors)
    for index, tensor in enumerate(found):
        if tensor is None:
            others = (partial.tensors[index] for partial in partials)
            found[index] = next((other for other in others if other is not None), None)
    return found


def _fresh_roots(partials: Sequence[PartialSum]) -> Tensors:
    """Return new tensors for the sums of parameters of which there are several partial sums."""
    roots = _roots(partials)
    for index, root in enumerate(roots):
        if root is not None and sum(partial.tensors[index] is not None for partial in partials) > 1:
            roots[index] = torch.empty_like(root)
    return roots


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


def _add_apart(parts: Sequence[tuple[int, torch.Tensor | None]], into: torch.Tensor) -> None:
    """Write the sum of some tensors to another one, and leave them as they are."""
    present = [(shard, tensor) for shard, tensor in parts if tensor is not None]
    if len(present) == 1:
        return  # it is its own sum
    sums = [tensor for _, tensor in present]
    fresh = set[int]()
    *rest, (first, last) = merge_order([shard for shard, _ in present])
    for left, right in rest:
        sums[left] = torch.add(sums[left], sums[right], out=sums[left] if left in fresh else None)
        fresh.add(left)
    torch.add(sums[first], sums[last], out=into)


def _total_apart(partials: Sequence[PartialSum]) -> Tensors:
    """Sum partial sums as `tree.total` does, and leave them as they are."""
    sums = [partial.tensors for partial in partials]
    for into, other in merge_order([partial.shard for partial in partials]):
        sums[into] = [
            right if left is None else left if right is None else left + right
            for left, right in zip(sums[into], sums[other], strict=True)
        ]
    return sums[0]


def apply_tensor_hooks(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Run the hooks that a user registered on a parameter on its gradient, once for the whole batch.

    Args:
        parameter: Left as it is.
        gradient: What its hooks see.

    Returns:
        The answer of the last hook that gave one; the gradient itself where none did.
    """
    if not parameter._backward_hooks:
        return gradient
    with torch.no_grad():
        for hook in parameter._backward_hooks.values():
            replaced = hook(gradient)
            gradient = gradient if replaced is None else replaced
    return gradient
