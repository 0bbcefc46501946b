"""Describe a model as an update needs it: its parameters and buffers, and a runner for each replica."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import FunctionType
from typing import Any, Final

import torch
from torch import nn

from lockstep.errors import warn
from lockstep.metrics import Observers, report
from lockstep.replicas import BufferRef, BufferRules, ReplicaSet, ShardRunner, TreeSum, buffer_refs, create_runner
from lockstep.state import temporarily
from lockstep.updaters.compute.early_send import can_be_merged
from lockstep.updaters.setup.recipe import Recipe

PACKAGES: Final = ("lightning.pytorch", "pytorch_lightning")
"""The modules that a `LightningModule` may come from; neither is imported here."""
LIBRARIES: Final = ("builtins", "lightning", "lightning_fabric", "pytorch_lightning", "torch")
"""Packages whose own methods may read anything."""
OF_TRAINERS: Final = frozenset({"global_step", "current_epoch"})
"""The attributes of a `LightningModule` that are 0 without a Lightning Trainer."""
HOOKS: Final = frozenset(
    {"backward", "configure_gradient_clipping", "lr_scheduler_step", "on_after_backward", "on_before_optimizer_step"}
    | {"on_before_zero_grad", "on_train_batch_end", "on_train_batch_start", "optimizer_step", "optimizer_zero_grad"}
)
"""The methods of a `LightningModule` by which a Lightning Trainer lets it change an update."""


def observe_logs(replica: nn.Module) -> None:
    """Redirect `log` and `log_dict` of the LightningModules in a replica to `report`.

    Without a Lightning Trainer they do nothing. Only this copy of the model is changed.

    Args:
        replica: The replica.
    """
    imported = [vars(sys.modules[name]) for name in PACKAGES if name in sys.modules]
    kinds = tuple(names["LightningModule"] for names in imported if "LightningModule" in names)
    for module in replica.modules() if kinds else ():
        if isinstance(module, kinds):
            # Attributes of the object, which are found before the methods of its class.
            vars(module)["log"] = partial(_log, module)
            vars(module)["log_dict"] = partial(_log_dict, module)
            own = [base for base in type(module).__mro__ if base.__module__.split(".")[0] not in LIBRARIES]
            hooks = HOOKS & {name for base in own for name in vars(base)}
            if hooks:
                warn(
                    f"{type(module).__name__} overrides {' and '.join(sorted(hooks))}, which nothing calls because no "
                    "Lightning Trainer runs. Pass clip_grad_norm=, scheduler= or an optimizer with a hook to the "
                    "updater, or write a step function (`step_fn`); call what follows an update in an extension."
                )
            read = OF_TRAINERS & _names(own)
            if read:
                warn(
                    f"{type(module).__name__} reads {' and '.join(sorted(read))}, which stay 0 because no Lightning "
                    "Trainer runs. Read updater.iteration and updater.epoch in the loss function instead, and pass "
                    "them to the step."
                )


def _names(own: Iterable[type]) -> set[str]:
    """Return the names in the methods of classes."""
    methods = [each for base in own for each in vars(base).values() if type(each) is FunctionType]
    return {name for method in methods for name in method.__code__.co_names}


def _log(
    module: nn.Module,
    name: str,
    value: Any,
    *_: object,
    reduce_fx: object = "mean",
    batch_size: int | None = None,
    **__: object,
) -> None:
    """Report one value; the options of Lightning that concern its own loggers and progress bar are ignored."""
    reduction = getattr(reduce_fx, "__name__", reduce_fx)
    if reduction != "mean":
        raise ValueError(
            f"`reduce_fx` of log({name!r}) must be 'mean', got {reduction!r}. lockstep averages values over samples; "
            "log others in an extension of the trainer."
        )
    if isinstance(value, nn.Module):
        raise TypeError(
            f"`value` of log({name!r}) must be a number or a tensor, got a {type(value).__name__}. Log its value for "
            "the batch, or pass the metric to lockstep.extensions.Evaluator."
        )
    if isinstance(value, Mapping):
        for key, each in value.items():
            _log(module, f"{name}/{key}", each, batch_size=batch_size)
        return
    report({name: value}, module, weight=batch_size)


def _log_dict(module: nn.Module, dictionary: Mapping[str, Any], *_: object, **options: Any) -> None:
    """Report several values."""
    for name, value in dictionary.items():
        _log(module, name, value, **options)


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """What an update needs to know about a model; valid until the model changes.

    Attributes:
        tree_sum: Sums gradients over the devices.
        named_parameters: The parameters that require a gradient, by name, in the order of `Attempt.gradients`.
        parameters: The same parameters without their names.
        frozen: The parameters that do not require a gradient.
        buffer_refs: References to the model's buffers.
        like: Tensors with the shapes, dtypes and devices of the gradients.
        runners: The runner of each replica.
        observers: For each replica, the modules under the names that they report by.
        has_large: Whether there are gradients that are added to the sums during backward.
    """

    tree_sum: TreeSum
    named_parameters: Mapping[str, nn.Parameter] = field(default_factory=dict)
    parameters: Sequence[nn.Parameter] = ()
    frozen: Sequence[nn.Parameter] = ()
    buffer_refs: Sequence[BufferRef] = ()
    like: Sequence[torch.Tensor] = ()
    runners: Sequence[ShardRunner] = ()
    observers: Sequence[Observers] = ()
    has_large: bool = False

    @classmethod
    def of(cls, replicas: ReplicaSet, recipe: Recipe) -> PreparedModel:
        """Prepare a model whose replicas are up to date.

        Args:
            replicas: The model and its replicas.
            recipe: The arguments of the updater.

        Raises:
            ValueError: If no parameter requires a gradient.
        """
        model = replicas.model
        named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        if not named:
            raise ValueError("`model` must have a parameter that requires a gradient, got none.")
        parameters = list(named.values())
        _check_hooks(named)
        _check_buffers(replicas.model)
        # A model that is held in half precision has its gradients summed in float32, in which sums lose far fewer bits.
        held = recipe.precision_policy.held_dtype is not None
        like = [_float32_like(each) if held else each.detach() for each in parameters]
        return cls(
            TreeSum(replicas, [parameter.numel() for parameter in parameters]),
            named,
            parameters,
            [parameter for parameter in model.parameters() if not parameter.requires_grad],
            buffer_refs(model, recipe.buffers),
            like,
            recording_runners(replicas, recipe.buffers),
            [Observers({"": replica}) for replica in replicas.replicas],
            any(map(can_be_merged, parameters)),
        )

    def with_replica(self, place: int, replica: nn.Module, replicas: ReplicaSet, rules: BufferRules) -> PreparedModel:
        """Return the same model with another replica on one device.

        Args:
            place: The index of the device.
            replica: The replica.
            replicas: The model and the replicas of this object.
            rules: The rules that combine buffers over shards.
        """
        runners, observers = [*self.runners], [*self.observers]
        runners[place], observers[place] = recording_runner(replicas, place, replica, rules), Observers({"": replica})
        return replace(self, runners=runners, observers=observers)

    @contextmanager
    def only(self, wanted: frozenset[int], runner: ShardRunner) -> Iterator[None]:
        """Disable the gradients of other parameters of a replica temporarily, so that backward skips them.

        Args:
            wanted: The parameters that are to get a gradient, by ``id``.
            runner: The runner of the replica.
        """
        pairs = zip(self.parameters, runner.parameters, strict=True)
        others = [copied for parameter, copied in pairs if id(parameter) not in wanted]
        with ExitStack() as stack:
            for each in others:
                stack.enter_context(temporarily(each, requires_grad=False))
            yield


def recording_runners(replicas: ReplicaSet, rules: BufferRules = "mean") -> list[ShardRunner]:
    """Return a runner for each replica, which also records what the replica logs.

    Args:
        replicas: The model and its replicas, up to date.
        rules: The rules that combine buffers over shards.
    """
    return [recording_runner(replicas, place, replica, rules) for place, replica in enumerate(replicas.replicas)]


def recording_runner(replicas: ReplicaSet, place: int, replica: nn.Module, rules: BufferRules) -> ShardRunner:
    """Return the runner of one replica; see `recording_runners`."""
    observe_logs(replica)
    return create_runner(replicas, place, replica, rules, names_batches=True)


def _float32_like(parameter: torch.Tensor) -> torch.Tensor:
    """Return a float32 tensor with the shape and device of a parameter, backed by a single element."""
    return torch.empty((), dtype=torch.float32, device=parameter.device).expand(parameter.shape)


def _check_hooks(named: Mapping[str, nn.Parameter]) -> None:
    """Check that no hook waits for the gradients of several parameters in one backward, which a batch does not have."""
    for name, parameter in named.items():
        for hook in (parameter._backward_hooks or {}).values():
            if "register_multi_grad_hook" in getattr(hook, "__qualname__", ""):
                raise ValueError(
                    f"`model` must have no hooks of several gradients (register_multi_grad_hook), got one on {name!r}. "
                    "Use Tensor.register_hook on each parameter, or a hook of the optimizer's step."
                )


def _check_buffers(model: nn.Module) -> None:
    """Check that buffers are dense, because the bits that shards leave in them are compared."""
    for name, buffer in model.named_buffers():
        if buffer.layout is not torch.strided:
            raise ValueError(
                f"`model` must have dense buffers, got {name!r} of the layout {buffer.layout}. Keep it in a plain "
                "attribute of its module, or call to_dense() on it."
            )
