"""Evaluate a model on data that it is not trained on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, InitVar, dataclass
from inspect import getattr_static
from itertools import islice
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from lockstep.arguments import check_instance, check_integer, look_up
from lockstep.communicators import Communicator, LocalCommunicator
from lockstep.elsewhere import EVALUATOR, names_ours
from lockstep.errors import warn
from lockstep.extensions.evaluation import Evaluation
from lockstep.metrics import Metric, Observed, OwnMetric, TorchMetric, flatten_value, is_collection, is_torchmetric
from lockstep.prediction import check_one_pass, rewound, runner_of
from lockstep.replicas import BatchDim, check_dims
from lockstep.trainer import WRITER, Extension, Trainer
from lockstep.updaters import Converter, InferenceRunner, LossFunction, ParallelUpdater, Updater, check_functions


@names_ours(EVALUATOR)
@dataclass(eq=False, repr=False)
class Evaluator(Extension):
    """Runs a model on one pass of an iterator and observes its metrics and its loss.

    Evaluation uses all devices and ranks of the run, in its precision. Every rank is given the same batches, each of
    which is cut into shards as in training. The model is in evaluation mode, without gradients; afterwards the mode of
    every module, the buffers and the random generators are as before.

    Samples count as they do for the updater: a loss is weighted by the samples of its shard or by the weight of the
    `Loss`, so that a short last batch has less weight. Values are observed under names such as
    ``validation/main/accuracy``: the name under which the evaluator was added, the name of the model, and the name of
    the metric. Values that the loss function or a module reports (see `lockstep.report`) are observed too.

    A batch is a tensor, a tuple or a dict of tensors, which is passed to the loss function as a single argument,
    as positional or as keyword arguments; any other batch, such as a list of samples, is converted first.
    A tuple is ``(*inputs, target)``, a dict contains the inputs and the target by their names; see `target`.

    Metrics may be those of `lockstep.metrics` or torchmetrics, or your own. Each rank updates a metric with its
    own shards, and the states are merged: counts as a whole, sums of floating-point numbers and lists of values shard
    by shard. If it is not known how to merge the states of a metric, the outputs and targets of all shards are sent to
    every rank instead, which updates the metric with them in order. In all cases the numbers are the same as with one
    process, and on every rank.

    A value with several entries is observed as ``<metric>/class0``, ``<metric>/class1`` and so on, a matrix as
    ``<metric>/class0/class0``, and a dict as ``<metric>/<key>``. `results` has the values as the metrics returned them.

    Args:
        iterator: An iterable that yields the batches of one pass. It is reset first if it has ``reset``;
            otherwise it must be possible to iterate over it again, as with a list or a DataLoader.
        metrics: The metrics by name: objects with update, compute and reset, called as ``update(output, target)``; or a
            `MetricCollection` of torchmetrics, which has names of its own.
        loss_fn: A function ``loss_fn(model, *batch)`` that returns a mean loss over the batch, or a `Loss` with
            its weight and metrics. The metrics above then use the output of its last run of the model. If it reports
            values, it may return None, as a validation step of Lightning that only logs: there is no loss then. In the
            first pass it is also called for parts of the first shard, to name what is no mean over samples, unless the
            updater of the trainer has ``audit_every=0``.
        output: A function of the output of the model that returns what metrics see of it, such as
            ``lambda out: out.logits``. By default metrics get the output itself.
        model: The model; by default the updater's model named `model_name`.
        model_name: The name of one of the updater's models, which is also the middle part of the observed names.
        name: The default name of the evaluator for `Trainer.extend`.
        converter: A function ``converter(samples, device)`` that returns the tensors of a sequence of samples; by
            default that of the updater for the batches of a `BatchIterator`.
        target: The entry of a batch that metrics compare outputs with: the key in a dict, by default that of a loss
            function made by `supervised` or `token_mean`; or the position in a tuple, by default the last one. The
            entries before it are the inputs: with ``target=1`` a batch may be ``(x, y, weight)``.
        batch_dim: The dimension of a batch of tensors that counts samples, 1 for time-first ones; or a dict by key or
            position, as in `ParallelUpdater`. By default that of the trainer's updater, and 0 without a trainer.
        num_shards: The number of shards per batch, at least 1; by default that of the updater. With 1 whole batches are
            distributed over the devices, which is faster if a batch fits on each.
        num_batches: The number of batches of a pass, at least 1; by default all of them.

    Raises:
        ValueError: If there is neither a metric nor a loss, two values share a name, the iterator never ends, or its
            sampler gives each rank other samples.
        TypeError: If a metric lacks one of its three methods.

    Determinism: the bits depend on the batches, the model and the number of shards, and not on devices and ranks.
    """

    trigger = (1, "epoch")
    priority = WRITER
    acts_together = True

    iterator: Iterable[Any]
    metrics: Mapping[str, Metric] | nn.Module | None = None
    _: KW_ONLY
    loss_fn: LossFunction | None = None
    output: Callable[[Any], Any] | None = None
    model: nn.Module | None = None
    model_name: str = "main"
    name: InitVar[str] = "validation"
    converter: Converter | None = None
    target: str | int | None = None
    batch_dim: BatchDim = None
    num_shards: int | None = None
    num_batches: int | None = None

    def __post_init__(self, name: str) -> None:
        # The name of a subclass, as an attribute or a property, takes precedence.
        if getattr_static(self, "name") == vars(Evaluator)["name"]:
            vars(self)["name"] = name
        _check_iterator(self.iterator)
        check_functions(converter=self.converter, loss_fn=self.loss_fn)
        check_dims(self.batch_dim, "batch_dim")
        _check_carries_nothing(self.loss_fn)
        given = self.metrics
        found = {} if given is None else {"": given} if is_collection(given) else given
        _check_metrics(found, self.loss_fn)
        check_one_pass(self.iterator, "iterator")
        if self.num_shards is not None:
            check_integer("num_shards", self.num_shards, minimum=1)
        if self.num_batches is not None:
            check_integer("num_batches", self.num_batches, minimum=1)
        metrics: dict[str, Metric] = dict(cast("Mapping[str, Metric]", found))
        self.metrics = metrics
        self.target = getattr(self.loss_fn, "target", None) if self.target is None else self.target
        self.results: dict[str, Any] = {}
        """The values of the last evaluation by name, as the metrics returned them."""
        self._shard_metrics = {
            name: TorchMetric(metric) if is_torchmetric(metric) else OwnMetric(metric)
            for name, metric in metrics.items()
        }
        self._own_runner: InferenceRunner | None = None
        self._warned: set[str] = set()
        self._compared = False

    def __call__(self, trainer: Trainer) -> None:
        """Evaluate the model, and observe the values."""
        runner = self._runner_of(trainer.updater)
        prefix = f"{trainer.name_of(self)}/{self.model_name}"
        limits = [each for each in (self.num_batches, trainer.fast_dev_run) if each]
        for name, value in self._evaluate(runner, min(limits, default=None)).items():
            trainer.observe(f"{prefix}/{name}", value)

    def evaluate(
        self, model: nn.Module | None = None, *, communicator: Communicator | None = None
    ) -> dict[str, Observed]:
        """Run the model on one pass of the iterator, on the device of its parameters and in their precision.

        Args:
            model: The model; by default that of the constructor.
            communicator: The communicator of the processes that evaluate together; all of them must make this call.
                By default this process evaluates all batches.

        Returns:
            The values by name: ``"loss"`` and the metrics of the loss function, if it returns a loss, the reported
            values, and the metrics. If names coincide, a metric takes precedence over a value of the loss function,
            and that over a reported value.

        Raises:
            ValueError: If there is no model, or the iterator yields no batch.
            TypeError: If a batch has an unknown form, or the loss function returns a loss for some batches only.
            ReplicaError: If the model or the loss function raised; the original error is the cause.
            SignalExit: If a signal ends the run in the meantime; the evaluation is repeated when the run resumes.
        """
        model = self.model if model is None else model
        if model is None:
            raise ValueError("`model` must be given here or to the constructor, got None.")
        joined = LocalCommunicator() if communicator is None else communicator
        runner = InferenceRunner.of_model(model, joined, num_shards=self.num_shards)
        try:
            return self._evaluate(runner, self.num_batches)
        finally:
            runner.release()

    def finalize(self, trainer: Trainer) -> None:  # noqa: ARG002 - part of the interface
        """Stop the threads of a model that is not the updater's."""
        if self._own_runner is not None:
            self._own_runner.release()
            # The next run may have another updater, with other devices, ranks and another precision.
            self._own_runner = None

    def _runner_of(self, updater: Updater) -> InferenceRunner:
        """Return what runs the model."""
        named = updater.get_all_models()
        model = look_up(self.model_name, named, "model_name") if self.model is None else self.model
        if self.model is None and isinstance(updater, ParallelUpdater):
            return runner_of(updater, num_shards=self.num_shards, model_name=self.model_name)
        # Kept, because another model needs replicas and threads of its own.
        if self._own_runner is None or self._own_runner.replicas.model is not model:
            self._own_runner = runner_of(updater, num_shards=self.num_shards, model=model)
        return self._own_runner

    def _evaluate(self, runner: InferenceRunner, num_batches: int | None) -> dict[str, Observed]:
        """Evaluate one pass, or its first batches, on the devices and ranks of a runner."""

        def batches() -> Iterable[Any]:
            return islice(rewound(self.iterator, runner), num_batches)

        if self.batch_dim is not None:
            runner.conversion = runner.conversion.along(self.batch_dim)
        means, self.results = Evaluation(
            runner,
            self._shard_metrics,
            loss_fn=self.loss_fn,
            output=self.output,
            converter=self.converter,
            target=self.target,
            compares=runner.audits and not self._compared,
        ).run(batches)
        self._compared = True
        values: dict[str, Observed] = dict(means)
        for name, value in self.results.items():
            values.update(self._numbers(name, value))
        return values

    def _numbers(self, name: str, value: Any) -> dict[str, Observed]:
        """Return the numbers in the value of a metric by name; none, with a warning, if it cannot be observed."""
        try:
            return flatten_value(name, value)
        except (TypeError, ValueError) as error:
            if name not in self._warned:
                self._warned.add(name)
                warn(
                    f"The value of metric {name!r} is not observed, because {error}. Read it from "
                    "`Evaluator.results`, or use a metric with fewer values."
                )
            return {}


def _check_iterator(iterator: object) -> None:
    """Check that an iterator yields batches and not samples."""
    rule = "`iterator` must be an iterable of batches"
    if isinstance(iterator, nn.Module):
        raise TypeError(f"{rule}, got a {type(iterator).__name__}. Pass it by model=.")
    samples = isinstance(iterator, Dataset) and not isinstance(iterator, IterableDataset)
    tensors = isinstance(iterator, tuple) and any(isinstance(each, torch.Tensor) for each in iterator)
    is_iterable = hasattr(iterator, "__iter__") or hasattr(iterator, "__getitem__")
    if samples or tensors or not is_iterable or isinstance(iterator, torch.Tensor | Mapping | str):
        remedy = "TensorDataset(*tensors)" if tensors or isinstance(iterator, torch.Tensor) else "dataset"
        raise TypeError(
            f"{rule}, got a {type(iterator).__name__}. Pass lockstep.BatchIterator({remedy}, batch_size, "
            "repeat=False), a DataLoader or a list of batches."
        )


def _check_carries_nothing(loss_fn: LossFunction | None) -> None:
    """Check that a loss function can be called without `carried`, which only updates pass."""
    try:
        carried = None if loss_fn is None else inspect.signature(loss_fn).parameters.get("carried")
    except ValueError:  # no signature
        return
    if carried is not None and carried.default is carried.empty:
        raise TypeError(
            "`loss_fn` must not require `carried` in an evaluation, which carries no values from batch to batch, got "
            "one that does. Give it a default, as in loss_fn(model, inputs, target, carried=None)."
        )


def _check_metrics(metrics: Any, loss_fn: object) -> None:
    """Check that there is something to evaluate, and that every metric has the required methods."""
    check_instance("metrics", metrics, Mapping, "a dict of metrics by name")
    if not metrics and loss_fn is None:
        raise ValueError("`metrics` must hold at least one metric if there is no `loss_fn`, got none.")
    if "loss" in metrics and loss_fn is not None:
        raise ValueError("`metrics` must not hold 'loss' if there is a `loss_fn`, which is observed under that name.")
    for name, metric in metrics.items():
        if isinstance(metric, type):
            raise TypeError(f"`metrics` must hold instances, got the class {metric.__name__} as {name!r}.")
        if not isinstance(metric, Metric):
            raise TypeError(
                f"`metrics` must have update, compute and reset, got {type(metric).__name__} as {name!r}. Pass "
                "an object such as lockstep.metrics.Accuracy(), or call lockstep.report({name: value}) in `loss_fn`."
            )
        # They have these methods, but `update` takes a pair and `compute` sums over the processes by itself.
        if any(kind.__module__.startswith("ignite.") for kind in type(metric).__mro__):
            raise TypeError(
                f"`metrics` must not hold metrics of PyTorch-Ignite, got {type(metric).__name__} as {name!r}. Pass one "
                "of `lockstep.metrics` or of torchmetrics, or an object of yours with update, compute and reset."
            )
