"""Check the options of a group of parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse the options of a group that are out of range.

    Raises:
        ValueError: ``lr``, ``missing_grad`` or, where there is one, ``momentum`` is.
    """
    lr = options["lr"]
    if not (0 <= lr < math.inf):
        raise ValueError(f"`lr` must be finite and at least 0, got {lr}.")
    if "momentum" in options and not 0 <= options["momentum"] < 1:
        raise ValueError(f"`momentum` must lie in [0, 1), got {options['momentum']}.")
    if options["missing_grad"] not in {"skip", "zero"}:
        raise ValueError(f"`missing_grad` must be 'skip' or 'zero', got {options['missing_grad']!r}.")
