"""Notice draws from random generators that are not part of the streams."""

from __future__ import annotations

import pickle
import random
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from lockstep.errors import RandomStreamWarning
from lockstep.updaters.detectors.references import references


def generator_states(functions: Iterable[object], models: Iterable[nn.Module] = ()) -> dict[str, object]:
    """Return the states of generators by name: Python's, that of NumPy if it is imported, and torch's.

    Args:
        functions: Functions and objects, whose own generators count as well, if they refer to them directly.
        models: The models, of which the generators in attributes count as well.
    """
    held = [each for function in functions for each in references(function)]
    held += [value for model in models for each in model.modules() for value in vars(each).values()]
    found: dict[str, object] = {"Python's `random`": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        # The array of the state is the generator's copy, and arrays do not compare as one value.
        found["`numpy.random`"] = pickle.dumps(numpy.random.get_state(legacy=False))
    found["a `torch.Generator` of your own"] = [
        each.get_state().tolist() for each in held if type(each) is torch.Generator
    ]
    return found


def moved(before: dict[str, object], after: dict[str, object]) -> list[str]:
    """List the names of states that have changed.

    >>> moved({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4})
    ['b']
    """
    return [name for name, state in before.items() if name in after and after[name] != state]


class StepDraws:
    """Warns once if an optimizer or a hook draws from a generator whose state is not saved."""

    def __init__(self) -> None:
        self.has_warned = False
        """Whether the warning has been given."""

    @contextmanager
    def watching(self, functions: Iterable[object]) -> Iterator[None]:
        """Warn if a generator has moved at the end.

        Args:
            functions: The optimizers and hooks that are called.
        """
        before = generator_states(functions)
        yield
        names = moved(before, generator_states(functions))
        if names:
            self.has_warned = True
            warnings.warn(
                f"The optimizer or a hook drew from {' and '.join(names)} in its step. A saved state does not hold the "
                "generator, so that a resumed run would draw other numbers. Draw from torch instead, without "
                "`generator=`: its random stream belongs to the update. Or create a generator in the step, seeded from "
                "torch: random.Random(torch.randint(2**31, ()).item()).",
                RandomStreamWarning,
                stacklevel=2,
            )
