"""What is computed in which number format."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from torch import nn

_AS_IT_IS: Final = nullcontext()


@dataclass(frozen=True, slots=True)
class Precision:
    """A policy of number formats for forward and backward.

    Attributes:
        name: As the user writes it.
        autocast_dtype: Operations that gain from it run in this format, chosen by PyTorch's autocast; None
            leaves every operation, and an autocast around the update, as they are.
        held_dtype: The format the model's parameters are held in, with float32 masters inside the update;
            None where the optimizer moves the parameters themselves.
    """

    name: str
    autocast_dtype: torch.dtype | None = None
    held_dtype: torch.dtype | None = None

    def autocast(self, device_type: str) -> AbstractContextManager[object]:
        """Open autocast for one shard, without the cache of cast weights that all threads would share."""
        if self.autocast_dtype is None:
            return _AS_IT_IS
        return torch.autocast(device_type, dtype=self.autocast_dtype, cache_enabled=False)

    def check_model(self, model: nn.Module) -> None:
        """Refuse a model that is not held as the policy says.

        Raises:
            ValueError: It has no parameter in that format.
        """
        if self.held_dtype is None or any(each.dtype == self.held_dtype for each in model.parameters()):
            return
        raise ValueError(
            f"`model` must hold parameters in {self.held_dtype} with precision={self.name!r}, got none. "
            f"Call model.to({self.held_dtype}), or take {self.name.removesuffix('-true')!r}."
        )


PRECISIONS: Final[Mapping[str, Precision]] = MappingProxyType(
    {
        "fp32": Precision("fp32"),
        "bf16": Precision("bf16", autocast_dtype=torch.bfloat16),
        "fp16": Precision("fp16", autocast_dtype=torch.float16),
        "bf16-true": Precision("bf16-true", held_dtype=torch.bfloat16),
        "fp16-true": Precision("fp16-true", held_dtype=torch.float16),
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
