"""What is computed in which number format."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch


@dataclass(frozen=True, slots=True)
class Precision:
    """A policy of number formats for forward and backward.

    Attributes:
        name: As the user writes it.
        autocast_dtype: Operations that gain from it run in this format, chosen by PyTorch's autocast; None
            leaves every operation, and an autocast around the update, as they are.
    """

    name: str
    autocast_dtype: torch.dtype | None

    def autocast(self, device_type: str) -> AbstractContextManager[object]:
        """Open autocast for one shard, without the cache of cast weights that all threads would share."""
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(device_type, dtype=self.autocast_dtype, cache_enabled=False)


PRECISIONS: Final[Mapping[str, Precision]] = MappingProxyType(
    {
        "fp32": Precision("fp32", None),
        "bf16": Precision("bf16", torch.bfloat16),
        "fp16": Precision("fp16", torch.float16),
    }
)


def parse_precision(name: str) -> Precision:
    """Find a policy by its name.

    Raises:
        ValueError: There is none of that name.
    """
    if name not in PRECISIONS:
        raise ValueError(f"`precision` must be one of {', '.join(map(repr, PRECISIONS))}, got {name!r}.")
    return PRECISIONS[name]
