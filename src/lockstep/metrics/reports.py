"""Report values from inside a loss function or a module."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any, Final, SupportsFloat, TypeAlias

import torch
from torch import nn

from lockstep.arguments import check_number
from lockstep.metrics.average import Mean, Observed

MAX_NUMBERS: Final = 1000
"""The largest number of entries of one value that are observed."""


def flatten_value(name: str, value: Any) -> dict[str, Observed]:
    """Return the numbers in the value of a metric by name.

    A number keeps the name of the metric. Entry i of a vector, such as the score of a class, is named
    ``name/class<i>``, and entry (i, j) of a matrix, such as a confusion matrix, ``name/class<i>/class<j>``. The values
    of a dict, as a collection returns it, are named ``name/<key>``, and those of a tuple or list ``name/<i>``.

    Args:
        name: The name of the metric; if it is empty, the names of its values have no first part.
        value: The value.

    Raises:
        TypeError: If something in the value is not a number.
        ValueError: If the value has more than `MAX_NUMBERS` entries.

    >>> flatten_value("f1", torch.tensor([0.5, 1.0]))
    {'f1/class0': 0.5, 'f1/class1': 1.0}
    >>> flatten_value("", {"matrix": torch.tensor([[3, 1]]), "count": 4})
    {'matrix/class0/class0': 3, 'matrix/class0/class1': 1, 'count': 4}
    """
    found: dict[str, Observed] = {}
    for path, number in _numbers(name, value):
        if len(found) >= MAX_NUMBERS:
            raise ValueError(f"it has more than {MAX_NUMBERS} entries")
        found[path] = number
    return found


def _numbers(name: str, value: Any) -> Iterator[tuple[str, Observed]]:
    """Yield the numbers in a value with their names."""
    if isinstance(value, torch.Tensor) and value.ndim > 0:
        if value.numel() > MAX_NUMBERS:
            raise ValueError(f"it has {value.numel()} entries, which is more than {MAX_NUMBERS}")
        # As Python numbers, in one transfer instead of one per entry.
        numbers = value.detach().flatten().tolist()
        for place, number in zip(product(*map(range, value.shape)), numbers, strict=True):
            yield name + "".join(f"/class{index}" for index in place), number
    elif isinstance(value, Mean | int | float | torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _numbers(f"{name}/{key}" if name else str(key), each)
    elif isinstance(value, tuple | list):
        for index, each in enumerate(value):
            yield from _numbers(f"{name}/{index}", each)
    elif hasattr(value, "__array__"):
        yield from _numbers(name, torch.as_tensor(value))
    else:
        raise TypeError(f"it holds a {type(value).__name__}, which is not a number")


_OMITTED_PARTS: Final = frozenset({"", "_orig_mod"})
"""Path components that names leave out: that of the model itself, and of the module inside a compiled one."""

WeightedSum: TypeAlias = "tuple[float | torch.Tensor, float | torch.Tensor]"


@torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001 - the public one imports the compiler now
def report(
    values: Mapping[str, float | torch.Tensor],
    observer: nn.Module | None = None,
    *,
    weight: float | torch.Tensor | None = None,
) -> None:
    """Report mean values over the current samples, from a loss function or a module's forward.

    With value x and weight w of each shard, the observed value is the mean over all samples::

        Σ w·x / Σ w

    So a value must be a mean over the samples, or over what `weight` counts. A number of correct samples, a maximum or
    an F1 would be averaged over shards, which depends on their number: report the correct ones divided by all, and
    compute the others in an Evaluator. The audits of an updater name such values, and so does the first pass of an
    Evaluator.

    A value is observed as ``main/<name>``. A value that a module reports about itself is observed as
    ``main/<path>/<name>``, with the path of the module in the model, as in ``main/predictor/accuracy``; the
    path of the model itself is empty. In an evaluation, the name of the evaluation comes first:
    ``validation/main/predictor/accuracy``.

    Reporting a name again in the same shard replaces the previous value. So does a metric of that name that
    the loss function returns, and ``main/loss`` is always the loss of the update, even if you report one.

    Reports inside of a `DataParallel` or a `ReplicaGroup`, which splits a shard further, are merged over its parts.

    Outside of a shard or an evaluation nothing happens, so that a model that reports also runs on its own.
    The same holds during backward, so that the recomputation of activation checkpointing is not counted twice.
    ``torch.compile`` breaks its graph here; a compiled module is named like the original.

    Args:
        values: The values by name: numbers, or tensors of one element, which are copied and stay on the
            device until they are read.
        observer: The module that the values are about: ``self`` when a module reports. It must be part of the
            model that runs, which is a replica in an updater.
        weight: The weight of the values, at least 0, as a number or a tensor of one element. By default the
            number of samples of the shard or batch. Values of weight 0 are ignored.

    Raises:
        TypeError: If a name is not a string, or a value or weight is not a number.
        ValueError: If a tensor has more than one element, a weight is negative or not finite, or the observer
            is not a module of the model.

    Determinism: products are computed in float64 and added in the order of the shards, so the bits do not
    depend on the devices.

    References: the interface is that of ``chainer.report`` (Tokui et al., "Chainer: A Deep Learning Framework for
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
    collector = collecting.current()
    if collector is not None:
        collector.record(values, observer, weight)


class Observers:
    """A table of the names of modules: their paths in a model, joined with slashes.

    Args:
        models: The models by the first part of their names; ``""`` for a model whose names have no such part.

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
        """Return the prefix of the names of a module's values.

        Raises:
            ValueError: If it is not a module of the models.
        """
        if self._prefixes is None or observer not in self._prefixes:
            # Not before the first report, because most models report nothing; and again for an unknown module,
            # because modules may have been added to the model.
            self._prefixes = self._find_prefixes()
        if observer not in self._prefixes:
            rule = "must be a module of the model that runs"
            remedy = "In a loss function, take it from the model that is passed to it, or omit it."
            if not isinstance(observer, nn.Module):
                remedy = "To report a value, pass a dict: report({name: value})."
            raise ValueError(f"`observer` {rule}, got another {type(observer).__name__}. {remedy}")
        return self._prefixes[observer]

    def _find_prefixes(self) -> dict[nn.Module, str]:
        """Find the prefix of every module; a module that occurs twice keeps its first name."""
        prefixes: dict[nn.Module, str] = {}
        for name, model in self._models.items():
            for path, module in model.named_modules():
                parts = [part for part in (name, *path.split(".")) if part not in _OMITTED_PARTS]
                prefixes.setdefault(module, "".join(f"{part}/" for part in parts))
        return prefixes


class collecting:  # noqa: N801 - reads as a verb where it is used, like torch.no_grad
    """Collect what the current thread reports inside a ``with`` block, hidden from collectors around it.

    Args:
        observers: The names of the modules that may report.
        num_samples: The weight of values that are reported without one.
    """

    __slots__ = ("_num_samples", "_outer", "observers", "pairs")

    def __init__(self, observers: Observers, num_samples: int) -> None:
        self.observers = observers
        """The names of the modules that may report."""
        self._num_samples = num_samples
        self.pairs: dict[str, WeightedSum] = {}
        """The sum and the weight of each value, by name."""

    def __enter__(self) -> collecting:
        self._outer, _THREAD.collector = _THREAD.collector, self
        return self

    def __exit__(self, *_: object) -> None:
        _THREAD.collector = self._outer

    @staticmethod
    def current() -> collecting | None:
        """Return what collects the reports of the calling thread, or None."""
        return _THREAD.collector

    def add(self, parts: Iterable[Mapping[str, WeightedSum]]) -> None:
        """Record the means of what was reported in parts of the samples, as if each had been reported once.

        Args:
            parts: The sums and weights of each part, in order.
        """
        sums: dict[str, WeightedSum] = {}
        for part in parts:
            for name, pair in part.items():
                sums[name] = (
                    pair if name not in sums else (_plus(sums[name][0], pair[0]), _plus(sums[name][1], pair[1]))
                )
        self.pairs.update(sums)

    def record(
        self,
        values: Mapping[str, float | torch.Tensor],
        observer: nn.Module | None,
        weight: float | torch.Tensor | None,
    ) -> None:
        """Record values, see `report`; after an error none of them is recorded."""
        number = self._num_samples if weight is None else _number(weight, "weight")
        if weight is not None and not isinstance(weight, torch.Tensor):  # whose sign is not read
            check_number("weight", weight, least=0, finite=True)
        prefix = "" if observer is None else self.observers.prefix(observer)
        # One `update` with a finished dict, so that an error in a later value leaves no earlier one behind.
        sums = {prefix + _checked_name(name): _weighted_sum(value, number, name) for name, value in values.items()}
        self.pairs.update(sums)


class _Thread(threading.local):
    """What collects the reports of each thread.

    This is no context variable, which the threads of a `DataParallel` inside of a shard would take over from that of
    the shard.
    """

    collector: collecting | None = None


_THREAD: Final = _Thread()


def _plus(total: float | torch.Tensor, other: float | torch.Tensor) -> float | torch.Tensor:
    """Return the sum of two numbers, on the device of the first tensor."""
    if isinstance(total, torch.Tensor) and isinstance(other, torch.Tensor):
        other = other.to(total.device)
    return total + other


def _checked_name(name: object) -> str:
    """Return a name after checking that it is a string."""
    if not isinstance(name, str):
        raise TypeError(f"The keys of `values` must be strings, got {name!r}.")
    return name


def _weighted_sum(value: float | torch.Tensor, weight: float | torch.Tensor, name: str) -> WeightedSum:
    """Return the sum and the weight of a mean; a value of weight 0 may be NaN."""
    mean = _number(value, f"values[{name!r}]")
    if isinstance(weight, torch.Tensor):
        # `where` in place of a product, because NaN times 0 is NaN.
        return torch.where(weight > 0, mean * weight, 0.0), weight
    return (mean * weight, weight) if weight else (0.0, 0.0)


def _number(value: object, name: str) -> float | torch.Tensor:
    """Return a number as a float, or a tensor of one element in float64, in which sums are nearly exact."""
    if not isinstance(value, torch.Tensor):
        if not isinstance(value, SupportsFloat):
            raise TypeError(f"`{name}` must be a number or a tensor of one element, got {value!r}.")
        return float(value)
    if value.numel() != 1:
        raise ValueError(f"`{name}` must be a tensor of one element, got shape {tuple(value.shape)}.")
    # A copy without the graph, because the model may change the tensor in place after the report.
    return value.detach().to(torch.float64, copy=True).reshape(())
