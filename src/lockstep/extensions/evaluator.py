"""Evaluate a model on data that it is not trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import torch

from lockstep import nest
from lockstep.communicators import Communicator
from lockstep.data import Iterator as LockstepIterator, Samples, collate
from lockstep.extensions.batch_distribution import SKIPPED, BatchDistribution, distribute_batches
from lockstep.metrics import Average, Mean, Metric, Observed, Observers, collecting
from lockstep.replicas import OneIntraOpThread
from lockstep.trainer import WRITER, Extension, Trainer
from lockstep.triggers import TriggerSpec
from lockstep.updaters import Converter, Loss


@runtime_checkable
class Resettable(Protocol):
    """An iterator that can be reset."""

    def reset(self) -> object:
        """Return to the first batch."""


@runtime_checkable
class Repeating(Protocol):
    """An iterator that may have no end."""

    repeat: bool


class Evaluator(Extension):
    """Runs a model on one pass of an iterator and observes its metrics and its loss.

    The model is in evaluation mode, without gradients. Afterwards the mode of every module and the default CPU
    generator are restored. Samples are weighted equally: a short last batch has less weight. Values are observed
    under names such as ``validation/main/accuracy``: the name under which the evaluator was added, the name of the
    model, and the name of the metric. Values that the loss function or a module reports (see `lockstep.report`)
    are observed too, as in ``validation/main/predictor/accuracy``.

    A batch is a tensor, a tuple or a dict of tensors, which is passed to the loss function as a single argument,
    as positional or as keyword arguments; any other batch, such as a list of samples, is converted first.
    A tuple is ``(*inputs, target)``, a dict contains the inputs and the target by their names.

    The processes of a run evaluate together, each on a part of the batches, if all metrics can be merged (see
    `lockstep.metrics.Mergeable`); otherwise each process evaluates all batches. The numbers are the same in both
    cases, and on every process.

    Args:
        iterator: An iterable that yields the batches of one pass. It is reset first if it has ``reset``;
            otherwise it must be possible to iterate over it again, as with a list or a DataLoader.
        metrics: The metrics by name: objects with update, compute and reset, called as
            ``update(output, target)``.
        loss_fn: A function ``loss_fn(model, *batch)`` that returns a mean loss over the batch, or a `Loss` with
            its weight and metrics. The metrics above then use the output of its last run of the model.
        model: The model; by default the updater's model named `model_name`.
        model_name: The name of one of the updater's models, which is also the middle part of the observed names.
        name: The default name of the evaluator for `Trainer.extend`.
        converter: A function ``converter(samples, device)`` that returns the batch of a sequence of samples; by
            default `collate` for the batches of a `BatchIterator`.
        target: The key of the target if a batch is a dict.

    Raises:
        ValueError: If there is neither a metric nor a loss, two values share a name, or the iterator never ends.
        TypeError: If a metric lacks one of its three methods.

    Determinism: it computes with one intra-op thread, so the numbers do not depend on the number of cores.
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
        _check_metrics(metrics or {}, loss_fn)
        self.metrics = dict(metrics or {})
        if isinstance(iterator, Repeating) and iterator.repeat:
            raise ValueError("`iterator` must end after one pass, got one that repeats. Create it with repeat=False.")
        self.iterator = iterator
        self.loss_fn = loss_fn
        self.model = model
        self.model_name = model_name
        self.converter = converter
        self.target = target
        self._name = name

    @property
    def name(self) -> str:
        """The name passed to the constructor."""
        return self._name

    def __call__(self, trainer: Trainer) -> None:
        """Evaluate the model, and observe the values."""
        model = self._model_of(trainer) if self.model is None else self.model
        prefix = f"{trainer.name_of(self)}/{self.model_name}"
        for name, value in self.evaluate(model, communicator=trainer.updater.communicator).items():
            trainer.observe(f"{prefix}/{name}", value)

    def evaluate(
        self, model: torch.nn.Module | None = None, *, communicator: Communicator | None = None
    ) -> dict[str, Observed]:
        """Run the model on one pass of the iterator.

        Args:
            model: The model; by default that of the constructor.
            communicator: The communicator of the processes that evaluate together; all of them must make this call.
                By default this process evaluates all batches.

        Returns:
            The values by name: ``"loss"`` and the metrics of the loss function, if there is one, the reported
            values, and the metrics. If names coincide, a metric takes precedence over a value of the loss function,
            and that over a reported value.

        Raises:
            ValueError: If there is no model, or the iterator yields no batch.
            TypeError: If a batch has an unknown form.
        """
        model = self.model if model is None else model
        if model is None:
            raise ValueError("`model` must be given here or to the constructor, got None.")
        for metric in self.metrics.values():
            metric.reset()
        distribution = distribute_batches(communicator, self.metrics)
        averages: dict[str, Average] = {}
        observers = Observers({"": model})
        with evaluation_mode(model), record_outputs(model) as outputs:
            measured: list[dict[str, Mean]] = []
            num_batches = 0
            for batch in distribution.select(self._batches(distribution)):
                num_batches += 1
                if batch is not SKIPPED:
                    measured.append(self._measure(model, batch, outputs, observers))
            if num_batches == 0:
                raise ValueError("`iterator` must yield at least one batch, got none. A generator yields only once.")
            for means in distribution.gather(measured):
                for name, mean in means.items():
                    averages.setdefault(name, Average()).update(mean)
            distribution.merge(self.metrics)
            losses = {name: average.compute() for name, average in averages.items()}
            return {**losses, **{name: metric.compute() for name, metric in self.metrics.items()}}

    def _model_of(self, trainer: Trainer) -> torch.nn.Module:
        """Return the model of the trainer's updater that is to be evaluated."""
        models = trainer.updater.get_all_models()
        if self.model_name not in models:
            raise KeyError(f"`model_name` must be one of {sorted(models)}, got {self.model_name!r}.")
        return models[self.model_name]

    def _batches(self, distribution: BatchDistribution) -> Iterator[Any]:
        """Return an iterator over one pass, whose workers load only the batches of this rank."""
        if isinstance(self.iterator, Resettable):
            self.iterator.reset()
        if isinstance(self.iterator, LockstepIterator):
            self.iterator.read_only(distribution.wanted)
        return iter(self.iterator)

    def _measure(self, model: torch.nn.Module, batch: Any, outputs: list[Any], observers: Observers) -> dict[str, Mean]:
        """Update the metrics with one batch, and return its loss and all other values returned or reported."""
        # A loss function that does not run the model must not leave the metrics the output of the previous batch.
        outputs.clear()
        args, kwargs, num_samples = self._arguments(batch, _device_of(model))
        means: dict[str, Mean] = {}
        with collecting(observers, num_samples) as reports:
            if self.loss_fn is not None:
                means = _loss_means(self.loss_fn(model, *args, **kwargs), num_samples)
            if self.metrics:
                args, kwargs, target = self._split(args, kwargs)
                output = outputs[-1] if outputs else model(*args, **kwargs)
                for metric in self.metrics.values():
                    metric.update(output, target)
        reported = {name: Mean(*pair) for name, pair in reports.pairs.items()}
        # The first `means` sets the order of the names, the last one the precedence of values.
        return means | reported | means

    def _arguments(self, batch: Any, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any], int]:
        """Return the positional and keyword arguments of a batch on the device, and its number of samples."""
        if isinstance(batch, Samples):
            batch = (self.converter or collate)(batch, device)
        elif not _consists_of_tensors(batch, lists=self.converter is None):
            if self.converter is None:
                rule = "must yield tensors, or tuples or dicts of tensors, if there is no `converter`"
                raise TypeError(f"`iterator` {rule}, got {type(batch).__name__}.")
            batch = self.converter(batch, device)
        tensors = nest.tensors(batch)
        if not tensors or tensors[0].ndim == 0:
            raise TypeError(f"A batch must hold a tensor whose first dimension counts the samples, got {batch!r}.")
        moved = nest.map_tensors(lambda each: each.to(device), batch)
        if isinstance(moved, Mapping):
            return (), dict(moved), len(tensors[0])
        return tuple(moved) if isinstance(moved, (tuple, list)) else (moved,), {}, len(tensors[0])

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """Split the arguments of a batch into the inputs and the target."""
        if self.target is not None and self.target in kwargs:
            inputs = dict(kwargs)
            target = inputs.pop(self.target)
            return (), inputs, target
        if len(args) < 2:  # noqa: PLR2004 - an input and the target
            got = f"keys {sorted(kwargs)}" if kwargs else f"{len(args)} tensor"
            raise TypeError(f"A batch must be (*inputs, target), or a dict with the key `target`, got {got}.")
        return args[:-1], {}, args[-1]


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Set a model to evaluation mode, without gradients and on one intra-op thread, within a ``with`` block.

    Afterwards the mode of each module, the number of threads and the default CPU generator are restored, also
    after an error.

    Args:
        model: The model to evaluate.
    """
    modes = [(module, module.training) for module in model.modules()]
    # Iterating over a DataLoader draws a seed from the default generator: training must not depend on evaluations.
    generator = torch.get_rng_state()
    try:
        model.eval()
        with OneIntraOpThread(), torch.no_grad():
            yield
    finally:
        # One by one, because train() would also set the children of a frozen part to training mode.
        for module, training in modes:
            module.training = training
        torch.set_rng_state(generator)


@contextmanager
def record_outputs(model: torch.nn.Module) -> Iterator[list[Any]]:
    """Record the outputs of a model, so that the loss function's run of it can be used for the metrics too.

    Args:
        model: The model, which has a forward hook within the ``with`` block.
    """
    outputs: list[Any] = []

    def record(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        outputs.append(output)

    with ExitStack() as stack:
        stack.callback(model.register_forward_hook(record).remove)
        yield outputs


def _check_metrics(metrics: Mapping[str, Metric], loss_fn: object) -> None:
    """Check that there is something to evaluate, and that every metric has the required methods."""
    if not isinstance(metrics, Mapping):
        raise TypeError(f"`metrics` must be a dict of metrics by name, got a {type(metrics).__name__}.")
    if not metrics and loss_fn is None:
        raise ValueError("`metrics` must hold at least one metric if there is no `loss_fn`, got none.")
    if "loss" in metrics and loss_fn is not None:
        raise ValueError("`metrics` must not hold 'loss' if there is a `loss_fn`, which is observed under that name.")
    for name, metric in metrics.items():
        if isinstance(metric, type):
            raise TypeError(f"`metrics` must hold instances, got the class {metric.__name__} as {name!r}.")
        if not isinstance(metric, Metric):
            raise TypeError(f"`metrics` must have update, compute and reset, got {type(metric).__name__} as {name!r}.")


def _loss_means(loss: torch.Tensor | Loss, num_samples: int) -> dict[str, Mean]:
    """Return the loss of a batch and the metrics of the loss function as means."""
    loss = Loss(loss) if isinstance(loss, torch.Tensor) else loss
    value = loss.value
    if value.numel() != 1:
        raise ValueError(f"`loss_fn` must return a loss of one element, got shape {tuple(value.shape)}. Take its mean.")
    weight = num_samples if loss.weight is None else loss.weight
    pairs = {name: Mean(total, share) for name, (total, share) in loss.metrics.items()}
    return {"loss": Mean(value.reshape(()) * weight, weight), **pairs}


def _device_of(model: torch.nn.Module) -> torch.device:
    """Return the device of the first parameter or buffer of a model."""
    first = next(chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def _consists_of_tensors(batch: Any, *, lists: bool) -> bool:
    """Return whether a batch consists of tensors; without ``lists``, a list counts as a list of samples."""
    if isinstance(batch, Mapping):
        return all(_consists_of_tensors(value, lists=lists) for value in batch.values())
    if isinstance(batch, tuple) or (lists and isinstance(batch, list)):
        return all(_consists_of_tensors(value, lists=lists) for value in batch)
    return isinstance(batch, torch.Tensor)
