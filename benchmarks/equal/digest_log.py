"""Digests of what an update did, with a hash that does not depend on lockstep.

`lockstep.digest` is part of what is compared: a checkout may compute another digest for the same bits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch

import lockstep as ls


class DigestLog:
    """A list of SHA-256 digests, one for each recorded item."""

    def __init__(self) -> None:
        self.digests: list[str] = []

    def record(self, *things: Any) -> None:
        """Append the digest of some values."""
        hasher = hashlib.sha256()
        _feed(hasher.update, things)
        self.digests.append(hasher.hexdigest())

    def record_update(self, updater: ls.ParallelUpdater, result: ls.UpdateResult) -> None:
        """Append the digest of what an update measured and of the state that it left."""
        models = updater.get_all_models()
        self.record(
            # Another checkout may say of no part that it was applied; the weights below show it.
            [result.applied, *map(_measured, (result, *result.parts.values()))],
            {name: model.state_dict() for name, model in models.items()},
            {name: [each.grad for each in model.parameters()] for name, model in models.items()},
            {name: updater.master_weights(name) for name in models},
            {name: each.state_dict() for name, each in updater.get_all_optimizers().items()},
            [updater.iteration, updater.applied_updates, updater.loss_scale.factor],
            [updater.epoch_detail, updater.is_new_epoch],
        )


def _measured(result: ls.UpdateResult) -> list[Any]:
    """Return everything in the result of an update."""
    # Another checkout may not count skipped updates, or not leave them out of means. Their loss is compared below.
    observed = {} if result.nonfinite is not None else result.observation()
    means = {name: [mean.total, mean.weight] for name, mean in observed.items() if not name.endswith("skipped")}
    flags = [result.tries, result.loss_scale, result.nonfinite]
    return [flags, result.weight, result.loss, list(result.parts), _plain(means)]


def _plain(means: Mapping[str, list[float | torch.Tensor]]) -> dict[str, list[float]]:
    """Read sums and weights to the host, so that numbers and tensors of equal value have equal digests."""
    return {name: [float(each) for each in pair] for name, pair in means.items()}


def _used_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group that are in use, because another checkout may not have the others."""
    return {name: value for name, value in group.items() if name == "params" or value not in (0, None, False)}


def _feed(update: Callable[[bytes], None], thing: Any) -> None:
    """Hash nested containers of tensors and plain values; raise an error for anything else."""
    if isinstance(thing, torch.Tensor):
        _feed_tensor(update, thing.detach())
    elif isinstance(thing, Mapping):
        if {"params", "lr"} <= thing.keys():
            thing = _used_options(thing)
        update(f"{{{len(thing)}".encode())
        # Sorted, because the order of insertion may differ between checkouts.
        for key in sorted(thing, key=repr):
            update(repr(key).encode())
            _feed(update, thing[key])
    elif isinstance(thing, list | tuple):
        update(f"[{len(thing)}".encode())
        for each in thing:
            _feed(update, each)
    elif thing is None or isinstance(thing, bool | int | str):
        update(json.dumps(thing).encode())
    elif isinstance(thing, float):
        # All digits, unlike those of a rounded decimal.
        update(thing.hex().encode())
    else:
        raise TypeError(f"`thing` must be a tensor, a container or a plain value, got {thing!r}.")


def _feed_tensor(update: Callable[[bytes], None], tensor: torch.Tensor) -> None:
    """Hash the dtype, the shape and the bytes of a tensor; of a sparse one, those of its sorted rows."""
    update(f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout}".encode())
    if tensor.is_sparse:
        # An uncoalesced tensor has the same values in other bytes.
        rows = tensor.coalesce()
        _feed(update, [rows.indices(), rows.values()])
        return
    flat = tensor.cpu().contiguous().reshape(-1)
    update(flat.view(torch.uint8).numpy().tobytes())
