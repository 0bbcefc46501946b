"""Copy a model to a device, and detect later changes of the original.

On the device where the model lives, a copy shares the memory of the parameters and has everything else for itself:
gradients, buffers and plain attributes. On other devices its parameters are copies as well (see
`replicas.pool.parameter_copier`). The model itself is never run, so nothing of it changes before an update is applied.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from lockstep.nest import attributes, listed
from lockstep.replicas.pool.references import copy_references
from lockstep.streams import DEFAULT_GENERATOR_LOCK, restored_generators

REQUIRES_GRAD: Final = attrgetter("requires_grad")
ADDRESS: Final = (torch.Tensor.data_ptr,)
LAYOUT: Final = (torch.Tensor.data_ptr, torch.Tensor.stride, attrgetter("dtype", "shape"))
"""What a replica with memory of its own has in common with a parameter, besides its values."""

VERSION: Final = attrgetter("_version")

OF_MODULES: Final = frozenset(vars(nn.Module()))
"""The attributes of every module, which are watched by themselves or do not change what a forward computes."""

SHARED: Final = (ModuleType, type, FunctionType, BuiltinFunctionType, str, bytes, int, float, complex, type(None))
"""The types of values that hold no others, or of which no copies are made."""

CHANGING: Final = (dict, list, set, deque)
CONTAINERS: Final = (*CHANGING, tuple, frozenset)

MOST_ENTRIES: Final = 10_000
"""The number of entries that are watched at most, in all containers together."""

HOOK_NAMES: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""The attributes in which a module keeps its hooks."""


def copy_model(
    model: nn.Module, device: torch.device, shares_memory: Callable[[nn.Parameter], bool], memo: dict[int, Any]
) -> nn.Module:
    """Copy a model to a device.

    Parameters, modules and buffers that are tied in the model are tied in the copy, and tensors in attributes that are
    views of a parameter or buffer are views of its copy. The parameters of modules that the model holds without
    registering them, as in a list, share memory as well. A hook that is an object outside of the model, a method of
    such an object, or a `functools.partial` that holds one, keeps that object. A weight that `torch.nn.utils.prune`,
    `weight_norm` or `spectral_norm` computes before each forward is copied without its graph.

    Args:
        model: The model to copy. It is not modified.
        device: The device on which the copy will run.
        shares_memory: A function that returns for a parameter whether the copy uses its memory.
        memo: Receives the copies by the ``id`` of the originals.

    Raises:
        ValueError: If a parameter has no shape yet, forward writes to a parameter, the model holds an ``id`` of one, or
            a tensor in an attribute shares memory with a parameter or buffer that no copy could share.
        TypeError: If the model contains something that cannot be copied, or its copy has tensors of other origin.
    """
    _check_forward_writes_no_parameter(model)
    values = _values_of(model)
    check_no_lookups(values.containers, model, "model")
    for parameter in values.parameters:
        # Like `Module.to`, moving the model leaves those of another type of device where they are.
        shares = parameter.device == device or parameter.device.type != device.type
        memo[id(parameter)] = _copy_parameter(parameter, device, shares=shares)
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ValueError(
                f"`model` must have parameters of known shapes, got an uninitialized {name!r}. "
                "Run the model once on a sample first."
            )
        # Put into the memo of deepcopy beforehand, so that every tie to a parameter is kept and no parameter is copied
        # by its own `__deepcopy__`, which would allocate memory.
        memo[id(parameter)] = _copy_parameter(parameter, device, shares=shares_memory(parameter))
    for buffer in model.buffers():
        own = buffer.detach().to(buffer.device if buffer.is_meta else device, copy=True)
        own.__dict__.update(buffer.__dict__)
        memo[id(buffer)] = own
    hidden = [("a parameter of an unregistered module", each) for each in values.parameters]
    _copy_views(values.tensors, [*_named_tensors(model), *hidden], memo)
    # `copy.deepcopy` refuses tensors that have a graph.
    for module, _, name in _computed_weights(model):
        weight = vars(module)[name]
        memo[id(weight)] = weight.detach().to(device, copy=True)
    held = [value for module in model.modules() for value in (module, *vars(module).values())]
    inside = set(map(id, held))
    for part in (part for module in model.modules() for hook in hooks_of(module) for part in _parts(hook)):
        # A hook object outside of the model may hold state that all replicas share, or that cannot be copied.
        if id(part) not in inside and type(part) is not FunctionType:
            memo[id(part)] = part
    # Deepcopy would copy what a proxy refers to.
    memo.update((id(value), value) for value in held if type(value) in weakref.ProxyTypes)
    try:
        # A `__deepcopy__` of yours may draw, and is called as often as there are devices. Shards of an updater in
        # another thread may draw meanwhile.
        with DEFAULT_GENERATOR_LOCK, restored_generators():
            copied = copy.deepcopy(model, memo)
    except Exception as error:
        raise TypeError(
            f"`model` must be copyable by copy.deepcopy, got a {type(model).__name__} that raised "
            f"{type(error).__name__}: {error}. Keep locks, files, generators and results of earlier "
            "forwards out of its attributes, or define `__deepcopy__` for their class."
        ) from error
    copy_references(model, memo)
    _check_tensors_copied(model, copied, memo)
    return copied


def _copy_views(
    tensors: Iterable[torch.Tensor], known: Iterable[tuple[str, torch.Tensor]], memo: dict[int, Any]
) -> None:
    """Store in a memo the copies of tensors that share memory with parameters or buffers, so that they follow those.

    Args:
        tensors: Tensors in attributes.
        known: The parameters and buffers with their names, whose copies are in the memo.
        memo: The memo of the deepcopy.

    Raises:
        ValueError: If a tensor cannot be laid over the copy of the one whose memory it uses.
    """
    owners: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, owner in known:
        owners.setdefault(_memory_of(owner), []).append((name, owner))
    for each in tensors:
        # Tensors of other classes may run code of yours, and those that have a graph are refused.
        found = owners.get(_memory_of(each), []) if type(each) is torch.Tensor and each.grad_fn is None else []
        views = [_laid_over(each, owner, memo[id(owner)]) for _, owner in found if _memory_of(each)]
        view = next((view for view in views if view is not None), None)
        if view is not None:
            memo[id(each)] = view.requires_grad_(each.requires_grad)
        elif views:
            raise ValueError(
                "`model` must hold only views that lie within one of its parameters or buffers and have its dtype, got "
                f"a tensor of shape {tuple(each.shape)} and {each.dtype} in an attribute, which shares memory with "
                f"{found[0][0]!r}. Compute it in forward, or clone it if it is not to follow the values."
            )


def _laid_over(view: torch.Tensor, owner: torch.Tensor, copied: torch.Tensor) -> torch.Tensor | None:
    """Return for a view of a tensor's memory the same view of its copy; None if there is none."""
    if _memory_of(copied) == _memory_of(owner) or copied.is_meta:
        return view.detach().to(copied.device)
    first, end = view.storage_offset() - owner.storage_offset(), _extent(owner)
    alike = view.dtype == owner.dtype and view.is_conj() == owner.is_conj() and view.is_neg() == owner.is_neg()
    if not alike or copied.stride() != owner.stride() or first < 0 or first + _extent(view) > end:
        return None
    return copied.detach().as_strided(view.size(), view.stride(), copied.storage_offset() + first)


def _extent(tensor: torch.Tensor) -> int:
    """Return the number of elements from the first to the last one in memory."""
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _memory_of(tensor: torch.Tensor) -> int:
    """Return the address of the memory that a tensor is a part of, or 0 if it has none of its own."""
    # Other layouts have several parts, and wrappers of other tensors a storage that cannot be asked.
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided and tensor.data_ptr() else 0


def _check_tensors_copied(model: nn.Module, copied: nn.Module, memo: dict[int, Any]) -> None:
    """Check that a copy has exactly the tensors that were created for it, because updates reach no others.

    Args:
        model: The original.
        copied: Its copy.
        memo: The memo of the deepcopy, which has the tensors that were created.

    Raises:
        TypeError: If the copy lacks one of these tensors or has another one.
    """
    made = {id(memo[id(each)]): name for name, each in _named_tensors(model)}
    found = {id(each): name for name, each in _named_tensors(copied)}
    differing = [name for each, name in (found | made).items() if (each in made) != (each in found)]
    if differing:
        raise TypeError(
            f"`model` must pass the memo of `__deepcopy__` on to copy.deepcopy, got a {type(model).__name__} whose "
            f"copy has another {differing[0]!r}."
        )


def _named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """List the parameters and buffers of a model, each one once."""
    return [*model.named_parameters(), *model.named_buffers()]


def _check_forward_writes_no_parameter(model: nn.Module) -> None:
    """Check that no module writes to a parameter in forward, which shards on other devices would see.

    Args:
        model: The model to check.

    Raises:
        ValueError: If an embedding bounds its norms in forward.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ValueError(
                "`model` must not write to its parameters in forward, got an "
                f"{type(module).__name__} with max_norm={module.max_norm} at {name!r}. "
                "Bound the norms in an optimizer step post hook instead."
            )


def _copy_parameter(parameter: nn.Parameter, device: torch.device, *, shares: bool) -> nn.Parameter:
    """Return a parameter that shares the memory and version counter of another one, or a copy on a device.

    Args:
        parameter: The parameter of the model.
        device: The device of the copy.
        shares: Whether to share memory instead of copying.
    """
    values = parameter.detach() if shares else parameter.detach().to(device, copy=True)
    kind: type = type(parameter)
    copied = nn.Parameter(values, requires_grad=parameter.requires_grad)
    # A tensor of any class may be a parameter. The constructor of a subclass may have other arguments.
    if issubclass(kind, nn.Parameter) and kind is not nn.Parameter:
        copied = torch.Tensor._make_subclass(kind, values, parameter.requires_grad)  # noqa: SLF001 - no public way
    # Attributes that users or libraries set on a parameter belong to it.
    copied.__dict__.update(parameter.__dict__)
    return copied


def _computed_weights(model: nn.Module) -> list[tuple[nn.Module, Any, str]]:
    """List the weights that hooks of torch compute before each forward: the module, the hook and the attribute."""
    found = [
        # There is no public way to the name of a pruned tensor.
        (module, hook, hook._tensor_name if isinstance(hook, BasePruningMethod) else hook.name)  # noqa: SLF001
        for module in model.modules()
        for hook in vars(module)["_forward_pre_hooks"].values()
        if isinstance(hook, BasePruningMethod | SpectralNorm | WeightNorm)
    ]
    return [(module, hook, name) for module, hook, name in found if name in vars(module)]


def hooks_of(module: nn.Module) -> list[Any]:
    """List the hooks of a module.

    Args:
        module: The module.
    """
    return [hook for name in HOOK_NAMES for hook in vars(module)[name].values()]


def _parts(hook: object) -> list[object]:
    """List the objects that deepcopy would reach through a hook."""
    if isinstance(hook, MethodType):
        return [hook.__self__]
    if isinstance(hook, partial):
        return [*_parts(hook.func), *hook.args, *hook.keywords.values()]
    return [hook]


class ModelChangeDetector:
    """A record of a model, to detect changes that its copies would not see.

    The values of parameters and buffers are not recorded, because parameters share memory or are copied before each
    use, and buffers before each shard. What is detected: attributes set to another object (including ``train()``
    and ``eval()``), modules, parameters, buffers or hooks that are added, replaced or removed, a parameter that
    is frozen or moved to other memory (``model.double()``, ``parameter.data = …``), attributes of parameters and
    buffers, and in-place changes of a list, dict, set, module, array, tensor or other object in an attribute, of which
    replicas have copies. What is not detected: in-place changes of what has thousands of entries.

    A comparison takes about 1 µs per module and 0.3 µs per parameter.

    Args:
        model: The model to record.
        copied: Whether there are replicas with memory of their own, to which values must fit.
        memo: The memo of the deepcopy. Objects without a copy, such as loggers, are shared by all replicas, and are
            not compared.
    """

    def __init__(self, model: nn.Module, *, copied: bool, memo: Mapping[int, Any]) -> None:
        self._reads: Sequence[Callable[[Any], object]] = LAYOUT if copied else ADDRESS
        # Lists, so that the comparison of every update runs without a loop in Python.
        self._current: list[Any] = [watched for module in model.modules() for watched in _watched_dicts(module)]
        held = _values_of(model, memo)
        self._objects = [(each, attributes(each)) for each in held.objects]
        self._parameters = [*model.parameters(), *held.parameters]
        self._tensors, self._arrays = held.tensors, held.arrays
        self._current += held.containers
        self._current += [vars(each) for each in (*self._parameters, *model.buffers())]
        # By their values, also small tensors: batch normalization and a write to `tensor.data` do not increment the
        # version counter.
        by_values = [*held.buffers, *filter(_is_small, held.tensors)]
        self._values = [(each, each.detach().clone()) for each in by_values]
        self.computed = _computed_weights(model)
        # They equal others of the same value.
        self._single = [
            (module._parameters, name, parameter)
            for module in model.modules()
            for name, parameter in module.named_parameters(recurse=False)
            if not isinstance(parameter, nn.UninitializedParameter) and parameter.numel() == 1
        ]
        self._recorded = [_shallow_copy(watched) for watched in self._current]
        # Dicts of the same entries are equal in any order, in which a forward may call them.
        dicts = [*(module._modules for module in model.modules()), *held.containers]
        self._dicts = [each for each in dicts if isinstance(each, dict) and len(each) > 1]
        self._orders = list(map(list, self._dicts))
        self._bytes = list(map(_bytes_of, self._arrays))
        self._versions = list(map(VERSION, self._tensors))
        self._requires_grad = list(map(REQUIRES_GRAD, self._parameters))
        self._layouts = [list(map(read, self._parameters)) for read in self._reads]

    def fits(self) -> bool:
        """Return whether the parameters still have the same memory, and the layouts of copies."""
        for read, layouts in zip(self._reads, self._layouts, strict=True):
            if list(map(read, self._parameters)) != layouts:
                return False
        return True

    def compute_weights(self) -> None:
        """Compute the weights of the model that hooks of `prune` and `weight_norm` set in a forward, without a graph.

        The model itself is never run, and pruning it once more reads these weights.
        """
        for module, hook, name in self.computed:
            # A hook that was removed since has left a parameter of this name, or nothing. The weight of a spectral norm
            # depends on the buffers that a forward leaves.
            if name in vars(module) and not isinstance(hook, SpectralNorm):
                compute = getattr(hook, "apply_mask" if isinstance(hook, BasePruningMethod) else "compute_weight")
                with torch.no_grad():
                    computed = compute(module)
                # By `data`, so that the tensor does not count as changed.
                vars(module)[name].data.copy_(computed)

    def changed(self) -> bool:
        """Return whether the model differs from the record."""
        if (
            not self.fits()
            or list(map(REQUIRES_GRAD, self._parameters)) != self._requires_grad
            or list(map(VERSION, self._tensors)) != self._versions
            or (self._arrays and list(map(_bytes_of, self._arrays)) != self._bytes)
            or (self._single and not all(registry.get(name) is each for registry, name, each in self._single))
            or list(map(list, self._dicts)) != self._orders
            or (self._values and not all(now.shape == old.shape and now.equal(old) for now, old in self._values))
        ):
            return True
        try:
            return self._current != self._recorded or (
                bool(self._objects) and any(attributes(each) != before for each, before in self._objects)
            )
        except Exception:  # noqa: BLE001 - tensors and arrays refuse a comparison unless they are the same object
            return True


def _watched_dicts(module: nn.Module) -> list[dict[str, Any]]:
    """List the dicts of a module that define it."""
    attributes = vars(module)
    parts = ("_parameters", "_buffers", "_modules", *HOOK_NAMES)
    return [attributes, *(attributes[part] for part in parts)]


class HeldValues(NamedTuple):
    """What the attributes of a model's modules hold, to any depth.

    Attributes:
        containers: The lists, dicts and sets, and the dicts of objects and of modules that are not registered.
        objects: The objects that have attributes outside of a dict.
        tensors: The tensors.
        arrays: The arrays of NumPy, and other objects that are memory, such as those of `array` and `ctypes`.
        parameters: The parameters, which belong to modules that are not registered.
        buffers: The buffers of these modules.
    """

    containers: list[Any]
    objects: list[Any]
    tensors: list[torch.Tensor]
    arrays: list[Any]
    parameters: list[nn.Parameter]
    buffers: list[torch.Tensor]


def _values_of(model: nn.Module, memo: Mapping[int, Any] | None = None) -> HeldValues:
    """List what the attributes of a model's modules hold, besides its own parameters, buffers and modules.

    Args:
        model: The model.
        memo: The copies of objects by their ``id``; those without a copy are not listed. None to list all objects.
    """
    numpy = sys.modules.get("numpy")
    values = [value for each in model.modules() for value in _attributes_of(each)]
    seen = {id(each) for _, each in _named_tensors(model)}.union(map(id, model.modules()))
    held = HeldValues([], [], [], [], [], [])
    room = MOST_ENTRIES
    while values:
        value = values.pop()
        if id(value) in seen or isinstance(value, SHARED) or is_lazy(value):
            continue
        # By its own number: `vars` of an object is a dict that no attribute holds.
        seen.add(id(value))
        is_listed = memo is None or memo.get(id(value), value) is not value
        if isinstance(value, nn.Parameter):
            held.parameters.append(value)
        elif isinstance(value, torch.Tensor):
            # The version of an inference tensor is not counted.
            held.tensors.extend([] if value.is_inference() else [value])
        elif isinstance(value, nn.Module):
            held.containers.extend(_watched_dicts(value))
            held.buffers.extend(each for each in value._buffers.values() if each is not None)
            registered = [*value._modules.values(), *value._parameters.values()]
            values += [*_attributes_of(value), *registered]
        elif (size := _memory_size(value, numpy)) is not None:
            if size <= room and is_listed:
                room -= size
                held.arrays.append(value)
        else:
            container, parts = _contents_of(value)
            if len(parts) <= room:
                room -= len(parts)
                if is_listed:
                    held.containers.extend([] if container is None else [container])
                    held.objects.extend([value] if container is None and _has_members(value) else [])
                values += parts
    return held


def _attributes_of(module: nn.Module) -> list[Any]:
    """List the values of the attributes that not every module has."""
    return [value for name, value in vars(module).items() if name not in OF_MODULES]


def hidden_parameters(model: nn.Module) -> list[nn.Parameter]:
    """List the parameters of modules that a model holds without registering them, as in a list.

    Args:
        model: The model.
    """
    return _values_of(model).parameters


def held_tensors(model: nn.Module) -> list[torch.Tensor]:
    """List the tensors that a model holds besides its parameters and buffers.

    Args:
        model: The model.
    """
    held = _values_of(model)
    return [*held.parameters, *held.buffers, *held.tensors]


def check_no_lookups(containers: Iterable[Any], model: nn.Module, argument: str) -> None:
    """Check that parameters and modules are not looked up by identity, because replicas have other ones.

    Args:
        containers: The sets, dicts, lists and tuples to look at.
        model: The original model.
        argument: The name of the argument that holds them, for the error message.

    Raises:
        ValueError: If one of them holds the ``id`` of a parameter, or as a set or as the keys of a dict one of those
            of the original model, unless the model itself holds it.
    """
    names = {id(each): name for name, each in (*model.named_parameters(), *model.named_modules())}
    for container in containers:
        # By the built-in type, so that no code of a subclass runs.
        kind = next(each for each in CONTAINERS if issubclass(type(container), each))
        by_identity = kind not in {list, tuple, deque} and argument != "model"
        for each in list(kind.__iter__(container)):
            name = names.get(each) if type(each) is int else names.get(id(each)) if by_identity else None
            if name:
                raise ValueError(
                    f"`{argument}` must not look up parameters and modules by identity, because it is given replicas, "
                    f"got a {type(container).__name__} with {name!r} of the original model. Look them up by name, with "
                    "named_parameters() or named_modules() of the model that is given."
                )


def _contents_of(value: Any) -> tuple[Any, list[Any]]:
    """Return the list, dict, set or deque that changes with the contents of a value, if there is one, and the contents.

    A tuple does not change, but what it holds may.
    """
    kind = next((each for each in CONTAINERS if isinstance(value, each)), None)
    if kind is not None:
        parts = listed(lambda: dict.values(value) if kind is dict else kind.__iter__(value))
        return None if kind in {tuple, frozenset} else value, parts
    own = getattr(value, "__dict__", None)
    container = own if isinstance(own, dict) and not _has_members(value) else None
    return container, list(attributes(value).values())


def _memory_size(value: Any, numpy: ModuleType | None) -> int | None:
    """Return the number of elements of an array, or of bytes of another object that is memory; None for others."""
    if numpy is not None and isinstance(value, numpy.ndarray):
        return int(value.size)
    try:
        return memoryview(value).nbytes
    except TypeError:
        return None


def _bytes_of(array: Any) -> bytes:
    # Arrays of objects and of dates have no memory that a view could show.
    return array.tobytes() if hasattr(array, "tobytes") else bytes(memoryview(array))


def _has_members(value: Any) -> bool:
    """Return whether an object has attributes that are not in its dict, because its class has `__slots__`."""
    return not isinstance(value, CONTAINERS) and any(
        type(each) is MemberDescriptorType and name != "__dict__"
        for base in type(value).__mro__
        for name, each in vars(base).items()
    )


def _is_small(tensor: torch.Tensor) -> bool:
    """Return whether the values of a tensor can be compared in each update."""
    plain = tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_nested
    # Nodes of an exported graph hold tensors without values.
    return plain and not isinstance(tensor, FakeTensor) and tensor.numel() <= MOST_ENTRIES


def _shallow_copy(container: Any) -> Any:
    """Copy a container without its contents, as a built-in type, whose comparison runs none of its owner's code."""
    return next(kind(container) for kind in CHANGING if isinstance(container, kind))


_FSDP: Final = "torch.distributed.fsdp"

_INSIDE: Final = "give the module inside of it, `model.module`"
_UNSHARDED: Final = "give the model as it was before FSDP sharded it"


def refuse_wrapped(model: nn.Module, argument: str, *, copied: bool = True) -> None:
    """Refuse a model that is, or holds, a module that computes on several devices by itself, or TorchScript to copy.

    Such a module would sum its gradients over the ranks during backward, shard by shard, or hang where ranks have
    different numbers of shards. So would the batch statistics of a `torch.nn.SyncBatchNorm`.

    Args:
        model: The model.
        argument: The name of the argument for the error message.
        copied: Whether the model will be copied, so that a TorchScript module is refused.

    Raises:
        TypeError: There is a `DistributedDataParallel`, a `torch.nn.DataParallel`, a module sharded by FSDP, a
            `torch.nn.SyncBatchNorm`, or a TorchScript module.
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
        if copied and isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"`{argument}` must hold no TorchScript modules, whose copies cannot share memory, got a "
                f"{type(module).__name__}{where}. Pass the module that it was created from."
            )
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
