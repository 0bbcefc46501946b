"""Copy the state of a run, so that it can be written while training goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from lockstep.snapshots.format import DTYPES, Content, Parent, TensorIndex, freeze, model_file

_STORED: Final = frozenset(getattr(torch, name) for name in DTYPES)
_PLAIN: Final = ("progress", "recipe", "kernel_class", "metrics")
"""The fields of a content that hold no tensors."""
_CONSTANT: Final = frozenset({"recipe", "kernel_class"})
"""Those that usually do not change during a run."""

Constants: TypeAlias = dict[str, tuple[Any, Any]]
"""Fields that usually do not change, with their copies, by name."""

PART: Final = 2 * 1024 * 1024
"""The bytes that one call copies at most, so that two threads can share the calls. To wake the other one takes 0.1 ms,
in which one thread copies about as much."""


class Memory(NamedTuple):
    """The tensors of a content without those that are the same memory as another one.

    Attributes:
        tensors: The tensors.
        dtypes: The dtype of each of them.
        addresses: The address of the first element of each of them.
        places: The place in `tensors` of each tensor of the content, by its `TensorIndex`; empty if `tensors` has all.
    """

    tensors: Sequence[torch.Tensor]
    dtypes: Sequence[torch.dtype]
    addresses: Sequence[int]
    places: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Frozen:
    """A content whose trees are copied by value, with a `TensorIndex` for each tensor.

    Attributes:
        plain: The trees without tensors, by the name of the field.
        run_id: The name of the run.
        parent: The snapshot from which the run was resumed.
        models: The indices of the tensors by the name of the model and of the tensor.
        state: The state that the determinism guarantee covers.
        surroundings: The rest of the state.
        memory: The tensors to copy.
    """

    plain: Mapping[str, Any]
    run_id: str
    parent: Parent | None
    models: Mapping[str, Mapping[str, TensorIndex]]
    state: Any
    surroundings: Any
    memory: Memory

    @property
    def update(self) -> int:
        """The number of updates so far."""
        update: int = self.plain["progress"]["update"]
        return update


def freeze_content(content: Content, constants: Constants | None = None) -> Frozen:
    """Check a content and copy its trees, but not its tensors.

    Args:
        content: The content.
        constants: Fields of the content before with their copies, which are used again where nothing has changed. Those
            of this content replace them.

    Raises:
        TypeError: If the content holds something that a snapshot cannot hold. The message names its path.
        ValueError: If the number of updates is missing or the name of a model cannot name a file.
    """
    tensors: list[torch.Tensor] = []
    constants = {} if constants is None else constants
    plain = {}
    for key in _PLAIN:
        value = getattr(content, key)
        before, copied = constants.get(key, (None, None))
        # To compare takes a fraction of a copy. The same object may have been changed in place.
        plain[key] = copied if value is before and value == copied else freeze(dict(value), tensors, of=key)
        if key in _CONSTANT:
            constants[key] = value, plain[key]
    if tensors:
        raise TypeError(f"{', '.join(f'`{key}`' for key in _PLAIN)} must hold no tensors.")
    update = plain["progress"].get("update")
    if type(update) is not int or update < 0:
        raise ValueError(f'`progress` must hold the number of updates under "update", got {update!r}.')
    models = {name: _model(name, model, tensors) for name, model in content.models.items()}
    state = freeze(content.state, tensors, of="state")
    surroundings = freeze(content.surroundings, tensors, of="surroundings")
    return Frozen(
        plain=plain,
        run_id=content.run_id,
        parent=content.parent,
        models=models,
        state=state,
        surroundings=surroundings,
        memory=_same_memory_once(tensors),
    )


class Buffers:
    """Memory on the CPU that is kept between snapshots, because fresh memory costs more than the copy.

    Dense tensors of one dtype are joined: they are copied into one buffer by one call, because thousands of small ones
    take longer to call for than to copy.
    """

    def __init__(self) -> None:
        self._kinds: tuple[Sequence[Any], ...] = ()
        self._kept: list[torch.Tensor] = []
        self._groups: dict[torch.dtype, _Group] = {}
        self._alone: list[int] = []
        self._addresses: Sequence[int] = ()
        self._parts: deque[_Part] = deque()
        self._helper: Future[None] | None = None

    def start(self, helper: Executor) -> None:
        """Start to copy a large state in a helper, while this thread still finds out what to copy.

        It copies the tensors of the last copy again, which usually are those of the next one. They must not change from
        here on, until `copy` or `stop` returns.

        Args:
            helper: An executor whose thread is free.
        """
        self.stop()
        parts = [part for group in self._groups.values() for part in group.parts]
        if len(parts) > len(self._groups):
            self._parts.extend(parts)
            self._helper = helper.submit(_copy_parts, self._parts)

    def stop(self) -> None:
        """End what `start` has begun, if anything."""
        self._parts.clear()
        helper, self._helper = self._helper, None
        # One that has not begun need not be waited for.
        if helper is not None and not helper.cancel():
            helper.result()

    @torch.no_grad()
    def copy(self, memory: Memory) -> list[torch.Tensor]:
        """Copy tensors into the buffers, over what was there.

        Args:
            memory: The tensors, on any devices. When this returns, they may change.

        Returns:
            The copies by `TensorIndex`. Tensors that are the same memory have the same copy.
        """
        sources = memory.tensors
        # All that a copy depends on besides addresses: any of it may be changed in place, and calls that copy many
        # tensors would broadcast and convert.
        kinds = (
            memory.dtypes,
            [tensor.shape for tensor in sources],
            list(map(torch.Tensor.is_contiguous, sources)),
        )
        if kinds != self._kinds or memory.addresses != self._addresses:
            # Other tensors than those that the helper copies.
            self.stop()
            if kinds != self._kinds:
                self._allocate(kinds, sources)
            # Views are made only of tensors that stay where they are, because they cost as much as some copies.
            self._addresses = memory.addresses
            for group in self._groups.values():
                group.parts.clear()
            _copy_each(self._kept, sources)
        else:
            if self._helper is None:
                self._parts.extend(part for group in self._groups.values() for part in group.parts_of(sources))
            _copy_parts(self._parts)
            _copy_each([self._kept[index] for index in self._alone], [sources[index] for index in self._alone])
            self.stop()
        return [self._kept[place] for place in memory.places] if memory.places else list(self._kept)

    def _allocate(self, kinds: tuple[Sequence[Any], ...], sources: Sequence[torch.Tensor]) -> None:
        """Create buffers for tensors like these."""
        # The old buffers go first, so that there is never more than one copy of the state in a set.
        self._kinds, self._kept, self._groups, self._alone, self._addresses = (), [], {}, [], ()
        for index, tensor in enumerate(sources):
            if _can_be_joined(tensor):
                self._groups.setdefault(tensor.dtype, _Group()).indices.append(index)
            else:
                self._alone.append(index)
        kept = {index: torch.empty(sources[index].shape, dtype=sources[index].dtype) for index in self._alone}
        for dtype, group in self._groups.items():
            sizes = [sources[index].numel() for index in group.indices]
            group.buffer = torch.empty(sum(sizes), dtype=dtype)
            for index, part in zip(group.indices, torch.split(group.buffer, sizes), strict=True):
                kept[index] = part.view(sources[index].shape)
        self._kept = [kept[index] for index in range(len(sources))]
        self._kinds = kinds


class _Part(NamedTuple):
    """Memory that is copied by one call.

    Attributes:
        views: Flat views of tensors, which hold their memory.
        out: Where their elements go, one view after the other.
    """

    views: list[torch.Tensor]
    out: torch.Tensor


@dataclass(eq=False)
class _Group:
    """Tensors of one dtype, which are copied by few calls.

    Attributes:
        indices: Their places among all tensors.
        buffer: Their elements, one tensor after the other.
        parts: What is copied by one call each; empty if there are no views of the tensors yet.
    """

    indices: list[int] = field(default_factory=list)
    buffer: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    parts: list[_Part] = field(default_factory=list)

    def parts_of(self, sources: Sequence[torch.Tensor]) -> list[_Part]:
        """Return the parts of the group, for tensors whose addresses must be those of the call before."""
        if not self.parts:
            limit = PART // self.buffer.element_size()
            views, filled, start = list[torch.Tensor](), 0, 0
            for index in self.indices:
                for view in torch.split(sources[index].detach().view(-1), limit):
                    if filled + len(view) > limit:
                        self.parts.append(_Part(views, self.buffer[start : start + filled]))
                        views, filled, start = [], 0, start + filled
                    views.append(view)
                    filled += len(view)
            self.parts.append(_Part(views, self.buffer[start:]))
        return self.parts


def _copy_parts(parts: deque[_Part]) -> None:
    """Copy parts until none is left; another thread may take some of them."""
    while parts:
        try:
            views, out = parts.popleft()
        except IndexError:
            return
        torch.cat(views, out=out)


def _can_be_joined(tensor: torch.Tensor) -> bool:
    # Another tensor at the address of a view may be marked as conjugate or negative. Those are complex, or parts of
    # complex ones, which are contiguous only if they are one number.
    is_part = tensor.is_floating_point() and tensor.numel() == 1
    return tensor.is_cpu and tensor.is_contiguous() and not is_part and not tensor.is_complex()


def _copy_each(kept: list[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    if kept:
        torch._foreach_copy_(kept, list(sources))


def _model(name: str, tensors: Mapping[str, torch.Tensor], found: list[torch.Tensor]) -> dict[str, TensorIndex]:
    model_file(name)
    indices: dict[Any, Any] = freeze(dict(tensors), found, of=name)
    # Without a call for each of thousands of tensors, of which none is wrong usually.
    if {*map(type, indices.values())} <= {TensorIndex} and _are_names(indices):
        return indices
    wrong = [key for key, index in indices.items() if type(index) is not TensorIndex or not _are_names([key])]
    raise TypeError(f"`models` must hold tensors by their names, got {wrong[0]!r} in {name!r}.")


def _are_names(keys: Collection[object]) -> bool:
    """Return whether a file of safetensors can have these names: UTF-8, and not the one that it keeps for itself."""
    if not {*map(type, keys)} <= {str} or "__metadata__" in keys:
        return False
    joined = "".join(map(str, keys))
    return joined.isascii() or joined.encode(errors="replace") == joined.encode(errors="surrogatepass")


def _check_storable(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.dtype not in _STORED or tensor.is_meta:
            raise TypeError(
                f"A snapshot holds dense tensors of {', '.join(DTYPES)}, got {tensor.dtype} of the layout "
                f"{tensor.layout} and the shape {list(tensor.shape)} on {tensor.device}."
            )


def _same_memory_once(tensors: list[torch.Tensor]) -> Memory:
    """Return the tensors without those that are the same memory as one before.

    Raises:
        TypeError: If a tensor is of a kind that a file cannot hold.
    """
    # Thousands of tensors take longer to look at than to copy, so each is looked at once if they are as usual: those on
    # the meta device have the address 0, and those that are not dense have none.
    dtypes = [tensor.dtype for tensor in tensors]
    try:
        addresses = list(map(torch.Tensor.data_ptr, tensors))
    except RuntimeError:
        addresses = [0]
    if 0 in addresses or not _STORED.issuperset(dtypes):
        _check_storable(tensors)
    last = dict(zip(addresses, range(len(tensors)), strict=True))
    if len(last) == len(tensors):
        return Memory(tensors, dtypes, addresses, ())
    first: dict[Any, int] = {}
    kept, places = list[int](), list[int]()
    shared = {address for index, address in enumerate(addresses) if last[address] != index}
    for index, (tensor, address) in enumerate(zip(tensors, addresses, strict=True)):
        place = len(kept)
        # Tensors without elements have no memory that they could share.
        if address in shared and tensor.numel():
            view = (tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
            place = first.setdefault((address, tensor.device, *view), place)
        if place == len(kept):
            kept.append(index)
        places.append(place)
    distinct = [tensors[index] for index in kept]
    return Memory(distinct, [each.dtype for each in distinct], [addresses[index] for index in kept], places)
