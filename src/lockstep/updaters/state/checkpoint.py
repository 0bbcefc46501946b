"""Save everything the next update depends on, and load it again."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lockstep.errors import StateError
from lockstep.precision import CurrentScale
from lockstep.state import check_keys
from lockstep.updaters.state import lazy
from lockstep.updaters.state.frozen import check_frozen, frozen_names, restore_frozen
from lockstep.updaters.state.savepoint import Savepoint, copy_state
from lockstep.updaters.state.training import TrainingState


def _separate_elements(model: nn.Module) -> None:
    """Replace buffers of which several elements are one number in memory, to which nothing can be written."""
    for module in model.modules():
        for name, buffer in list(module._buffers.items()):
            if buffer is None or is_lazy(buffer) or buffer.layout is not torch.strided or buffer.is_nested:
                continue
            if 0 in buffer.stride():
                module._buffers[name] = buffer.clone(memory_format=torch.contiguous_format)


class RegisteredTensors:
    """The tensors of all modules by name, the tensors among them without a shape, and the extra state of modules.

    Hooks of a load and overrides of `_load_from_state_dict` may replace these tensors, and lazy modules give them a
    shape. The values of tensors are saved by a `Savepoint`.

    Args:
        model: The model, or all networks as one module.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        tables: list[Any] = [table for module in modules for table in (module._parameters, module._buffers)]
        self._tables = [(table, dict(table)) for table in tables]
        tensors = {id(tensor): tensor for table in tables for tensor in table.values()}
        # Loading gives these tensors a shape by changing their class, so both the class and the data are saved.
        self._shapeless = [(tensor, type(tensor), tensor.data) for tensor in tensors.values() if is_lazy(tensor)]
        self._extra = [
            (module, copy.deepcopy(module.get_extra_state()))
            for module in modules
            if type(module).get_extra_state is not nn.Module.get_extra_state
        ]

    def restore(self) -> None:
        """Restore the registered tensors and the extra state; tensors keep their current values."""
        for table, before in self._tables:
            # The tables are changed in place, because modules refer to these very dicts.
            table.clear()
            table.update(before)
        for tensor, kind, data in self._shapeless:
            if type(tensor) is not kind:
                tensor.data = data
                tensor.__class__ = kind
        for module, state in self._extra:
            module.set_extra_state(state)


def state_of(training: TrainingState, *, num_shards: int, seed: int) -> dict[str, Any]:
    """Return everything the next update depends on, as of the last complete update.

    Counters and tensors are copies, so later updates do not change them.

    Args:
        training: The training state.
        num_shards: The number of shards per batch.
        seed: The seed of the random streams.
    """
    state: dict[str, Any] = copy_state(live_state_of(training, num_shards=num_shards, seed=seed))
    return state


def live_state_of(training: TrainingState, *, num_shards: int, seed: int) -> dict[str, Any]:
    """Return what `state_of` returns, with the tensors that are being trained instead of copies.

    Collective where optimizers are shared out over ranks: their state is gathered, on every rank.

    Args:
        training: The training state.
        num_shards: The number of shards per batch.
        seed: The seed of the random streams.
    """
    with ExitStack() as gathered:
        for each in training.sharded.values():
            gathered.enter_context(each.whole())
        return _state(training, num_shards=num_shards, seed=seed)


def _state(training: TrainingState, *, num_shards: int, seed: int) -> dict[str, Any]:
    """Return the state, with what optimizers hold now."""
    training.unsaved.check()
    frozen = frozen_names(training.models)
    hooks = {name: each.state_dict() for name, each in training.step_hooks().items()}
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
        **({"step_hooks": hooks} if hooks else {}),
        **({"frozen": frozen} if frozen else {}),
        **({} if training.carried is None else {"carried": training.carried.state_dict()}),
    }


def load_state(training: TrainingState, state: Mapping[str, Any], *, num_shards: int, seed: int) -> None:
    """Load a saved state.

    Args:
        training: The training state, changed in place; after an error it is as it was before.
        state: What `state_of` returned; left unchanged.
        num_shards: The number of shards per batch, which must be that of the state.
        seed: The seed of the random streams, which must be that of the state.

    Raises:
        StateError: If keys are missing or unknown, or if the state has another number of shards or another seed.

    Hooks of modules and optimizers that were registered by `register_load_state_dict_pre_hook` get a state before it is
    checked against the names and shapes of their owner, so they can migrate an older one.
    """
    # Everything that can be checked is checked first. What only fails while loading is undone below.
    with ExitStack() as hidden:
        for each in training.sharded.values():
            hidden.enter_context(each.without_state())
        _check_state(state, _state(training, num_shards=num_shards, seed=seed))
    check_frozen(state.get("frozen", {}), training.models)
    if training.carried is not None:
        training.carried.check_state(state["carried"])
    # Restored into a new value here, so that an error leaves the current one in use.
    loss_scale = training.loss_scale.restored(state["loss_scale"])
    iterators = {name: each.state_dict() for name, each in training.iterators.items()}
    _separate_elements(training.replicas.model)
    savepoint, registered = Savepoint(training), RegisteredTensors(training.replicas.model)
    try:
        _load_parts(training, state)
    # A KeyboardInterrupt halfway through must not leave a mixture of two states either.
    except BaseException:
        # Before the savepoint: `set_extra_state` is user code and may write to tensors, whose values then follow.
        registered.restore()
        savepoint.restore()
        for name, before in iterators.items():
            training.iterators[name].load_state_dict(before)
        raise
    if training.carried is not None:
        training.carried.load_state_dict(state["carried"])
    restore_frozen(state.get("frozen", {}), training.models)
    training.scale = CurrentScale(loss_scale)
    training.iteration = state["iteration"]
    training.num_applied = state["applied_updates"]


def _load_parts(training: TrainingState, state: Mapping[str, Any]) -> None:
    for name, iterator in training.iterators.items():
        iterator.load_state_dict(state["iterators"][name])
    for name, model in training.models.items():
        lazy.load_state(model, state["models"][name])
    for name, optimizer in training.state_holders().items():
        # PyTorch's optimizers keep the tensors they are given, and later steps would change the saved state.
        optimizer.load_state_dict(copy_state(state["optimizers"][name]))
    for name, scheduler in training.schedulers.items():
        scheduler.load_state_dict(state["schedulers"][name])
    for name, hook in training.step_hooks().items():
        hook.load_state_dict(copy_state(state["step_hooks"][name]))


def _check_state(state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Check that a state fits the updater's own.

    Args:
        state: The state to load.
        own: The current state of the updater.
    """
    if state.get("epoch_schedulers"):
        raise StateError(
            "`state` must hold no schedulers that step with epochs, which are extensions now, got "
            f"{', '.join(state['epoch_schedulers'])}. Load each of them by scheduler.load_state_dict, pass it to a "
            'StepScheduler, and remove the entry "epoch_schedulers".'
        )
    # A state without frozen parameters does not mention them; those of earlier versions name epoch schedulers.
    held = {key: state[key] for key in state if key not in {"frozen", "epoch_schedulers"}}
    check_keys(held, own.keys() - {"frozen"}, of="a ParallelUpdater")
    for part in ("iterators", "optimizers", "models", "schedulers", "step_hooks"):
        check_keys(state.get(part, {}), own.get(part, {}), of=f"the {part} of a ParallelUpdater")
    if state["num_shards"] != own["num_shards"]:
        raise StateError(
            f"`state` must have {own['num_shards']} shards per batch, got {state['num_shards']}. The result "
            f"depends on it: pass `num_shards={state['num_shards']}`, or start a new run."
        )
    if state["seed"] != own["seed"]:
        raise StateError(f"`state` must have the seed {own['seed']}, got {state['seed']}.")
    for model, saved in state["models"].items():
        for name, value in saved.items():
            if value is None and own["models"][model].get(name) is not None:
                raise StateError(
                    f"`state` must hold values for {name!r} of model {model!r}, got none: it was saved "
                    "before the first update initialised the parameter. Load it into a new model."
                )
