"""Read and write the parameters and buffers of a model by name: all of them, or none."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn


def read_parameters(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Copy the parameters, and the buffers that belong to a model's state, each once by its first name."""
    persistent = model.state_dict()
    parameters = {name: each.detach().clone() for name, each in model.named_parameters()}
    buffers = {name: each.detach().clone() for name, each in model.named_buffers() if name in persistent}
    return parameters, buffers


@torch.no_grad()
def write_parameters(
    model: nn.Module,
    parameters: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor] | None,
    *,
    allow_missing: bool,
    allow_extra: bool,
) -> None:
    """Copy values into a model; where something does not fit, nothing is changed.

    Args:
        model: Changed in place; values are brought to its devices and dtypes.
        parameters: By any of the names they have.
        buffers: By name; None leaves all of them alone.
        allow_missing: Leave what is not named as it is.
        allow_extra: Pass over names the model does not have.

    Raises:
        TypeError: A value is no tensor.
        ValueError: Names are missing or unknown, all of which are told, or a shape differs.
    """
    persistent = model.state_dict()
    trained: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    kept: dict[str, torch.Tensor] = dict(model.named_buffers(remove_duplicate=False))
    states = {} if buffers is None else kept
    given = [(name, trained.get(name), value) for name, value in parameters.items()]
    given += [(name, states.get(name), value) for name, value in (buffers or {}).items()]
    pairs = [(name, target, value) for name, target, value in given if target is not None]
    written = {id(target) for _, target, _ in pairs}
    wanted = [
        *model.named_parameters(),
        *((name, each) for name, each in states.items() if name in persistent),
    ]
    missing = [name for name, each in wanted if id(each) not in written]
    extra = [name for name, target, _ in given if target is None]
    _refuse_names([] if allow_missing else missing, [] if allow_extra else extra)
    for name, target, value in pairs:
        _check(name, target, value)
    for _, target, value in pairs:
        target.copy_(value)


def _refuse_names(missing: list[str], extra: list[str]) -> None:
    """Tell of all names that do not fit at once."""
    problems = [f"{', '.join(missing)} missing"] if missing else []
    problems += [f"{', '.join(extra)} unknown"] if extra else []
    if problems:
        raise ValueError(
            f"`parameters` and `buffers` must have the names of the model's, got {' and '.join(problems)}. "
            "Nothing was changed; allow_missing and allow_extra permit this."
        )


def _check(name: str, target: torch.Tensor, value: torch.Tensor) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"`{name}` must be a tensor, got a {type(value).__name__}. Nothing was changed.")
    if value.shape != target.shape:
        raise ValueError(
            f"`{name}` must have shape {tuple(target.shape)}, got {tuple(value.shape)}. Nothing was changed."
        )


def share_parameters(model: nn.Module, shared: nn.Module) -> None:
    """Let a model use another one's parameters and buffers wherever names agree: same memory, same gradients.

    Args:
        model: Its parameters and buffers are replaced; ties between them that the other has are taken over.
        shared: Left untouched.

    Raises:
        ValueError: Something of one name has different shapes or dtypes, or is tied in one model only;
            nothing was changed.
    """
    sources = {
        **dict(shared.named_parameters(remove_duplicate=False)),
        **dict(shared.named_buffers(remove_duplicate=False)),
    }
    slots = [
        (table, name, f"{path}.{name}".lstrip("."), own)
        for path, module in model.named_modules(remove_duplicate=False)
        for table in (module._parameters, module._buffers)
        for name, own in table.items()
        if own is not None
    ]
    replaced: dict[int, torch.Tensor] = {}
    for _, _, full, own in slots:
        if full in sources:
            _check_alike(full, own, sources[full])
            if replaced.setdefault(id(own), sources[full]) is not sources[full]:
                raise ValueError(
                    f"`shared_group` must tie {full!r} as the model does, got two tensors. Nothing was changed."
                )
    for table, name, _, own in slots:
        if id(own) in replaced:
            table[name] = replaced[id(own)]


def _check_alike(name: str, own: torch.Tensor, source: torch.Tensor) -> None:
    """Refuse to share what is not alike."""
    kinds = [isinstance(each, nn.Parameter) for each in (own, source)]
    if kinds[0] is not kinds[1] or own.shape != source.shape or own.dtype != source.dtype:
        raise ValueError(
            f"`shared_group` must have {name!r} as {_described(own)}, got {_described(source)}. Nothing was changed."
        )


def _described(tensor: torch.Tensor) -> str:
    kind = "a parameter" if isinstance(tensor, nn.Parameter) else "a buffer"
    return f"{kind} of shape {tuple(tensor.shape)} and {tensor.dtype}"
