"""Let a loss function or a module say what it measured, from the middle of its work."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextvars import ContextVar, Token
from typing import Final, SupportsFloat, TypeAlias

import torch
from torch import nn

_NAMELESS: Final = frozenset({"", "_orig_mod"})
"""Parts of a path that say nothing: of the model itself, and of the module inside a compiled one."""

Pair: TypeAlias = "tuple[float | torch.Tensor, float | torch.Tensor]"


@torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001 - the public one imports the compiler now
def report(
    values: Mapping[str, float | torch.Tensor],
    observer: nn.Module | None = None,
    *,
    weight: float | torch.Tensor | None = None,
) -> None:
    """Report mean values over the samples at hand, from a loss function or a module's forward.

    With value x and weight w of each shard, what is observed is the mean over all samples::

        Σ w·x / Σ w

    A value is observed as ``main/<name>``; one that a module reports about itself is observed as
    ``main/<path>/<name>``, with the path to it in the model: ``main/predictor/accuracy``. For the model
    itself the path is empty. An evaluation observes the same under its own name:
    ``validation/main/predictor/accuracy``.

    The same name reported again in a shard replaces what was there. So does a metric of that name which
    the loss function returns, and ``main/loss`` is always the loss of the update, whoever else reports it.

    Outside of a shard and of an evaluation nothing happens: a model that reports also runs by itself.
    The same holds during backward, so what activation checkpointing computes again does not count twice.
    ``torch.compile`` breaks its graph here; what it compiled goes by the name of the original.

    Args:
        values: By name; numbers, or tensors of one element, of which a copy stays on the device until
            somebody reads it.
        observer: The module the values are about: ``self``, where a module reports. A module of the
            model that runs, which in an updater is a replica.
        weight: How much the values stand for, at least 0: a number, or a tensor of one element.
            None for the number of samples of the shard or batch. With weight 0 the values count for nothing.

    Raises:
        TypeError: A name is no text, or a value or weight is no number.
        ValueError: A tensor has more than one element, a weight is negative or not finite, or the observer
            is no module of the model.

    Determinism: products are made in float64 and added up in order of shards, so the bits do not depend on
    the devices.

    References: the face is that of ``chainer.report`` (Tokui et al., "Chainer: A Deep Learning Framework for
    Accelerating the Research Cycle", 2019, arXiv:1908.00213).

    Example:
        >>> class Classifier(nn.Module):
        ...     def __init__(self) -> None:
        ...         super().__init__()
        ...         self.predictor = nn.Linear(2, 3)
        ...
        ...     def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        ...         scores = self.predictor(x)
        ...         report({"accuracy": (scores.argmax(1) == target).float().mean()}, self)
        ...         report({"size": scores.detach().abs().mean()}, self.predictor)
        ...         return nn.functional.cross_entropy(scores, target)
        >>> model = Classifier()
        >>> with collecting(Observers({"": model}), num_samples=4) as reports:
        ...     loss = model(torch.zeros(4, 2), torch.tensor([0, 1, 2, 0]))
        >>> sorted(reports.pairs)
        ['accuracy', 'predictor/size']
    """
    reports = _OPEN.get()
    if reports is not None:
        reports.take(values, observer, weight)


class Observers:
    """Finds the names of modules: their paths in a model, with slashes.

    Args:
        models: By the first part of the names; ``""`` for a model whose own values have no such part.

    >>> model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.ReLU()))
    >>> observers = Observers({"": model})
    >>> observers.prefix(model), observers.prefix(model[1][0])
    ('', '1/0/')
    """

    __slots__ = ("_models", "_prefixes")

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self._models = dict(models)
        self._prefixes: dict[nn.Module, str] | None = None

    def prefix(self, observer: nn.Module) -> str:
        """Give what comes before the names of a module's values.

        Raises:
            ValueError: It is no module of the models.
        """
        if self._prefixes is None or observer not in self._prefixes:
            # Only now, as most models report nothing; and again, as a model may have grown a module.
            self._prefixes = self._named()
        if observer not in self._prefixes:
            rule = "must be a module of the model that runs"
            remedy = "In a loss function take it from the model it is given, or leave it out."
            raise ValueError(f"`observer` {rule}, got a foreign {type(observer).__name__}. {remedy}")
        return self._prefixes[observer]

    def _named(self) -> dict[nn.Module, str]:
        """Name all modules; a module that is found twice keeps its first name."""
        prefixes: dict[nn.Module, str] = {}
        for name, model in self._models.items():
            for path, module in model.named_modules():
                parts = [part for part in (name, *path.split(".")) if part not in _NAMELESS]
                prefixes.setdefault(module, "".join(f"{part}/" for part in parts))
        return prefixes


class collecting:  # noqa: N801 - reads as a verb where it is used, like torch.no_grad
    """Collect what the calling thread reports inside a ``with``, hidden from whoever collects around it.

    Args:
        observers: Knows the modules that may report.
        num_samples: The weight of what comes without one.
    """

    __slots__ = ("_num_samples", "_observers", "_token", "pairs")

    def __init__(self, observers: Observers, num_samples: int) -> None:
        self._observers = observers
        self._num_samples = num_samples
        self.pairs: dict[str, Pair] = {}
        """Sum and weight by name."""

    def __enter__(self) -> collecting:
        self._token: Token[collecting | None] = _OPEN.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _OPEN.reset(self._token)

    def take(
        self,
        values: Mapping[str, float | torch.Tensor],
        observer: nn.Module | None,
        weight: float | torch.Tensor | None,
    ) -> None:
        """Take values in; see `report`. After an error none of them is."""
        share = self._num_samples if weight is None else _checked_weight(weight)
        prefix = "" if observer is None else self._observers.prefix(observer)
        self.pairs.update({prefix + _checked_name(name): _pair(value, share, name) for name, value in values.items()})


# Every thread has its own value, so replicas that compute at once do not see each other's reports.
_OPEN: Final[ContextVar[collecting | None]] = ContextVar("lockstep_reports", default=None)


def _checked_name(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"`values` must have names of text, got {name!r}.")
    return name


def _checked_weight(weight: float | torch.Tensor) -> float | torch.Tensor:
    """Refuse what is no weight; one on a device is not read."""
    if isinstance(weight, torch.Tensor):
        return _scalar(weight, "weight")
    if not isinstance(weight, SupportsFloat):
        raise TypeError(f"`weight` must be a number or a tensor of one element, got {weight!r}.")
    if not (math.isfinite(weight) and weight >= 0):
        raise ValueError(f"`weight` must be finite and at least 0, got {weight}.")
    return float(weight)


def _pair(value: float | torch.Tensor, weight: float | torch.Tensor, name: str) -> Pair:
    """Make sum and weight of a mean; a value that counts for nothing may be NaN."""
    if isinstance(value, torch.Tensor):
        mean: float | torch.Tensor = _scalar(value, f"values[{name!r}]")
    elif isinstance(value, SupportsFloat):
        mean = float(value)
    else:
        raise TypeError(f"`values[{name!r}]` must be a number or a tensor of one element, got {value!r}.")
    if isinstance(weight, torch.Tensor):
        return torch.where(weight > 0, mean * weight, 0.0), weight
    return (mean * weight, weight) if weight else (0.0, 0.0)


def _scalar(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Copy a tensor of one element, without its graph, to a format in which sums are nearly exact."""
    if tensor.numel() != 1:
        raise ValueError(f"`{name}` must be a tensor of one element, got shape {tuple(tensor.shape)}.")
    return tensor.detach().to(torch.float64, copy=True).reshape(())
