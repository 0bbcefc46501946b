"""Describe functions and modules by text that is equal for equal code in every process."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from lockstep.updaters.loss import Supervised


def name_of(value: object) -> str | None:
    """Return the qualified name of a function, or of the class of an object; None for None.

    >>> name_of(nn.functional.relu), name_of(partial(nn.functional.relu, inplace=True)), name_of(nn.ReLU())
    ('relu', 'relu', 'ReLU')
    """
    if value is None:
        return None
    if isinstance(value, partial):
        return name_of(value.func)
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def code_text(value: Any) -> str | None:
    """Return the name of a function, with the options of PyTorch's criteria and the numbers of a partial.

    >>> code_text(partial(nn.functional.cross_entropy, label_smoothing=0.1))
    'cross_entropy(label_smoothing=0.1)'
    """
    if isinstance(value, Supervised):
        return f"supervised({code_text(value.criterion)})"
    options: dict[str, Any] = {}
    if isinstance(value, nn.Module) and is_of_torch(value):
        options = {name: each for name, each in vars(value).items() if name != "training" and name[0] != "_"}
    elif isinstance(value, partial):
        # Text may be the name of a device.
        options = {name: each for name, each in value.keywords.items() if not isinstance(each, str)}
    shown = [
        f"{name}={option!r}" for name, option in sorted(options.items()) if isinstance(option, bool | int | float | str)
    ]
    return f"{name_of(value)}({', '.join(shown)})" if shown else name_of(value)


def is_of_torch(module: nn.Module) -> bool:
    """Return whether the class of a module is PyTorch's own."""
    return type(module).__module__.startswith("torch.nn.")


def module_text(module: nn.Module) -> str:
    """Return the class of a module; with its options if it is PyTorch's own and has its shape.

    >>> module_text(nn.Dropout(0.1))
    'Dropout(p=0.1, inplace=False)'
    """
    # Other classes may describe themselves by what differs between processes, such as addresses.
    if not is_of_torch(module) or any(map(is_lazy, module.parameters(recurse=False))):
        return type(module).__qualname__
    return f"{type(module).__qualname__}({module.extra_repr()})"
