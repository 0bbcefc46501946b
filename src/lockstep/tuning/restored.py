"""Restore a run after updates that were only tried."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lockstep.streams import restored_generators
from lockstep.updaters import ParallelUpdater, copy_state


@contextmanager
def restored(updater: ParallelUpdater) -> Iterator[dict[str, Any]]:
    """Return a context manager that restores an updater, its gradients and the global random generators.

    It returns the state to which the updater is restored. The copy is held in the memory of the host, so that the
    devices have as much free memory as in a run.

    Args:
        updater: The updater.
    """
    state = copy_state(updater.live_state(), device="cpu")
    parameters = [each for model in updater.get_all_models().values() for each in model.parameters()]
    modes = {module: module.training for model in updater.get_all_models().values() for module in model.modules()}
    # Copied: the next update may write to the same tensors.
    grads = copy_state([each.grad for each in parameters], device="cpu")
    try:
        with restored_generators():
            yield state
    finally:
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = None if grad is None else grad.to(parameter.device)
        # Afterwards, because loading notes that these gradients belong to a finished update.
        updater.load_state_dict(state)
        for module, training in modes.items():
            module.training = training
