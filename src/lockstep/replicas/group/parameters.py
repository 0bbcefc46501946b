"""Write and share the parameters and buffers of a model by name, either all of them or none."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn


@torch.no_grad()
def write_parameters(
    model: nn.Module,
    parameters: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor] | None,
    *,
    allow_missing: bool,
    allow_extra: bool,
) -> None:
    """Copy values into a model, unless one of them does not fit.

    Args:
        model: The model, which is changed in place. Values are converted to its devices and dtypes.
        parameters: The parameters, by any of their names.
        buffers: The buffers by name, or None to leave all of them unchanged.
        allow_missing: Whether parameters and buffers may be missing, which are then left unchanged.
        allow_extra: Whether names may occur that the model does not have, which are then ignored.

    Raises:
        TypeError: If a value is not a tensor.
        ValueError: If names are missing or unknown, all of which the message lists, or a shape differs.
    """
    persistent = model.state_dict()
    parameters_by_name: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    buffers_by_name: dict[str, torch.Tensor] = dict(model.named_buffers(remove_duplicate=False))
    written_buffers = {} if buffers is None else buffers_by_name
    given = [(name, parameters_by_name.get(name), value) for name, value in parameters.items()]
    given += [(name, written_buffers.get(name), value) for name, value in (buffers or {}).items()]
    pairs = [(name, target, value) for name, target, value in given if target is not None]
    # By identity, because a tied parameter may be given by any of its names.
    written = {id(target) for _, target, _ in pairs}
    wanted = [
        *model.named_parameters(),
        *((name, each) for name, each in written_buffers.items() if name in persistent),
    ]
    missing = [name for name, each in wanted if id(each) not in written]
    extra = [name for name, target, _ in given if target is None]
    _check_names([] if allow_missing else missing, [] if allow_extra else extra)
    # Everything is checked before the first value is written.
    for name, target, value in pairs:
        _check(name, target, value)
    for _, target, value in pairs:
        target.copy_(value)


def _check_names(missing: list[str], extra: list[str]) -> None:
    """Check that no names are missing or unknown.

    Args:
        missing: The names that are missing.
        extra: The names that the model does not have.

    Raises:
        ValueError: If there are any. The message lists all of them.
    """
    problems = [f"{', '.join(missing)} missing"] if missing else []
    problems += [f"{', '.join(extra)} unknown"] if extra else []
    if problems:
        raise ValueError(
            f"`parameters` and `buffers` must have the names of the model's, got {' and '.join(problems)}. "
            "Nothing was changed. Use allow_missing or allow_extra to permit this."
        )


def _check(name: str, target: torch.Tensor, value: torch.Tensor) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"`{name}` must be a tensor, got a {type(value).__name__}. Nothing was changed.")
    if value.shape != target.shape:
        raise ValueError(
            f"`{name}` must have shape {tuple(target.shape)}, got {tuple(value.shape)}. Nothing was changed."
        )


def share_parameters(model: nn.Module, shared: nn.Module) -> None:
    """Replace parameters and buffers of a model by those of another model with the same names.

    The models then share the memory of these tensors and their gradients.

    Args:
        model: The model to change. It also takes over ties between these tensors.
        shared: The other model. It is not modified.

    Raises:
        ValueError: If tensors of the same name differ in shape or dtype, or are tied in only one of the models. Nothing
            has changed in that case.
    """
    own, sources = _named_tensors(model), _named_tensors(shared)
    replaced: dict[int, torch.Tensor] = {}
    for name, tensor in own.items():
        if name in sources:
            _check_can_share(name, tensor, sources[name])
            # A tensor with two names must get one replacement, or the tie would be lost.
            if replaced.setdefault(id(tensor), sources[name]) is not sources[name]:
                raise ValueError(
                    f"`shared_group` must tie {name!r} as the model does, got two tensors. Nothing was changed."
                )
    for name, tensor in own.items():
        if id(tensor) in replaced:
            path, _, last = name.rpartition(".")
            setattr(model.get_submodule(path), last, replaced[id(tensor)])


def _named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a model by each of their names."""
    parameters = model.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(model.named_buffers(remove_duplicate=False))}


def _check_can_share(name: str, own: torch.Tensor, source: torch.Tensor) -> None:
    """Check that two tensors of the same name have the same kind, shape and dtype."""
    kinds = [isinstance(each, nn.Parameter) for each in (own, source)]
    if kinds[0] is not kinds[1] or own.shape != source.shape or own.dtype != source.dtype:
        raise ValueError(
            f"`shared_group` must have {name!r} as {_describe(own)}, got {_describe(source)}. Nothing was changed."
        )


def _describe(tensor: torch.Tensor) -> str:
    kind = "a parameter" if isinstance(tensor, nn.Parameter) else "a buffer"
    return f"{kind} of shape {tuple(tensor.shape)} and {tensor.dtype}"
