"""Notice when shards draw from random generators that are not part of their streams."""

from __future__ import annotations

import pickle
import random
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Final

import torch
from torch import nn

from lockstep.errors import RandomStreamWarning

CHECKED_UPDATES: Final = 3
"""The number of updates that are checked after an updater was built or a state was loaded."""

_CURE: Final = (
    "Such numbers depend on which device and rank computes which shard, and a saved state does not hold the "
    "generator. Draw from torch instead, without `generator=`: its random streams belong to the shard. Or create a "
    "generator in the loss function, seeded from torch: random.Random(torch.randint(2**31, ()).item())."
)


class RandomDetector:
    """Detects draws from generators outside of the streams during the first updates, and warns once.

    These are Python's `random`, NumPy's global generator, and a `torch.Generator` of a loss function or a model.

    The generators are compared before and after the shards of all devices are computed, so it does not matter
    which thread drew. Anything else that draws in another thread at that time counts as well.
    """

    def __init__(self) -> None:
        self._has_warned = False
        self.end = 0
        """The number of done updates from which on nothing is checked."""

    def restart(self, update: int) -> None:
        """Check the next updates, unless a warning has been given already.

        Args:
            update: The number of updates that are done.
        """
        self.end = 0 if self._has_warned else update + CHECKED_UPDATES

    @contextmanager
    def watching(self, loss_fn: Any, models: Iterable[nn.Module]) -> Iterator[None]:
        """Warn if a generator has moved at the end; nothing is checked after that.

        Args:
            loss_fn: The loss function, whose own generators count as well, if it refers to them directly.
            models: The models, of which the generators in attributes count as well.
        """
        attributes = [value for model in models for each in model.modules() for value in vars(each).values()]
        found = [each for each in (*_referred_by(loss_fn), *attributes) if isinstance(each, torch.Generator)]
        before = _states(found)
        yield
        after = _states(found)
        moved = [name for name, state in before.items() if after[name] != state]
        if moved:
            self._has_warned, self.end = True, 0
            warnings.warn(
                f"The model or the loss function drew from {' and '.join(moved)} while shards were computed. {_CURE}",
                RandomStreamWarning,
                stacklevel=2,
            )


def _states(own: Iterable[torch.Generator]) -> dict[str, object]:
    """Return the states of the generators by name; NumPy's only where NumPy has been imported."""
    found: dict[str, object] = {"Python's `random`": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        # The array of the state is the generator's copy, and arrays do not compare as one value.
        found["`numpy.random`"] = pickle.dumps(numpy.random.get_state(legacy=False))
    found["a `torch.Generator` of your own"] = [each.get_state().tolist() for each in own]
    return found


def _referred_by(function: Any) -> list[object]:
    """List the objects that a function, a method, a partial or a callable object refers to directly."""
    if isinstance(function, partial):
        return [*_referred_by(function.func), *function.args, *function.keywords.values()]
    if isinstance(function, MethodType):
        return [*_referred_by(function.__func__), *getattr(function.__self__, "__dict__", {}).values()]
    if not isinstance(function, FunctionType):
        return list(getattr(function, "__dict__", {}).values())
    names, cells = function.__code__.co_names, function.__closure__ or ()
    found = [function.__globals__.get(name) for name in names] + [*(function.__kwdefaults__ or {}).values()]
    for cell in cells:
        # A variable that has no value yet has an empty cell.
        with suppress(ValueError):
            found.append(cell.cell_contents)
    return found
