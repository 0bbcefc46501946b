"""References to the buffers of modules, and the rules by which the buffers of shards are combined."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias, get_args

import torch
from torch import nn

BufferRule: TypeAlias = Literal["mean", "first", "sum", "min", "max"]
"""The rule by which a buffer of several shards is combined, as the docstring of `replicas.buffers` describes."""

BufferRules: TypeAlias = BufferRule | Mapping[str, BufferRule]
"""One rule for all buffers, or rules by name or pattern."""


@dataclass(frozen=True, slots=True)
class BufferRef:
    """A reference to a buffer of a module, by name, because a forward may assign another tensor to that name.

    Attributes:
        module: The module.
        name: The name of the buffer in the module.
        path: The name of the buffer in the model.
        rule: The rule by which the buffers of shards are combined.
    """

    module: nn.Module
    name: str
    path: str
    rule: BufferRule = "mean"

    def get(self) -> torch.Tensor | None:
        """Return the tensor that the module has now."""
        return self.module._buffers[self.name]

    def set(self, tensor: torch.Tensor | None) -> None:
        """Assign a tensor, or None, to the name.

        Args:
            tensor: The new tensor.
        """
        self.module._buffers[self.name] = tensor


def buffer_refs(model: nn.Module, rules: BufferRules = "mean") -> list[BufferRef]:
    """List the buffers of a model, each tensor once, in an order that is the same for copies of the model.

    Args:
        model: The model.
        rules: The rules of the buffers.

    Raises:
        ValueError: If a name or pattern fits no buffer, or a buffer has no numbers for its rule.
    """
    every = all_buffer_refs(model, rules)
    for pattern in rules if isinstance(rules, Mapping) else ():
        if not any(fnmatchcase(ref.path, pattern) for ref in every):
            raise ValueError(
                f"`buffers` must name buffers of the model ({[ref.path for ref in every]}), got {pattern!r}."
            )
    refs: dict[int, BufferRef] = {}
    for ref in every:
        buffer = ref.get()
        if buffer is not None:
            refs.setdefault(id(buffer), ref)
            if (buffer.dtype is torch.bool and ref.rule == "sum") or (
                buffer.is_complex() and ref.rule in ("min", "max")
            ):
                raise ValueError(f"`buffers` must not be {ref.rule!r} for {ref.path!r}, which is {buffer.dtype}.")
    return list(refs.values())


def all_buffer_refs(model: nn.Module, rules: BufferRules = "mean") -> list[BufferRef]:
    """List every name under which a module has a buffer, including names that are None.

    Args:
        model: The model.
        rules: The rules of the buffers.
    """
    paths = [
        (module, name, f"{prefix}.{name}" if prefix else name)
        for prefix, module in model.named_modules()
        for name in module._buffers
    ]
    return [BufferRef(module, name, path, _rule_of(path, rules)) for module, name, path in paths]


def _rule_of(path: str, rules: BufferRules) -> BufferRule:
    """Return the rule of a buffer: that of its name, or else that of the first pattern that fits, or else the mean."""
    if not isinstance(rules, Mapping):
        return rules
    fitting = [rule for pattern, rule in rules.items() if fnmatchcase(path, pattern)]
    return rules.get(path, next(iter(fitting), "mean"))


def check_rules(rules: object) -> None:
    """Check the argument `buffers`.

    Args:
        rules: The argument.

    Raises:
        ValueError: If there is an unknown rule.
    """
    for rule in rules.values() if isinstance(rules, Mapping) else [rules]:
        if rule not in get_args(BufferRule):
            choices = ", ".join(map(repr, get_args(BufferRule)))
            raise ValueError(
                f"`buffers` must be one of {choices}, or a dict of these by name or pattern, got {rule!r}."
            )


def trained_buffers(
    model: nn.Module, refs: Sequence[BufferRef] | None = None, *, frozen: Collection[str] = ()
) -> dict[int, tuple[str, torch.Tensor]]:
    """Return the buffers of a model that currently require a gradient: name and tensor by the index in `buffer_refs`.

    Args:
        model: The model. It is not modified.
        refs: The `buffer_refs` of the model, if they are known.
        frozen: The names of buffers to leave out.
    """
    tensors = [ref.get() for ref in (buffer_refs(model) if refs is None else refs)]
    # The usual case returns before the names are collected, which takes longer.
    if not any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return {}
    return {
        index: (name, tensor)
        for index, (name, tensor) in enumerate(model.named_buffers())
        if tensor.requires_grad and name not in frozen
    }


def check_no_computed_buffers(model: nn.Module) -> None:
    """Check that buffers that require gradients are leaf tensors, because gradients end at the buffers.

    Args:
        model: The model. It is not modified.

    Raises:
        ValueError: If a buffer that requires a gradient was computed from other tensors.
    """
    for name, buffer in trained_buffers(model).values():
        if not buffer.is_leaf:
            raise ValueError(
                "`model` must have leaf tensors as buffers where they require gradients, got "
                f"{name!r}, which was computed from other tensors: their gradients would be lost. "
                "Compute it in forward, or register it detached."
            )


def check_no_trained_buffers(model: nn.Module, refs: Sequence[BufferRef] | None = None) -> None:
    """Check that no buffer requires a gradient, because only parameters are trained.

    Args:
        model: The model. It is not modified.
        refs: The `buffer_refs` of the model, if they are known.

    Raises:
        ValueError: If a buffer requires a gradient.
    """
    for name, _ in trained_buffers(model, refs).values():
        raise ValueError(
            f"`model` must have no buffers that require gradients, got {name!r}. Register it as an "
            "nn.Parameter to train it, or call requires_grad_(False) on it."
        )
