"""Copy the state of a run, so that it can be written while training goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from lockstep.snapshots.format import DTYPES, Content, Parent, TensorIndex, freeze, model_file

_STORED: Final = frozenset(getattr(torch, name) for name in DTYPES)
_PLAIN: Final = ("progress", "recipe", "kernel_class", "metrics")
"""The fields of a content that hold no tensors."""


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
        tensors: The tensors. Those that are the same memory are the same object.
    """

    plain: Mapping[str, Any]
    run_id: str
    parent: Parent | None
    models: Mapping[str, Mapping[str, TensorIndex]]
    state: Any
    surroundings: Any
    tensors: Sequence[torch.Tensor]

    @property
    def update(self) -> int:
        """The number of updates so far."""
        update: int = self.plain["progress"]["update"]
        return update


def freeze_content(content: Content) -> Frozen:
    """Check a content and copy its trees, but not its tensors.

    Args:
        content: The content.

    Raises:
        TypeError: If the content holds something that a snapshot cannot hold. The message names its path.
        ValueError: If the number of updates is missing or the name of a model cannot name a file.
    """
    tensors: list[torch.Tensor] = []
    plain = {key: freeze(dict(getattr(content, key)), tensors, of=key) for key in _PLAIN}
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
        tensors=_same_memory_once(tensors),
    )


class Buffers:
    """Tensors on the CPU that are kept between snapshots, because fresh memory costs more than the copy."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []
        self._kinds: tuple[list[torch.Size], list[torch.dtype]] = ([], [])

    @torch.no_grad()
    def copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy tensors into the buffers, over what was there.

        Args:
            tensors: The tensors, on any devices. When this returns, they may change.

        Returns:
            The copies. Tensors that are the same object have the same copy.
        """
        unique = dict(zip(map(id, tensors), tensors, strict=True))
        sources = list(unique.values())
        kinds = ([tensor.shape for tensor in sources], [tensor.dtype for tensor in sources])
        # `_foreach_copy_` would broadcast and convert, so shapes and dtypes are compared before.
        if kinds != self._kinds:
            # The old buffers go first, so that there is never more than one copy of the state in a set.
            self._buffers, self._kinds = [], ([], [])
            self._buffers = [torch.empty(shape, dtype=dtype) for shape, dtype in zip(*kinds, strict=True)]
            self._kinds = kinds
        if sources:
            torch._foreach_copy_(self._buffers, sources)
        if len(unique) == len(tensors):
            return list(self._buffers)
        copies = dict(zip(unique, self._buffers, strict=True))
        return [copies[id(tensor)] for tensor in tensors]


def _model(name: str, tensors: Mapping[str, torch.Tensor], found: list[torch.Tensor]) -> dict[str, TensorIndex]:
    model_file(name)
    indices: dict[Any, Any] = freeze(dict(tensors), found, of=name)
    for key, index in indices.items():
        # safetensors keeps this name for itself, and its names are UTF-8.
        if not isinstance(index, TensorIndex) or key == "__metadata__" or not _is_text(key):
            raise TypeError(f"`models` must hold tensors by their names, got {key!r} in {name!r}.")
    return indices


def _is_text(key: object) -> bool:
    return isinstance(key, str) and key.encode(errors="replace") == key.encode(errors="surrogatepass")


def _check_storable(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.dtype not in _STORED or tensor.is_meta:
            raise TypeError(
                f"A snapshot holds dense tensors of {', '.join(DTYPES)}, got {tensor.dtype} of the layout "
                f"{tensor.layout} and the shape {list(tensor.shape)} on {tensor.device}."
            )


def _same_memory_once(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors with the first of those that are the same memory instead of the others.

    Raises:
        TypeError: If a tensor is of a kind that a file cannot hold.
    """
    # Thousands of tensors take longer to look at than to copy, so each is looked at once if they are as usual: those on
    # the meta device have the address 0, and those that are not dense have none.
    try:
        pointers = [tensor.data_ptr() for tensor in tensors]
    except RuntimeError:
        pointers = [0]
    if 0 in pointers or not {tensor.dtype for tensor in tensors} <= _STORED:
        _check_storable(tensors)
    if len(set(pointers)) == len(tensors):
        return tensors
    first: dict[Any, torch.Tensor] = {}
    found = []
    for index, (tensor, pointer) in enumerate(zip(tensors, pointers, strict=True)):
        # Tensors without elements have no memory that they could share.
        key: Any = index
        if tensor.numel():
            view = (tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
            key = (pointer, tensor.device, *view)
        found.append(first.setdefault(key, tensor))
    return found
