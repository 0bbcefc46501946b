"""Say what the next update depends on, and go on from what was said."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.errors import StateError
from lockstep.precision import MovingScale
from lockstep.state import check_keys
from lockstep.updaters.state import lazy
from lockstep.updaters.state.registered import RegisteredTensors
from lockstep.updaters.state.savepoint import copy_state
from lockstep.updaters.state.training import Training


def state_of(training: Training, *, num_shards: int, seed: int) -> dict[str, Any]:
    """Give everything the next update depends on, as of the last one that was done.

    Counters and tensors alike are copies: what follows changes nothing in it.

    Args:
        training: What is trained.
        num_shards: Shards a batch.
        seed: Of the random streams.
    """
    state: dict[str, Any] = copy_state(_parts(training, num_shards=num_shards, seed=seed))
    return state


def _parts(training: Training, *, num_shards: int, seed: int) -> dict[str, Any]:
    """Collect the parts of the state; tensors are those that are trained."""
    return {
        "num_shards": num_shards,
        "seed": seed,
        "iteration": training.iteration,
        "applied_updates": training.applied_updates,
        "loss_scale": training.loss_scale.state_dict(),
        "iterators": {name: each.state_dict() for name, each in training.iterators.items()},
        "optimizers": {name: each.state_dict() for name, each in training.state_holders().items()},
        "models": {name: lazy.state_of(each) for name, each in training.models.items()},
        "schedulers": {name: each.state_dict() for name, each in training.schedulers.items()},
        "epoch_schedulers": {name: each.state_dict() for name, each in training.epoch_schedulers.items()},
    }


def load_state(training: Training, state: Mapping[str, Any], *, num_shards: int, seed: int) -> None:
    """Go on from a saved state.

    Args:
        training: Changed in place; after an error as it was.
        state: What `state_of` gave; left untouched.
        num_shards: Shards a batch; must be those of the state.
        seed: Of the random streams; must be that of the state.

    Raises:
        StateError: Keys are missing or unknown, or it is the state of another number of shards or seed.

    Hooks of `register_load_state_dict_pre_hook`, of modules and of optimizers, get a state before it is
    checked against the names and shapes of their owner, so they may bring an older one up to date.
    """
    _check_state(state, _parts(training, num_shards=num_shards, seed=seed))
    loss_scale = training.loss_scale.restored(state["loss_scale"])
    iterators = {name: each.state_dict() for name, each in training.iterators.items()}
    savepoint, registered = training.save(), RegisteredTensors(training.group.model)
    try:
        _load_parts(training, state)
    except BaseException:
        registered.restore()
        savepoint.restore()
        for name, before in iterators.items():
            training.iterators[name].load_state_dict(before)
        raise
    training.scale = MovingScale(loss_scale)
    training.iteration = state["iteration"]
    training.applied = state["applied_updates"]


def _load_parts(training: Training, state: Mapping[str, Any]) -> None:
    for name, iterator in training.iterators.items():
        iterator.load_state_dict(state["iterators"][name])
    for name, model in training.models.items():
        lazy.load_state(model, state["models"][name])
    for name, optimizer in training.state_holders().items():
        # PyTorch's optimizers take over the tensors they are given, and would change the saved state.
        optimizer.load_state_dict(copy_state(state["optimizers"][name]))
    for name, scheduler in training.schedulers.items():
        scheduler.load_state_dict(state["schedulers"][name])
    for name, scheduler in training.epoch_schedulers.items():
        scheduler.load_state_dict(state["epoch_schedulers"][name])


def _check_state(state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse a state that does not fit the updater's own."""
    check_keys(state, own, of="a ParallelUpdater")
    for part in ("iterators", "optimizers", "models", "schedulers", "epoch_schedulers"):
        check_keys(state[part], own[part], of=f"the {part} of a ParallelUpdater")
    if state["num_shards"] != own["num_shards"]:
        raise StateError(
            f"`state` must be of {own['num_shards']} shards, got {state['num_shards']}. Shards "
            f"are part of a run's meaning: give `num_shards={state['num_shards']}`, or start afresh."
        )
    if state["seed"] != own["seed"]:
        raise StateError(f"`state` must be of seed {own['seed']}, got {state['seed']}.")
    for model, saved in state["models"].items():
        for name, value in saved.items():
            if value is None and own["models"][model].get(name) is not None:
                raise StateError(
                    f"`state` must hold values for {name!r} of model {model!r}, got none: it was saved "
                    "before the first update gave the parameter a shape. Load it into a fresh model."
                )
