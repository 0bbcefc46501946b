"""Measure a model on data it does not learn from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import torch

from lockstep import nest
from lockstep.communicators import Communicator
from lockstep.data import Iterator as LockstepIterator, Samples, collate
from lockstep.extensions.deal import NOT_OWN, Deal, deal_out
from lockstep.metrics import Average, Mean, Metric, Observed, Observers, collecting
from lockstep.replicas import OneIntraOpThread
from lockstep.trainer import WRITER, Extension, Trainer
from lockstep.triggers import TriggerSpec
from lockstep.updaters import Converter, Loss


@runtime_checkable
class Resettable(Protocol):
    """An iterator that can begin again."""

    def reset(self) -> object:
        """Go back to the first batch."""


@runtime_checkable
class Repeating(Protocol):
    """An iterator that may go on for ever."""

    repeat: bool


class Evaluator(Extension):
    """Runs a model over one pass of an iterator and observes its metrics and its loss.

    The model is in evaluation mode, without gradients; afterwards every module is in the mode it
    was in, and the default CPU generator where it was. Samples count equally: a short last batch
    weighs less. Values are observed as ``validation/main/accuracy``: the name under which the
    evaluator was hung in, the name of the model, the name of the metric. What the loss function or a
    module reports (see `lockstep.report`) is observed beside them: ``validation/main/predictor/accuracy``.

    A batch is a tensor, a tuple or a dict of tensors, given to the loss function as one, as
    positional or as keyword arguments; anything else, such as a list of samples, is converted first.
    A tuple is ``(*inputs, target)``, a dict is the inputs and the target by their names.

    Processes of one run evaluate together, each every so-manieth batch, if all metrics can be merged (see
    `lockstep.metrics.Mergeable`); with another metric each process evaluates all batches. The numbers are
    the same either way, and on every process.

    Args:
        iterator: Yields the batches of one pass. It is reset first if it has ``reset``; else it must be
            something that can be iterated over again, such as a list or a DataLoader.
        metrics: By name, anything with update, compute and reset; called as ``update(output, target)``.
        loss_fn: ``loss_fn(model, *batch)`` returns a mean loss over the batch, or a `Loss` with its weight
            and metrics. The metrics above then see the output of its last run of the model.
        model: The model; the updater's, of the name `model_name`, unless given.
        model_name: Which of the updater's models, and the middle part of the names observed.
        name: The evaluator's name, unless `Trainer.extend` gives another.
        converter: ``converter(samples, device)`` returns the batch of a sequence of samples; `collate` for
            the batches of a `BatchIterator` unless given.
        target: The key of the target in a dict.

    Raises:
        ValueError: There is nothing to measure, two measures share a name, or the iterator never ends.
        TypeError: A metric lacks one of its three methods.

    Determinism: it computes with one intra-op thread, so the numbers do not depend on the
    machine's number of cores.
    """

    trigger: TriggerSpec = (1, "epoch")
    priority = WRITER

    def __init__(
        self,
        iterator: Iterable[Any],
        metrics: Mapping[str, Metric] | None = None,
        *,
        loss_fn: Callable[..., torch.Tensor | Loss] | None = None,
        model: torch.nn.Module | None = None,
        model_name: str = "main",
        name: str = "validation",
        converter: Converter | None = None,
        target: str | None = None,
    ) -> None:
        _check_measures(metrics or {}, loss_fn)
        self.metrics = dict(metrics or {})
        if isinstance(iterator, Repeating) and iterator.repeat:
            raise ValueError("`iterator` must end after one pass, got one that repeats. Make it with repeat=False.")
        self.iterator = iterator
        self.loss_fn = loss_fn
        self.model = model
        self.model_name = model_name
        self.converter = converter
        self.target = target
        self._name = name

    @property
    def name(self) -> str:
        """The name given."""
        return self._name

    def __call__(self, trainer: Trainer) -> None:
        """Evaluate, and observe the values."""
        model = self._model_of(trainer) if self.model is None else self.model
        prefix = f"{trainer.name_of(self)}/{self.model_name}"
        for name, value in self.evaluate(model, communicator=trainer.updater.communicator).items():
            trainer.observe(f"{prefix}/{name}", value)

    def evaluate(
        self, model: torch.nn.Module | None = None, *, communicator: Communicator | None = None
    ) -> dict[str, Observed]:
        """Run the model over one pass of the iterator.

        Args:
            model: The model; the constructor's unless given.
            communicator: Joins the processes that evaluate together, each some of the batches; all of them
                call this. Unless given, this one does all of it.

        Returns:
            ``"loss"`` and the loss function's metrics, if there is one, what was reported on the way, and
            the metrics, by name; of two with one name the metric counts, and the loss function's value
            before a reported one.

        Raises:
            ValueError: There is no model, or not a single batch.
            TypeError: A batch has a form that cannot be read.
        """
        model = self.model if model is None else model
        if model is None:
            raise ValueError("`model` must be given here or to the constructor, got None.")
        for metric in self.metrics.values():
            metric.reset()
        deal = deal_out(communicator, self.metrics)
        averages: dict[str, Average] = {}
        observers = Observers({"": model})
        with measuring(model), recorded_outputs(model) as outputs:
            measured: list[dict[str, Mean]] = []
            num_batches = 0
            for batch in deal.own(self._batches(deal)):
                num_batches += 1
                if batch is not NOT_OWN:
                    measured.append(self._measure(model, batch, outputs, observers))
            if num_batches == 0:
                raise ValueError("`iterator` must yield at least one batch, got none. A generator is used up at once.")
            for means in deal.gathered(measured):
                for name, mean in means.items():
                    averages.setdefault(name, Average()).update(mean)
            deal.merge(self.metrics)
            losses = {name: average.compute() for name, average in averages.items()}
            return {**losses, **{name: metric.compute() for name, metric in self.metrics.items()}}

    def _model_of(self, trainer: Trainer) -> torch.nn.Module:
        models = trainer.updater.get_all_models()
        if self.model_name not in models:
            raise KeyError(f"`model_name` must be one of {sorted(models)}, got {self.model_name!r}.")
        return models[self.model_name]

    def _batches(self, deal: Deal) -> Iterator[Any]:
        if isinstance(self.iterator, Resettable):
            self.iterator.reset()
        if isinstance(self.iterator, LockstepIterator):
            self.iterator.read_only(deal.wanted)
        return iter(self.iterator)

    def _measure(self, model: torch.nn.Module, batch: Any, outputs: list[Any], observers: Observers) -> dict[str, Mean]:
        """Update the metrics with one batch; return its loss, and what was returned or reported beside it."""
        outputs.clear()
        args, kwargs, num_samples = self._arguments(batch, _device(model))
        means: dict[str, Mean] = {}
        with collecting(observers, num_samples) as reports:
            if self.loss_fn is not None:
                means = _means(self.loss_fn(model, *args, **kwargs), num_samples)
            if self.metrics:
                args, kwargs, target = self._split(args, kwargs)
                output = outputs[-1] if outputs else model(*args, **kwargs)
                for metric in self.metrics.values():
                    metric.update(output, target)
        reported = {name: Mean(*pair) for name, pair in reports.pairs.items()}
        return means | reported | means

    def _arguments(self, batch: Any, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any], int]:
        """Return a batch's positional and keyword arguments on the device, and its number of samples."""
        if isinstance(batch, Samples):
            batch = (self.converter or collate)(batch, device)
        elif not _ready(batch, lists=self.converter is None):
            if self.converter is None:
                rule = "must yield tensors, or tuples or dicts of tensors, where there is no `converter`"
                raise TypeError(f"`iterator` {rule}, got {type(batch).__name__}.")
            batch = self.converter(batch, device)
        tensors = nest.tensors(batch)
        if not tensors or tensors[0].ndim == 0:
            raise TypeError(f"A batch must hold a tensor whose first dimension is the samples, got {batch!r}.")
        moved = nest.map_tensors(lambda each: each.to(device), batch)
        if isinstance(moved, Mapping):
            return (), dict(moved), len(tensors[0])
        return tuple(moved) if isinstance(moved, (tuple, list)) else (moved,), {}, len(tensors[0])

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """Take the target out of a batch's arguments."""
        if self.target is not None and self.target in kwargs:
            inputs = dict(kwargs)
            target = inputs.pop(self.target)
            return (), inputs, target
        if len(args) < 2:  # noqa: PLR2004 - an input and the target
            got = f"keys {sorted(kwargs)}" if kwargs else f"{len(args)} tensor"
            raise TypeError(f"A batch must be (*inputs, target), or a dict with the key `target`, got {got}.")
        return args[:-1], {}, args[-1]


@contextmanager
def measuring(model: torch.nn.Module) -> Iterator[None]:
    """Hold a model in evaluation mode, without gradients, on one intra-op thread.

    Afterwards each module is in the mode it was in, and the thread count and the default CPU
    generator are as they were, whatever happened in between.

    Args:
        model: Put into evaluation mode, and back.
    """
    modes = [(module, module.training) for module in model.modules()]
    generator = torch.get_rng_state()
    try:
        model.eval()
        with OneIntraOpThread(), torch.no_grad():
            yield
    finally:
        # One by one: train() would put the children of a frozen part into training mode.
        for module, training in modes:
            module.training = training
        torch.set_rng_state(generator)


@contextmanager
def recorded_outputs(model: torch.nn.Module) -> Iterator[list[Any]]:
    """Record what a model returns, so that a loss function's run of it serves the metrics, too.

    Args:
        model: Hooked for the time being.
    """
    outputs: list[Any] = []

    def record(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        outputs.append(output)

    with ExitStack() as stack:
        stack.callback(model.register_forward_hook(record).remove)
        yield outputs


def _check_measures(metrics: Mapping[str, Metric], loss_fn: object) -> None:
    if not isinstance(metrics, Mapping):
        raise TypeError(f"`metrics` must be a dict of metrics by name, got a {type(metrics).__name__}.")
    if not metrics and loss_fn is None:
        raise ValueError("`metrics` must hold at least one metric where there is no `loss_fn`, got none.")
    if "loss" in metrics and loss_fn is not None:
        raise ValueError("`metrics` must not hold 'loss' beside a `loss_fn`, which is observed under that name.")
    for name, metric in metrics.items():
        if isinstance(metric, type):
            raise TypeError(f"`metrics` must be made metrics, got the class {metric.__name__} as {name!r}.")
        if not isinstance(metric, Metric):
            raise TypeError(f"`metrics` must have update, compute and reset, got {type(metric).__name__} as {name!r}.")


def _means(loss: torch.Tensor | Loss, num_samples: int) -> dict[str, Mean]:
    loss = Loss(loss) if isinstance(loss, torch.Tensor) else loss
    value = loss.value
    if value.numel() != 1:
        raise ValueError(f"`loss_fn` must return a loss of one element, got shape {tuple(value.shape)}. Take its mean.")
    weight = num_samples if loss.weight is None else loss.weight
    pairs = {name: Mean(total, share) for name, (total, share) in loss.metrics.items()}
    return {"loss": Mean(value.reshape(()) * weight, weight), **pairs}


def _device(model: torch.nn.Module) -> torch.device:
    first = next(chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def _ready(batch: Any, *, lists: bool) -> bool:
    """Say whether a batch is made of tensors already; a list may be one, or a list of samples."""
    if isinstance(batch, Mapping):
        return all(_ready(value, lists=lists) for value in batch.values())
    if isinstance(batch, tuple) or (lists and isinstance(batch, list)):
        return all(_ready(value, lists=lists) for value in batch)
    return isinstance(batch, torch.Tensor)
