"""Collect what a snapshot of an updater holds, without a copy: the writer makes the only one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lockstep.communicators import kernel_class
from lockstep.snapshots.content import Content, Parent
from lockstep.updaters import Updater

USUAL_METADATA = {"version": 1}
"""What PyTorch stores for a module that does not say otherwise. Only other metadata is part of a snapshot."""


class Collector:
    """Collects the content of the snapshots of one run.

    Args:
        updater: The updater of the run.
        run_id: The name of the run.
        parent: The snapshot from which the run was resumed.
    """

    def __init__(self, updater: Updater, *, run_id: str, parent: Parent | None = None) -> None:
        self._updater = updater
        self._run_id, self._parent = run_id, parent
        # Read once: it takes longer than a copy of a small model.
        self._kernel_class = kernel_class(updater.devices)
        self._recipe: dict[str, Any] | None = None

    def conditions(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the fields of the recipe and the kernel class of the run."""
        # After the first update, because lazy parameters have no shape before it.
        if self._recipe is None or self._updater.iteration == 0:
            self._recipe = self._updater.recipe_fields()
        return self._recipe, self._kernel_class

    def collect(self, *, surroundings: Any = None, metrics: Mapping[str, float] | None = None) -> Content:
        """Return the content of a snapshot of now, whose tensors are those that are being trained.

        Args:
            surroundings: The state of what belongs to the run but not to its result.
            metrics: Numbers that describe the snapshot.
        """
        recipe, kernels = self.conditions()
        updater = self._updater
        models, state = _split(updater.live_state())
        return Content(
            progress={
                "update": updater.iteration,
                "applied": state.get("applied_updates"),
                "epoch": updater.epoch,
                "epoch_detail": updater.epoch_detail,
                "samples": updater.samples_passed,
            },
            run_id=self._run_id,
            parent=self._parent,
            recipe=recipe,
            kernel_class=kernels,
            models=models,
            state=state,
            surroundings=surroundings,
            metrics=metrics or {},
        )


def _split(state: dict[str, Any]) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
    """Split the state of an updater into the tensors of its models and the rest."""
    models: dict[str, dict[str, torch.Tensor]] = {}
    rest, metadata = {}, {}
    for name, values in state.get("models", {}).items():
        tensors = {each: value for each, value in values.items() if isinstance(value, torch.Tensor)}
        # Extra state of modules, and None for parameters without a shape.
        others = {each: value for each, value in values.items() if each not in tensors}
        models[name], rest[name] = tensors, others
        about = getattr(values, "_metadata", None) or {}
        metadata[name] = {path: dict(each) for path, each in about.items() if each != USUAL_METADATA}
    optimizers = {name: _in_order(each) for name, each in state.get("optimizers", {}).items()}
    replaced = {"models": rest, "optimizers": optimizers} if models else {}
    return models, {**state, **replaced, "metadata": metadata}


def _in_order(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Sort the state of an optimizer by parameters: threads may have created its entries in any order."""
    if "masters" in state and "optimizer" in state:
        return {**state, "optimizer": _in_order(state["optimizer"])}
    if "state" not in state or not all(type(index) is int for index in state["state"]):
        return state
    return {**state, "state": {index: state["state"][index] for index in sorted(state["state"])}}
