"""Decide which tensor goes into which file under which name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.snapshots.format import STATE, ModelEntry, TensorIndex, encode, model_file
from lockstep.snapshots.writing.staging import Frozen


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The content of the files of a snapshot.

    Attributes:
        files: The tensors of each file by name.
        models: The file and the tied names of each model.
        state: The state as JSON values, with references to files.
        surroundings: The rest of the state as JSON values.
    """

    files: Mapping[str, Mapping[str, torch.Tensor]]
    models: Mapping[str, ModelEntry]
    state: Any
    surroundings: Any


def plan(frozen: Frozen, copies: Sequence[torch.Tensor]) -> Plan:
    """Return the content of the files of a snapshot.

    Args:
        frozen: The content.
        copies: The copies of its tensors. Tensors that are the same memory have the same copy.

    Determinism: independent of placement, and of which tensors have the same address.
    """
    files: dict[str, dict[str, torch.Tensor]] = {}
    models: dict[str, ModelEntry] = {}
    references: dict[int, list[str]] = {}
    for model, indices in frozen.models.items():
        file = model_file(model)
        # Each file is complete, also if models share tensors, because it is loaded without the others.
        stored: dict[int, str] = {}
        files[file], aliases = {}, {}
        for name, index in indices.items():
            copy = copies[index]
            first = stored.setdefault(id(copy), name)
            if first == name:
                files[file][name] = copy
                references.setdefault(id(copy), [file, name])
            else:
                aliases[name] = first
        models[model] = ModelEntry(file=file, aliases=aliases)
    rest = files[STATE] = {}

    def reference(index: TensorIndex, path: tuple[Any, ...]) -> list[str]:
        copy = copies[index]
        if id(copy) not in references:
            name = _unused("/".join(map(_part, path)), rest)
            rest[name] = copy
            references[id(copy)] = [STATE, name]
        return references[id(copy)]

    state = encode(frozen.state, reference, ("state",))
    surroundings = encode(frozen.surroundings, reference, ("surroundings",))
    return Plan(files=files, models=models, state=state, surroundings=surroundings)


def _part(key: object) -> str:
    # Names in a file are UTF-8, which has no form for lone surrogates.
    return str(key).encode(errors="replace").decode()


def _unused(name: str, used: Mapping[str, object]) -> str:
    """Return a name that is not used yet: the paths of ``{0: x, "0": y}`` read alike."""
    count, found = 1, name
    while found in used:
        count += 1
        found = f"{name}#{count}"
    return found
