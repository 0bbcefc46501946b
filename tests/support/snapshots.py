"""Small contents of snapshots, and a comparison of what was saved with what is read."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import lockstep as ls
from lockstep.snapshots import Content, Disk, Snapshot, SnapshotWriter
from lockstep.snapshots.manifest import seal

RUN = "0123456789abcdef"


def filled(shape: tuple[int, ...], update: int, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Create a tensor that differs in every element from that of any other update."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 97 + 100 * update).to(dtype).reshape(shape)


def small_content(update: int = 1, *, rows: int = 5, **options: Any) -> Content:
    """Create a content of some 2 KB, with everything in its trees that optimizers and schedulers keep."""
    weight, tied = filled((rows, 8), update), filled((3, 4), update)
    state = {
        "optimizer": {
            "state": {0: {"step": torch.tensor(float(update)), "exp_avg": filled((rows, 8), -update)}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0], "foreach": None, "maximize": False}],
        },
        "scheduler": {"milestones": Counter({30: 1, 60: 2}), "mode_worse": float("inf"), "last_lr": [0.1 / update]},
        "half": filled((5,), update, dtype=torch.bfloat16),
        "masters": [weight],
    }
    fields: dict[str, Any] = {
        "progress": {"update": update, "applied": update, "epoch": update // 2},
        "run_id": RUN,
        "recipe": {"num_shards": 4, "seed": 2**80, "split": ("contiguous", None)},
        "kernel_class": {"torch": "2.13"},
        "models": {"main": {"weight": weight, "tied": tied, "again": tied, "count": torch.tensor(update)}},
        "state": state,
        "surroundings": {"log": [{"loss": 1.0 / update}], "time": float("nan")},
        "metrics": {"accuracy": 0.5},
    }
    return Content(**(fields | options))


def digest_of(content: Content) -> str:
    """Compute the digest of what the determinism guarantee covers."""
    return ls.digest({"progress": content.progress, "models": content.models, "state": content.state})


def assert_holds(snapshot: Snapshot, content: Content) -> None:
    """Compare a snapshot with a content, by the tensors that it gives and by the digest that it names."""
    read = {"progress": snapshot.manifest.progress, "models": snapshot.models(), "state": snapshot.state()}
    assert ls.digest(read) == snapshot.digest == digest_of(content)


def write(out: Path, *contents: Content, disk: Disk | None = None, **options: Any) -> list[Path]:
    """Write contents one after the other, and return their folders."""
    folders = []
    with SnapshotWriter(out, run_id=RUN, disk=disk, **options) as writer:
        for content in contents:
            writer.save(content, reasons=["test"])
            writer.wait()
            assert writer.newest is not None
            folders.append(writer.newest)
    return folders


def of_a_newer_format(manifest: bytes) -> bytes:
    """Return a manifest as a later version may write it, whole but with another number."""
    document = json.loads(manifest)
    del document["sha256"]
    return seal({**document, "format": 3})
