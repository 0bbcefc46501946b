"""Notice when shards draw from random generators that are not part of their streams."""

from __future__ import annotations

import pickle
import random
import sys
import warnings
from typing import Final

from lockstep.errors import RandomStreamWarning

CHECKED_UPDATES: Final = 3
"""The number of updates that are checked after an updater was built or a state was loaded."""

_CURE: Final = (
    "Such numbers depend on which device and rank computes which shard, and a saved state does not hold the "
    "generator. Draw from torch instead, whose random streams belong to the shard, or seed a generator of your own "
    "from torch in the loss function: random.Random(torch.randint(2**31, ()).item())."
)


class GlobalRandomDetector:
    """Detects draws from Python's `random` and NumPy's global generator during the first updates, and warns once.

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

    def states(self) -> dict[str, object]:
        """Return the states of the generators by name; NumPy's only where NumPy has been imported."""
        found: dict[str, object] = {"Python's `random`": random.getstate()}
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            # The array of the state is the generator's copy, and arrays do not compare as one value.
            found["`numpy.random`"] = pickle.dumps(numpy.random.get_state(legacy=False))
        return found

    def check(self, before: dict[str, object]) -> None:
        """Warn if a generator has moved; nothing is checked after that.

        Args:
            before: The `states` from before the shards were computed.
        """
        after = self.states()
        moved = [name for name, state in before.items() if after[name] != state]
        if moved:
            self._has_warned, self.end = True, 0
            warnings.warn(
                f"The model or the loss function drew from {' and '.join(moved)} while shards were computed. {_CURE}",
                RandomStreamWarning,
                stacklevel=2,
            )
