"""Save everything the next update depends on, and load it again; in memory for an update of several steps that fails.

Which parameters are frozen is a part of every saved state, and described in the recipe.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.digest import digest
from lockstep.errors import StateError, few, warn
from lockstep.optim import StatefulHook, without_pre_hooks
from lockstep.precision import CurrentScale
from lockstep.state import check_keys
from lockstep.updaters.state import lazy
from lockstep.updaters.state.lazy import with_metadata
from lockstep.updaters.state.training import TrainingState

FrozenNames: TypeAlias = dict[str, list[str]]
"""The names of frozen parameters by the name of their model; models without any are left out."""

LISTED: Final = 20
"""The number of frozen parameters that a recipe lists by name."""


def frozen_names(models: Mapping[str, nn.Module]) -> FrozenNames:
    """Return the parameters that require no gradient.

    Args:
        models: The models by name.
    """
    found = {
        name: [path for path, parameter in model.named_parameters() if not parameter.requires_grad]
        for name, model in models.items()
    }
    return {name: paths for name, paths in found.items() if paths}


def frozen_text(names: Sequence[str]) -> Any:
    """Return frozen parameters as the value of a field of the recipe: their names, or their number if they are many.

    >>> frozen_text(["0.weight"]), frozen_text([f"{index}.weight" for index in range(300)])
    (['0.weight'], '300 parameters, digest 31d1cc1c')
    """
    return list(names) if len(names) <= LISTED else f"{len(names)} parameters, digest {digest(list(names))[:8]}"


def check_frozen(saved: Mapping[str, Sequence[str]], models: Mapping[str, nn.Module]) -> None:
    """Check that saved names of frozen parameters are those of parameters.

    Args:
        saved: What `frozen_names` returned.
        models: The models by name.

    Raises:
        StateError: If there is no such model or parameter.
    """
    for name, paths in saved.items():
        own = dict(models[name].named_parameters()) if name in models else {}
        unknown = [path for path in paths if path not in own]
        if unknown or name not in models:
            known = sorted(models)
            raise StateError(
                f"`state['frozen']` must name parameters of the models {known}, got {unknown} of model {name!r}."
            )


def restore_frozen(saved: Mapping[str, Sequence[str]], models: Mapping[str, nn.Module]) -> None:
    """Freeze the parameters that were frozen when a state was saved, and no others; warn if that changes any.

    Args:
        saved: What `frozen_names` returned.
        models: The models by name, changed in place.
    """
    changed: list[str] = []
    for name, model in models.items():
        frozen = set(saved.get(name, ()))
        for path, parameter in model.named_parameters():
            if parameter.requires_grad is (path in frozen):
                parameter.requires_grad_(path not in frozen)
                changed.append(path if len(models) == 1 else f"{name}.{path}")
    if changed:
        warn(
            f"Other parameters are frozen than when the state was saved: {few(changed, LISTED)}. Their "
            "`requires_grad` is now as it was saved. To train others from here on, freeze parameters before you create "
            "the updater, and accept the field `frozen` of the recipe when you resume."
        )


class Savepoint:
    """The current values of parameters, buffers, optimizers and schedulers.

    Args:
        training: The training state, with everything that steps may change. Parameters without a shape are left out;
            see `include`. Of state that is shared out over ranks, this rank copies its part.
    """

    def __init__(self, training: TrainingState) -> None:
        training.unsaved.check()
        carried = training.carried
        # Steps replace these values, and do not change them.
        self._carried = None if carried is None else (carried, carried.current)
        self._tensors: dict[torch.Tensor, torch.Tensor] = {}
        self.include(training.replicas.model)
        self._sharded = [(each, copy_state(each.own_state())) for each in training.sharded.values()]
        with ExitStack() as hidden:
            for each, _ in self._sharded:
                hidden.enter_context(each.without_state())
            self._optimizers = [(each, copy_state(each.state_dict())) for each in training.optimizers.values()]
        stateful: tuple[LRScheduler | StatefulHook, ...] = (
            *training.schedulers.values(),
            *training.step_hooks().values(),
        )
        self._stateful = [(each, copy_state(each.state_dict())) for each in stateful]
        self._masters = [(each, copy_state(each.saved_masters())) for each in training.all_masters()]

    def include(self, model: nn.Module) -> None:
        """Copy tensors that have got their shape since.

        Args:
            model: All networks.
        """
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor not in self._tensors and not is_lazy(tensor):
                self._tensors[tensor] = tensor.detach().clone()

    def differs(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Return whether any of some parameters or buffers has other values now.

        Args:
            tensors: The parameters or buffers.
        """
        return any(not torch.equal(each, self._tensors[each]) for each in tensors if each in self._tensors)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore everything, bit for bit."""
        for tensor, before in self._tensors.items():
            # Copied in place: optimizers, replicas and the user's own references keep pointing to the same tensors.
            tensor.copy_(before)
        for optimizer, state in self._optimizers:
            _restore(optimizer, state)
        for sharded, own in self._sharded:
            sharded.restore(own)
        for each, state in self._stateful:
            each.load_state_dict(state)
        for masters, values in self._masters:
            masters.load_masters(values)
        if self._carried is not None:
            carried, current = self._carried
            carried.current = current


def _restore(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Load the saved state of an optimizer, each tensor in the dtype it had."""
    # Hooks migrate states of older versions. This state is the optimizer's own, and must not be changed.
    with without_pre_hooks(optimizer):
        optimizer.load_state_dict(saved)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # Loading casts to the dtype of the parameter, in which float32 state would lose bits.
    for index, parameter in enumerate(parameters):
        # A class may have other entries.
        if index in saved.get("state", ()):
            optimizer.state[parameter] = saved["state"][index]


def copy_state(value: Any, device: str | None = None) -> Any:
    """Copy nested state with its tensors, three times as fast as `copy.deepcopy`.

    One tensor under several names, as tied weights are in a state, is one tensor in the copy too.

    Args:
        value: The state to copy.
        device: The device of the copies; None for that of each tensor.
    """
    return _copy(value, {}, device)


def _copy(value: Any, copies: dict[Hashable, torch.Tensor], device: str | None) -> Any:
    """Copy nested state.

    Args:
        value: The state to copy.
        copies: The copies made so far, by the memory they were made of.
        device: The device of the copies; None for that of each tensor.
    """
    if isinstance(value, torch.Tensor):
        return _copy_tensor(value, copies, device)
    if isinstance(value, Mapping):
        parts = {key: _copy(part, copies, device) for key, part in value.items()}
        return with_metadata(parts, value)
    if type(value) is list or type(value) is tuple:
        return type(value)(_copy(part, copies, device) for part in value)
    return copy.deepcopy(value)


def _copy_tensor(value: torch.Tensor, copies: dict[Hashable, torch.Tensor], device: str | None) -> torch.Tensor:
    """Copy a tensor once; a state contains a tied weight as a separate view for each of its names."""
    # Sparse tensors have no address, and all empty ones share one.
    if value.layout is not torch.strided or not value.numel():
        return _cloned(value, device)
    # Views with the same address and the same form hold the same numbers.
    form = (value.dtype, value.shape, value.stride(), value.is_conj(), value.is_neg())
    place = (value.device, value.data_ptr(), form)
    if place not in copies:
        copies[place] = _cloned(value, device)
    return copies[place]


def _cloned(value: torch.Tensor, device: str | None) -> torch.Tensor:
    return value.detach().clone() if device is None else value.detach().to(device, copy=True)


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
