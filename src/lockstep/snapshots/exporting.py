"""Export a snapshot to the files that bare PyTorch and transformers read."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from lockstep.errors import SnapshotError
from lockstep.snapshots.content import model_file
from lockstep.snapshots.disk import snapshots_in
from lockstep.snapshots.restoring import fitting
from lockstep.snapshots.snapshot import Snapshot, load, newest_whole
from lockstep.updaters import MAIN

CONFIG: Final = "config.json"
WEIGHTS: Final = "model.safetensors"


def export_torch(source: str | Path, path: str | Path) -> dict[str, Any]:
    """Write a snapshot as a checkpoint that a plain training loop loads with ``torch.load(path, weights_only=True)``.

    The checkpoint is a dict with the state dicts ``model``, ``optimizer``, and, where the run has them, ``scheduler``
    and ``scaler`` (that of a `torch.amp.GradScaler`), and with the numbers ``epoch`` and
    ``iteration``. If there are several models, optimizers or schedulers, each entry is a dict of state dicts by name.
    ``master_weights`` has the float32 weights of an optimizer whose model is held in half precision.

    Args:
        source: The folder of a snapshot, or of a run, of which the newest whole snapshot is used.
        path: The file to write, which must not exist.

    Returns:
        The checkpoint.

    Raises:
        FileExistsError: If the file exists.
        SnapshotError: If there is no whole snapshot.

    Determinism: with one shard per batch and no accumulation, the same updates in bare PyTorch, on the same batches and
    with the same random numbers, have the bits of the run.
    """
    snapshot = _read(source)
    with fitting(snapshot.path):
        checkpoint = _checkpoint(snapshot)
    # "x" refuses a file that exists, at the same moment as it creates the new one.
    with Path(path).open("xb") as file:
        torch.save(checkpoint, file)
    return checkpoint


def export_hf(source: str | Path, path: str | Path, *, config: Any = None, model: str = MAIN) -> Path:
    """Write the weights of a snapshot into a folder that ``from_pretrained`` of transformers reads.

    Args:
        source: The folder of a snapshot, or of a run, of which the newest whole snapshot is used.
        path: The folder to write, which must not have a ``model.safetensors``.
        config: The configuration of the model: an object with ``save_pretrained``, such as a model of transformers or
            its ``config``; or the path of a ``config.json`` or of its folder. With None only the weights are written.
        model: The name of the model.

    Returns:
        The file of the weights.

    Raises:
        FileExistsError: If there are weights in the folder.
        FileNotFoundError: If there is no configuration at the path.
        KeyError: If the snapshot has no model of this name.
        SnapshotError: If there is no whole snapshot.
    """
    snapshot = _read(source)
    models = snapshot.manifest.models
    if model not in models:
        raise KeyError(f"`model` must be one of {sorted(models)}, got {model!r}.")
    folder = Path(path)
    target = folder / WEIGHTS
    if target.exists():
        raise FileExistsError(f"`path` must not hold weights already, got {target}.")
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        _write_config(config, folder)
    # The file of a snapshot is what transformers reads: bare names, tied weights once, and its mark in the header.
    shutil.copyfile(snapshot.path / model_file(model), target)
    return target


def _write_config(config: Any, folder: Path) -> None:
    """Write the configuration of a model, but not its weights."""
    if isinstance(config, str | Path):
        given = Path(config)
        shutil.copyfile(given / CONFIG if given.is_dir() else given, folder / CONFIG)
        return
    # A model has its configuration; its own `save_pretrained` would also write the weights that it has now.
    config = getattr(config, "config", config)
    if not hasattr(config, "save_pretrained"):
        raise TypeError(f"`config` must have `save_pretrained` or be a path, got a {type(config).__name__}.")
    config.save_pretrained(folder)


def _read(source: str | Path) -> Snapshot:
    """Read a snapshot, or the newest whole one of a run."""
    path = Path(source)
    snapshot = load(path) if snapshots_in(path) is None else newest_whole(path)
    if snapshot is None:
        raise SnapshotError(f"`source` must be a snapshot or a run that has one, got {path}.")
    return snapshot


def _checkpoint(snapshot: Snapshot) -> dict[str, Any]:
    """Return the checkpoint of a plain training loop."""
    state: dict[str, Any] = snapshot.state()
    models = {name: {**tensors, **state["models"].get(name, {})} for name, tensors in snapshot.models().items()}
    saved: dict[str, Any] = state.get("optimizers", {})
    found = {
        "model": _single(models),
        "optimizer": _single({name: each.get("optimizer", each) for name, each in saved.items()}),
        "master_weights": _single({name: each["masters"] for name, each in saved.items() if "masters" in each}),
        "scheduler": _single(state.get("schedulers", {})),
        "scaler": _scaler(state.get("loss_scale", {})),
    }
    checkpoint = {name: each for name, each in found.items() if each}
    return {**checkpoint, "epoch": snapshot.epoch, "iteration": snapshot.update}


def _single(named: Mapping[str, Any]) -> Any:
    return named[MAIN] if set(named) == {MAIN} else dict(named)


def _scaler(scale: Mapping[str, Any]) -> dict[str, Any]:
    """Return a loss scale that moves as the state of a `torch.amp.GradScaler`."""
    if not {"growth", "backoff", "interval", "finite_updates"} <= scale.keys():
        return {}
    return {
        "scale": scale["factor"],
        "growth_factor": scale["growth"],
        "backoff_factor": scale["backoff"],
        "growth_interval": scale["interval"],
        "_growth_tracker": scale["finite_updates"],
    }
