"""Policies that define which number formats are used in forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from torch import nn

_NO_AUTOCAST: Final = nullcontext()


@dataclass(frozen=True, slots=True)
class Precision:
    """A policy of number formats for forward and backward.

    Attributes:
        name: The name that users pass.
        autocast_dtype: The dtype in which PyTorch's autocast runs the operations that benefit from it; None to
            leave all operations, and an autocast that surrounds the update, as they are.
        held_dtype: The dtype of the parameters of the model, for which the updater holds float32 master weights;
            None if the optimizer updates the parameters themselves.
    """

    name: str
    autocast_dtype: torch.dtype | None = None
    held_dtype: torch.dtype | None = None

    def autocast(self, device_type: str) -> AbstractContextManager[object]:
        """Return the autocast context for one shard.

        Args:
            device_type: The type of the device of the shard, as in `torch.device.type`.
        """
        if self.autocast_dtype is None:
            return _NO_AUTOCAST
        # The cache of cast weights is disabled, because the threads of all devices would share it.
        return torch.autocast(device_type, dtype=self.autocast_dtype, cache_enabled=False)

    def check_model(self, model: nn.Module) -> None:
        """Check that a model has parameters in the dtype of the policy.

        Args:
            model: The model to check.

        Raises:
            ValueError: If the model has no parameter in that dtype.
        """
        if self.held_dtype is None or any(each.dtype == self.held_dtype for each in model.parameters()):
            return
        raise ValueError(
            f"`model` must hold parameters in {self.held_dtype} with precision={self.name!r}, got none. "
            f"Call model.to({self.held_dtype}), or use precision={self.name.removesuffix('-true')!r}."
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
"""All policies by name."""


def parse_precision(name: str) -> Precision:
    """Return the policy with a name.

    Args:
        name: One of the keys of `PRECISIONS`.

    Raises:
        ValueError: If there is no policy with this name.
    """
    if name not in PRECISIONS:
        digits = "".join(each for each in str(name) if each.isdigit())
        nearest = "bf16" if "b" in str(name) and digits == "16" else {"16": "fp16", "32": "fp32"}.get(digits)
        remedy = f" Pass precision={nearest!r}." if nearest else ""
        raise ValueError(f"`precision` must be one of {', '.join(map(repr, PRECISIONS))}, got {name!r}.{remedy}")
    return PRECISIONS[name]
