"""Which parameters of the models are frozen: described in the recipe, and part of every saved state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from torch import nn

from lockstep.digest import digest
from lockstep.errors import StateError, few, warn

FrozenNames: TypeAlias = dict[str, list[str]]
"""The names of frozen parameters by the name of their model; models without any are left out."""

LISTED: Final = 20
"""The number of frozen parameters that a recipe lists by name."""


def frozen_names(models: Mapping[str, nn.Module]) -> FrozenNames:
    """Return the parameters that require no gradient.

    Args:
        models: The models by name.
    """
    found = {
        name: [path for path, parameter in model.named_parameters() if not parameter.requires_grad]
        for name, model in models.items()
    }
    return {name: paths for name, paths in found.items() if paths}


def frozen_text(names: Sequence[str]) -> Any:
    """Return frozen parameters as the value of a field of the recipe: their names, or their number if they are many.

    >>> frozen_text(["0.weight"]), frozen_text([f"{index}.weight" for index in range(300)])
    (['0.weight'], '300 parameters, digest 31d1cc1c')
    """
    return list(names) if len(names) <= LISTED else f"{len(names)} parameters, digest {digest(list(names))[:8]}"


def check_frozen(saved: Mapping[str, Sequence[str]], models: Mapping[str, nn.Module]) -> None:
    """Check that saved names of frozen parameters are those of parameters.

    Args:
        saved: What `frozen_names` returned.
        models: The models by name.

    Raises:
        StateError: If there is no such model or parameter.
    """
    for name, paths in saved.items():
        own = dict(models[name].named_parameters()) if name in models else {}
        unknown = [path for path in paths if path not in own]
        if unknown or name not in models:
            known = sorted(models)
            raise StateError(
                f"`state['frozen']` must name parameters of the models {known}, got {unknown} of model {name!r}."
            )


def restore_frozen(saved: Mapping[str, Sequence[str]], models: Mapping[str, nn.Module]) -> None:
    """Freeze the parameters that were frozen when a state was saved, and no others; warn if that changes any.

    Args:
        saved: What `frozen_names` returned.
        models: The models by name, changed in place.
    """
    changed: list[str] = []
    for name, model in models.items():
        frozen = set(saved.get(name, ()))
        for path, parameter in model.named_parameters():
            if parameter.requires_grad is (path in frozen):
                parameter.requires_grad_(path not in frozen)
                changed.append(path if len(models) == 1 else f"{name}.{path}")
    if changed:
        warn(
            f"Other parameters are frozen than when the state was saved: {few(changed, LISTED)}. Their "
            "`requires_grad` is now as it was saved. To train others from here on, freeze parameters before you create "
            "the updater, and accept the field `frozen` of the recipe when you resume.",
        )
