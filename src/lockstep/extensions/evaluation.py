"""One pass over the batches of an evaluation: run the shards of this rank, and merge what all ranks have measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from itertools import groupby
from typing import Any, TypeAlias

import torch
from torch import nn

from lockstep import nest
from lockstep.errors import warn
from lockstep.metrics import Average, Mean, ShardKey, ShardMetric
from lockstep.nest import call_arguments
from lockstep.precision import HALF_PRECISION
from lockstep.prediction import DataPass, in_held_precision
from lockstep.replicas import Computed, Draws, find_no_means, samples_of, uncompiled, with_means
from lockstep.stopping import STOP
from lockstep.updaters import (
    Converter,
    InferenceRunner,
    Loss,
    LossFunction,
    ShardReport,
    ShardResult,
    UpdateResult,
    check_loss,
    is_summed,
    loss_weight,
    metric_pairs,
    without_caches,
)

Outcome: TypeAlias = "tuple[ShardKey, Any, Any]"
"""A shard with the output of the model and the target."""


@dataclass(frozen=True, slots=True)
class ShardArguments:
    """The tensors of a shard as arguments.

    Attributes:
        args: The positional arguments of the loss function.
        kwargs: The keyword arguments of the loss function.
        inputs: The positional arguments of the model, if there are metrics.
        named_inputs: The keyword arguments of the model.
        target: The target, if there are metrics.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[Any, ...] = ()
    named_inputs: dict[str, Any] = field(default_factory=dict)
    target: Any = None


@dataclass(eq=False)
class Evaluation:
    """One pass over the batches of an evaluation.

    Args:
        runner: Runs the shards of this rank.
        metrics: The metrics by name.
        loss_fn: The loss function, or None.
        output: A function that returns what metrics see of the output of the model; None for the output itself.
        converter: Converts samples to tensors; None for the converter of the runner.
        target: The key of the target if a batch is a dict, or its position in a tuple.
        compares: Whether the loss and the values of the first shard are compared with those of parts of it.
    """

    runner: InferenceRunner
    metrics: Mapping[str, ShardMetric]
    loss_fn: LossFunction | None
    output: Callable[[Any], Any] | None
    converter: Converter | None
    target: str | int | None
    compares: bool = False

    def __post_init__(self) -> None:
        self._pass = DataPass(self.runner, self.converter, name="iterator")
        self._alone = self.runner.communicator.size == 1
        self._gathered = [each for each in self.metrics.values() if each.rule == "gather" and not self._alone]
        self._local = [each for each in self.metrics.values() if each not in self._gathered]
        # The last output of each replica's network, so that the run of the loss function serves the metrics too.
        self._outputs: dict[int, Any] = {}
        self._reports: list[tuple[int, ShardReport]] = []
        # Whether the loss function returned a loss; it holds both answers if shards differ.
        self._has_loss: set[bool] = set()

    def run(self, batches: Callable[[], Iterable[Any]]) -> tuple[dict[str, Mean | float], dict[str, Any]]:
        """Evaluate all batches.

        Args:
            batches: Returns the batches of one pass.

        Returns:
            The means of the loss and of all reported values by name, and the values of the metrics.
        """
        with self._pass.running(), ExitStack() as hooks:
            for metric in self.metrics.values():
                metric.move(self.runner.replicas.devices[0])
                metric.reset()
            for place, network in enumerate(self._pass.networks if self.metrics else ()):
                hooks.callback(network.register_forward_hook(partial(self._record, place)).remove)
            for results in self._pass.results(self._until_stopped(batches()), self._compute, self._arguments):
                self._add(results)
            return self._merged()

    def _record(self, place: int, _network: nn.Module, _inputs: Any, output: Any) -> None:
        self._outputs[place] = output

    def _until_stopped(self, batches: Iterable[Any]) -> Iterable[Any]:
        """Return batches that raise if a signal ends the run."""
        # A rank that evaluates for itself cannot leave the evaluation before the other ranks know of the signal.
        return STOP.interruptible(batches) if not self._alone or STOP.alone or STOP.agreed else batches

    def _add(self, results: Sequence[tuple[int, ShardResult]]) -> None:
        """Add the results of this rank's shards of some batches."""
        outcomes: list[Outcome] = []
        for batch, result in results:
            returned, output = result.returned
            report = self._report(result, returned)
            if report is not None:
                self._reports.append((batch, report))
            if self.compares and batch == 0 and result.shard.index == 0:
                self._compare_parts(result)
            outcomes.append(((batch, result.shard.index), output, result.given.target))
        self._update(self._local, outcomes)
        if self._gathered:
            by_rank = self._pass.gather(nest.map_tensors(torch.Tensor.cpu, outcomes))
            # In the order of shards, which is that of an evaluation by one process.
            self._update(self._gathered, sorted((each for rank in by_rank for each in rank), key=lambda each: each[0]))

    def _arguments(self, tensors: Any) -> ShardArguments:
        """Return the tensors of a shard as arguments of the loss function and of the model."""
        args, kwargs = call_arguments(tensors)
        if not self.metrics:
            return ShardArguments(args, kwargs)
        target = self.target
        if target is not None and target in kwargs:
            inputs = dict(kwargs)
            return ShardArguments(args, kwargs, (), inputs, inputs.pop(target))
        if len(args) < len(("input", "target")):
            if kwargs:
                close = get_close_matches(str(target or "labels"), kwargs, 1, 0.0)
                raise TypeError(
                    f"`target` must name the entry of a batch with which metrics compare outputs, got {target!r} "
                    f"for a batch with the keys {sorted(kwargs)}. Pass Evaluator(..., target={close[0]!r}) or the like."
                )
            raise TypeError(
                f"A batch must be (*inputs, target), or a dict with the key `target`, got {len(args)} tensor. Metrics "
                "compare outputs with targets: give a dataset of pairs (input, target)."
            )
        position = target if isinstance(target, int) else -1
        if not -len(args) <= position < len(args):
            raise IndexError(f"`target` must be a position in a batch of {len(args)} entries, got {position}.")
        return ShardArguments(args, kwargs, args[:position], {}, args[position])

    def _compute(self, place: int, given: ShardArguments) -> tuple[Any, Any]:
        """Return what the loss function returns for a shard, and what metrics see of the model's output."""
        network = self._pass.networks[place]
        # A loss function that does not run the model must not leave the metrics the output of the previous shard.
        self._outputs.pop(place, None)
        returned = None if self.loss_fn is None else self.loss_fn(network, *given.args, **given.kwargs)
        if not self.metrics:
            return returned, None
        if place in self._outputs:
            output = self._outputs[place]
        else:
            inputs, named_inputs = in_held_precision((given.inputs, given.named_inputs), self.runner.precision)
            output = network(*inputs, **named_inputs)
        self._outputs.pop(place, None)
        output = output if self.output is None else self.output(output)
        # Metrics compute in float32, which holds every value of the narrower formats.
        return returned, nest.map_tensors(_in_float32, output)

    def _compare_parts(self, result: ShardResult) -> None:
        """Warn of a loss and of reported values that are no means over samples, by a shard and parts of it."""
        loss_fn, network, shard = self.loss_fn, self._pass.networks[0], result.shard
        if loss_fn is None or not 1 < len(shard.samples) < self._pass.sizes[0]:
            return

        def compute_part(draws: Draws, _: int, given: tuple[range, ShardArguments]) -> Any:
            samples, arguments = given
            with without_caches([loss_fn, *network.modules()]), uncompiled(), draws:
                draws.start(samples)
                returned = loss_fn(network, *arguments.args, **arguments.kwargs)
                draws.end()
            return returned

        def compute(draws: Draws, number: int) -> list[Computed]:
            size, function = len(shard.samples), partial(compute_part, draws)
            _, parts = samples_of(range(size), number, size)
            results = self.runner.run_parts(shard, result.given, parts, function, self._pass.observers)
            return [_computed(self._report(each, each.returned)) for each in results]

        differs, reported = find_no_means(compute, len(shard.samples), self.runner.replicas.devices[0])
        found = {name: f"The reported value {name!r} is {what}" for name, what in reported.items()}
        # The sums of shards are added.
        found |= {"loss": f"`loss_fn` returns {differs}"} if differs and not is_summed(loss_fn) else {}
        for what in found.values():
            warn(
                f"{what} and so is no mean over samples. What an evaluation logs is the mean over the shards, weighted "
                "by samples, which depends on the number of shards. Pass a metric, which sees all samples; "
                "Evaluator(..., num_shards=1) for the mean over whole batches; or, for a mean of other things than "
                "samples, Loss(mean, weight=...) or report(..., weight=...) with their number."
            )

    def _report(self, result: ShardResult, returned: Any) -> ShardReport | None:
        """Return what a shard measured, or None for a shard of weight 0, which takes no part as in an update."""
        shard, num_samples, reports = result.shard, len(result.shard.samples), dict(result.reports)
        # A validation step of Lightning may log its loss, and return nothing.
        has_loss = self.loss_fn is not None and not (returned is None and reports)
        self._has_loss.add(has_loss)
        if not has_loss:
            return ShardReport(shard.index, num_samples, torch.zeros((), device="cpu"), reports)
        loss: Loss = check_loss(returned, training=False)
        weight = loss_weight(loss, num_samples)
        # The name "loss" belongs to the loss itself.
        reports.pop("loss", None)
        metrics = metric_pairs(loss)
        return ShardReport(shard.index, weight, loss.value, metrics | reports | metrics) if weight > 0 else None

    def _update(self, metrics: Sequence[ShardMetric], outcomes: Sequence[Outcome]) -> None:
        """Update metrics with shards in order."""
        device = self.runner.replicas.devices[0]
        for key, output, target in outcomes if metrics else ():
            here = nest.map_tensors(lambda each: each.to(device), (output, target))
            for metric in metrics:
                try:
                    metric.add(key, *here)
                except Exception as error:
                    if self.output is not None or isinstance(output, torch.Tensor):
                        raise
                    raise TypeError(
                        f"`output` must pick what metrics see of the output of the model, which is a "
                        f"{type(output).__name__}; without it, {type(metric.metric).__name__} raised "
                        f"{type(error).__name__}: {error}. Pass Evaluator(..., output=lambda out: out.logits) or the "
                        "like."
                    ) from error

    def _merged(self) -> tuple[dict[str, Mean | float], dict[str, Any]]:
        """Merge the reports and the metrics of all ranks."""
        reports = self._reports if self._alone else nest.map_tensors(torch.Tensor.cpu, self._reports)
        parts = {name: metric.parts() for name, metric in self.metrics.items()}
        by_rank = self._pass.gather({"has_loss": self._has_loss, "reports": reports, "parts": parts})
        answers = set().union(*(each["has_loss"] for each in by_rank))
        if len(answers) > 1:
            raise TypeError(
                "`loss_fn` must return a loss for every batch or for none, got None for some. Return the loss, or only "
                "report values."
            )
        everything = [entry for each in by_rank for entry in each["reports"]]
        self._reports = sorted(everything, key=lambda entry: (entry[0], entry[1].shard))
        for name, metric in self.metrics.items():
            metric.merge([each["parts"][name] for each in by_rank])
        return self._means(has_loss=True in answers), {name: metric.compute() for name, metric in self.metrics.items()}

    def _means(self, *, has_loss: bool) -> dict[str, Mean | float]:
        """Return the means over all batches, of which each counts as in an update."""
        averages: dict[str, Average] = {}
        loss_fn = self.loss_fn
        summed = loss_fn is not None and is_summed(loss_fn)
        if has_loss:
            averages["loss"] = Average()
        for _, entries in groupby(self._reports, key=lambda entry: entry[0]):
            reports = [report for _, report in entries]
            result = UpdateResult(applied=True, tries=1, loss_scale=1.0, nonfinite=None, reports=reports, summed=summed)
            for name, mean in (result.loss_and_metrics() if has_loss else result.metrics).items():
                averages.setdefault(name, Average()).update(mean)
        return {name: average.compute() for name, average in averages.items()}


def _computed(report: ShardReport | None) -> Computed:
    """Return the loss and the values of a shard; None is one without weight."""
    if report is None:
        return Computed(0.0, 0.0, torch.zeros(0), {})
    return with_means(Computed(report.loss.item(), report.weight, torch.zeros(0), report.metrics), {})


def _in_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in HALF_PRECISION else tensor
