"""Notice when shards or steps draw from random generators that are not part of their streams."""

from __future__ import annotations

import pickle
import random
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn

from lockstep.errors import RandomStreamWarning
from lockstep.updaters.detectors.references import references

IN_SHARDS: Final = (
    "The model or the loss function drew from {} while shards were computed. Such numbers depend on which device and "
    "rank computes which shard, and a saved state does not hold the generator. Draw from torch instead, without "
    "`generator=`: its random streams belong to the shard. Or create a generator in the loss function, seeded from "
    "torch: random.Random(torch.randint(2**31, ()).item())."
)
IN_STEPS: Final = (
    "The optimizer or a hook drew from {} in its step. A saved state does not hold the generator, so that a resumed "
    "run would draw other numbers. Draw from torch instead, without `generator=`: its random stream belongs to the "
    "update. Or create a generator in the step, seeded from torch: random.Random(torch.randint(2**31, ()).item())."
)


class RandomDetector:
    """Detects draws from generators outside of the streams during the first updates, and warns once.

    These are Python's `random`, NumPy's global generator, and a `torch.Generator` of a loss function, a model, an
    optimizer or a hook.

    The generators are compared before and after the shards of all devices are computed, so it does not matter
    which thread drew. Anything else that draws in another thread at that time counts as well.
    """

    def __init__(self) -> None:
        self.has_warned = False
        """Whether the warning has been given."""

    @contextmanager
    def watching(self, message: str, functions: Iterable[Any], models: Iterable[nn.Module] = ()) -> Iterator[None]:
        """Warn if a generator has moved at the end.

        Args:
            message: The warning, with a place for the names of the generators.
            functions: Functions and objects, whose own generators count as well, if they refer to them directly.
            models: The models, of which the generators in attributes count as well.
        """
        held = [each for function in functions for each in references(function)]
        held += [value for model in models for each in model.modules() for value in vars(each).values()]
        found = [each for each in held if type(each) is torch.Generator]
        before = states(found)
        yield
        after = states(found)
        moved = [name for name, state in before.items() if after[name] != state]
        if moved:
            self.has_warned = True
            warnings.warn(message.format(" and ".join(moved)), RandomStreamWarning, stacklevel=2)


def states(own: Iterable[torch.Generator]) -> dict[str, object]:
    """Return the states of generators by name; NumPy's only where NumPy has been imported.

    Args:
        own: Generators of the user.
    """
    found: dict[str, object] = {"Python's `random`": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        # The array of the state is the generator's copy, and arrays do not compare as one value.
        found["`numpy.random`"] = pickle.dumps(numpy.random.get_state(legacy=False))
    found["a `torch.Generator` of your own"] = [each.get_state().tolist() for each in own]
    return found
