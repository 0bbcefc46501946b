"""The same update on one device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.data import Iterator, Source
from lockstep.updaters.parallel import ParallelUpdater


class StandardUpdater(ParallelUpdater):
    """Train on one device, with the bits of a `ParallelUpdater` of as many shards.

    Args:
        iterator: Gives the batches; or several by name.
        optimizer: Any `torch.optim.Optimizer` over parameters of the models, or several by name.
        model: Moved to the device; or several networks by name.
        device: Where to train.
        **options: Those of `ParallelUpdater` but `devices` and `workloads`. By default a batch is one shard,
            and the gradient is that of a plain loop on one intra-op thread, bit for bit.

    Raises:
        TypeError: As `ParallelUpdater`.
        ValueError: As `ParallelUpdater`.
    """

    def __init__(
        self,
        iterator: Iterator | Source | Mapping[str, Iterator | Source],
        optimizer: Optimizer | Mapping[str, Optimizer],
        model: nn.Module | Mapping[str, nn.Module] | None = None,
        *,
        device: str | torch.device = "cpu",
        **options: Any,
    ) -> None:
        super().__init__(iterator, optimizer, model, devices=[device], **options)
