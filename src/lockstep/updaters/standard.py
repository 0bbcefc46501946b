"""Updates on one device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.data import Iterator, Source
from lockstep.elsewhere import STANDARD_UPDATER, names_ours
from lockstep.updaters.parallel import ParallelUpdater


class StandardUpdater(ParallelUpdater):
    """Train on one device, with the same result as a `ParallelUpdater` with the same number of shards.

    Args:
        iterator: The source of the batches, or several by name.
        optimizer: Any `torch.optim.Optimizer` over parameters of the models, or several by name.
        model: The model, which is moved to the device; or several networks by name.
        device: The device to train on.
        **options: The options of `ParallelUpdater`, except `devices` and `workloads`. By default a batch is one shard,
            and the gradient is that of a plain loop on one intra-op thread, bit for bit.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, or if arguments do not belong together.
    """

    @names_ours(STANDARD_UPDATER)
    def __init__(
        self,
        iterator: Iterator | Source | Mapping[str, Iterator | Source],
        optimizer: Optimizer | Mapping[str, Optimizer],
        model: nn.Module | Mapping[str, nn.Module],
        *,
        device: str | torch.device = "cpu",
        **options: Any,
    ) -> None:
        refused = [name for name in ("devices", "workloads") if name in options]
        if refused:
            raise TypeError(f"StandardUpdater() has no argument `{refused[0]}`. {STANDARD_UPDATER[refused[0]]}")
        super().__init__(iterator, optimizer, model, devices=[device], **options)
