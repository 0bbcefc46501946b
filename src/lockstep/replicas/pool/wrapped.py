"""Refuse models that something else already spreads over devices or processes."""

from __future__ import annotations

import sys
from typing import Final

from torch import nn
from torch.nn.parallel import DistributedDataParallel

_FSDP: Final = "torch.distributed.fsdp"

_INSIDE: Final = "give the module inside of it, `model.module`"
_UNSHARDED: Final = "give the model as it was before FSDP sharded it"


def refuse_wrapped(model: nn.Module, argument: str) -> None:
    """Refuse a model that is, or holds, a module that computes on several devices or processes by itself.

    Such a module would sum its gradients over the ranks during backward, shard by shard, or hang where ranks have
    different numbers of shards. So would the batch statistics of a `torch.nn.SyncBatchNorm`.

    Args:
        model: The model.
        argument: The name of the argument for the error message.

    Raises:
        TypeError: There is a `DistributedDataParallel`, a `torch.nn.DataParallel`, a module sharded by FSDP, or a
            `torch.nn.SyncBatchNorm`.
    """
    kinds: list[tuple[type, str, str]] = [
        (DistributedDataParallel, "DistributedDataParallel", _INSIDE),
        (nn.DataParallel, "torch.nn.DataParallel", _INSIDE),
    ]
    # Importing FSDP takes long; a model can only be of its kinds where it has been imported already.
    fsdp = sys.modules.get(_FSDP)
    if fsdp is not None:
        kinds += [
            (fsdp.FullyShardedDataParallel, "FullyShardedDataParallel", _UNSHARDED),
            (fsdp.FSDPModule, "module sharded by fully_shard", _UNSHARDED),
        ]
    for path, module in model.named_modules():
        where = f" at {path!r}" if path else ""
        if isinstance(module, nn.SyncBatchNorm):
            raise TypeError(
                f"`{argument}` must not exchange batch statistics between processes, got a SyncBatchNorm{where}. Use "
                "BatchNorm, that is, omit SyncBatchNorm.convert_sync_batchnorm: every shard is then normalized by its "
                "own statistics, on any devices and ranks, and running statistics are averaged over shards "
                '(buffers="mean"). With num_shards=1 the statistics are those of the whole batch.'
            )
        for kind, name, cure in kinds:
            if isinstance(module, kind):
                raise TypeError(
                    f"`{argument}` must not be spread over devices or processes already, got a {name}{where}. lockstep "
                    f"copies the model to every device and sums gradients over devices and ranks itself: {cure}."
                )
