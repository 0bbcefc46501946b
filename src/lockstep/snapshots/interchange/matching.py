"""Match the names of a foreign state dict with those of an updater."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from lockstep.errors import printable

WRAPPERS: Final = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""What wrappers of modules add to names, at any place."""
LISTED: Final = 20
"""The number of names of a kind that a table lists."""


@dataclass
class Matches:
    """What of a checkpoint was loaded, and what was not; printed as a table.

    Attributes:
        loaded: The names that were loaded, with the name in the checkpoint.
        missing: The names of the updater for which the checkpoint has nothing; they keep their values.
        unknown: The names of the checkpoint for which the updater has nothing.
        unfit: What has another shape, dtype or number of values, with both.
        notes: What a checkpoint of this kind cannot contain.
    """

    loaded: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    unfit: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether everything was matched."""
        return not (self.missing or self.unknown or self.unfit)

    def __str__(self) -> str:
        renamed = [f"{own} <- {theirs}" for own, theirs in self.loaded.items() if own != theirs]
        groups = [
            (f"loaded ({len(self.loaded)})", renamed or ["all under their own names"] if self.loaded else []),
            (f"missing ({len(self.missing)})", self.missing),
            (f"unknown ({len(self.unknown)})", self.unknown),
            (f"unfit ({len(self.unfit)})", [f"{name}: {why}" for name, why in self.unfit.items()]),
            ("not in such a checkpoint", self.notes),
        ]
        return "\n".join(line for title, entries in groups for line in _rows(title, entries))


def _rows(title: str, entries: Sequence[str]) -> list[str]:
    listed = list(entries[:LISTED])
    if len(entries) > LISTED:
        listed.append(f"and {len(entries) - LISTED} more")
    # The names are those of a file.
    return [f"{title if row == 0 else '':<26}{printable(entry)}" for row, entry in enumerate(listed or ["none"])]


def bare(name: str) -> str:
    """Return a name without what wrappers of modules have added.

    >>> bare("module._orig_mod.layer._checkpoint_wrapped_module.weight")
    'layer.weight'
    """
    for wrapper in WRAPPERS:
        name = name.replace(f".{wrapper}", ".").removeprefix(wrapper)
    return name


def match_tensors(own: Mapping[str, Any], theirs: Mapping[str, Any], found: Matches) -> dict[str, Any]:
    """Return a state dict of a model with the values of a checkpoint where they fit.

    Args:
        own: The state dict of the model.
        theirs: The state dict of the checkpoint.
        found: The matches, which are extended.
    """
    # A model may itself have a part with the name of a wrapper, so exact names come first.
    by_name = {name if name in own else bare(name): name for name in theirs}
    result = dict(own)
    for name, value in own.items():
        if name not in by_name:
            found.missing.append(name)
            continue
        given = theirs[by_name[name]]
        if isinstance(value, torch.Tensor) and isinstance(given, torch.Tensor):
            if given.shape != value.shape:
                found.unfit[name] = f"shape {list(given.shape)} instead of {list(value.shape)}"
                continue
            if given.dtype != value.dtype:
                found.unfit[name] = f"{given.dtype} instead of {value.dtype}"
                continue
        result[name] = given
        found.loaded[name] = by_name[name]
    found.unknown += [by_name[name] for name in by_name if name not in own]
    return result
