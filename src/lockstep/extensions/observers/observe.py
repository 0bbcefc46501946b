"""Observe values of the run: learning rates, gradient norms, statistics of parameters, and speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import torch

from lockstep.arguments import check_number
from lockstep.errors import warn
from lockstep.metrics import Mean, Observed
from lockstep.replicas import peak_memory, restart_peak_memory
from lockstep.trainer import WRITER, Extension, Trainer
from lockstep.triggers import TriggerSpec
from lockstep.updaters import MAIN, Clock, ParallelUpdater, Stopwatch


@dataclass(eq=False, repr=False)
class ObserveValue(Extension):
    """Observes the result of a function of the trainer.

    Args:
        key: The name of the value.
        function: A function of the trainer that returns a number, a 0-d tensor or a `Mean`.
        trigger: The trigger that decides when to observe it.

    >>> momentum = ObserveValue("momentum", lambda trainer: trainer.updater.get_optimizer("main").defaults["momentum"])
    """

    priority = WRITER

    key: str
    function: Callable[[Any], Observed]
    _: KW_ONLY
    trigger: TriggerSpec = (1, "iteration")

    @property
    def name(self) -> str:
        """The default name, which contains that of the value."""
        return f"ObserveValue({self.key})"

    def __call__(self, trainer: Trainer) -> None:
        """Observe the value."""
        trainer.observe(self.key, self.function(trainer))


class ObserveLR(Extension):
    """Observes the learning rate of every optimizer and parameter group after an update.

    It is that of the next update if the updater steps the scheduler (``scheduler=``), and that of the last update where
    a `StepScheduler` does so later.

    The first group of the only optimizer is ``"lr"``, that of an optimizer ``gen`` is ``"gen/lr"``, and further groups
    are ``"group1/lr"`` and so on. `LogReport` and loggers keep the last one of an interval.

    Args:
        trigger: The trigger that decides when to observe them.
    """

    priority = WRITER

    def __init__(self, *, trigger: TriggerSpec = (1, "iteration")) -> None:
        self.trigger = trigger

    def __call__(self, trainer: Trainer) -> None:
        """Observe the learning rates."""
        for name, optimizer in trainer.updater.get_all_optimizers().items():
            prefix = "" if name == MAIN else f"{name}/"
            for index, group in enumerate(optimizer.param_groups):
                trainer.observe(f"{prefix}group{index}/lr" if index else f"{prefix}lr", group["lr"])


class GradientNorm(Extension):
    """Observes the norm of the gradient of each model in the last update, as ``"gradient_norm"``.

    It is that of all gradients of a model together, as they are after the update: not multiplied by the loss scale, and
    after hooks of the optimizer that change them, such as those that clip. With models by name, the names are
    ``"gen/gradient_norm"`` and so on, and a model without gradients is left out. If no model has gradients, as with
    ``precision="bf16-true"`` and ``"fp16-true"``, which do not keep them, nothing is observed and a warning says so.

    Args:
        norm_type: The order p of the norm, above 0; infinity for the largest magnitude.
        trigger: The trigger that decides when to compute it.

    Raises:
        ValueError: If `norm_type` is not above 0.

    Determinism: computed from the gradient of the whole batch on one thread, so it is equal on all placements of the
    same kind of device. It stays on its device until it is read.
    """

    priority = WRITER

    def __init__(self, norm_type: float = 2.0, *, trigger: TriggerSpec = (1, "iteration")) -> None:
        check_number("norm_type", norm_type, above=0)
        self.norm_type = norm_type
        self.trigger = trigger
        self._warned = False

    def __call__(self, trainer: Trainer) -> None:
        """Compute and observe the norms."""
        found = False
        for name, model in trainer.updater.get_all_models().items():
            grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            if grads:
                found = True
                norm = torch.nn.utils.get_total_norm(grads, self.norm_type)
                trainer.observe("gradient_norm" if name == MAIN else f"{name}/gradient_norm", norm)
        if not found and not self._warned and trainer.is_main:
            self._warned = True
            warn(
                "No model has gradients after an update, so GradientNorm observes nothing. With precision='bf16-true' "
                "and 'fp16-true' gradients are not kept; use 'bf16' or 'fp16' to observe their norm."
            )


Statistic = Callable[[torch.Tensor], torch.Tensor]


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    """Compute the fraction of zeros."""
    return (tensor == 0).double().mean()


STATISTICS: Final[Mapping[str, Statistic]] = MappingProxyType(
    {"mean": torch.mean, "std": partial(torch.std, correction=0), "min": torch.amin, "max": torch.amax, "zeros": _zeros}
)
"""The default statistics by name."""


@dataclass(eq=False, repr=False)
class ParameterStatistics(Extension):
    """Observes statistics of each parameter and of its gradient in the last update.

    The names are ``"<parameter>/data/mean"``, ``"<parameter>/grad/mean"`` and so on, with the name of the model before
    them unless it is the only one. Values stay on their device until they are read.

    Args:
        statistics: Functions of a tensor that return a 0-d tensor, by name; by default the mean, the standard
            deviation, the minimum, the maximum and the fraction of zeros.
        data: Whether to observe the parameters.
        grads: Whether to observe the gradients, where there are any: after updates with ``precision="bf16-true"`` and
            ``"fp16-true"`` there are none.
        prefix: A prefix of all names, such as ``"statistics/"``.
        trigger: The trigger that decides when to compute them.

    Determinism: computed from weights and gradients on one thread, so they are equal on all placements of the same kind
    of device.
    """

    priority = WRITER

    statistics: Mapping[str, Statistic] = field(default_factory=lambda: STATISTICS)
    _: KW_ONLY
    data: bool = True
    grads: bool = True
    prefix: str = ""
    trigger: TriggerSpec = (1, "epoch")

    def __call__(self, trainer: Trainer) -> None:
        """Compute and observe the statistics."""
        for model_name, model in trainer.updater.get_all_models().items():
            prefix = self.prefix if model_name == MAIN else f"{self.prefix}{model_name}/"
            for name, parameter in model.named_parameters():
                tensors = {"data": parameter.detach() if self.data else None}
                tensors["grad"] = parameter.grad if self.grads else None
                for kind, tensor in tensors.items():
                    # An empty tensor has no minimum.
                    if tensor is not None and tensor.numel():
                        self._observe(trainer, f"{prefix}{name}/{kind}", tensor)

    def _observe(self, trainer: Trainer, name: str, tensor: torch.Tensor) -> None:
        for statistic, function in self.statistics.items():
            trainer.observe(f"{name}/{statistic}", function(tensor))


class Throughput(Extension):
    """Observes updates, and samples or tokens, per second, and the load and memory of devices, since it last did.

    The names are:

    * ``"throughput/updates"``, and ``"throughput/samples"`` for the samples of the batches, whatever their losses weigh
      (see `UpdateResult.num_samples`), unless none are counted, as by an updater of your own whose results have no
      ``num_samples``. The time includes that of other extensions.
    * ``"throughput/tokens"``, if you pass ``label="tokens"``, for the weights of the loss. The weight of a loss is the
      number of samples, or of tokens with `token_mean`, and 1 if the loss is a sum. If nothing observes the weights, a
      warning says so.
    * ``"throughput/load/device0"`` and so on, in the order of the updater's devices: the share of the time in which the
      device computed shards, in [0, 1]. The rest is the sum over devices, the optimizer, data and extensions. On CPUs
      every update is measured. Elsewhere the second update of an interval stands for all of them, because measuring
      waits for the device; in an interval of a single update, the load is left out.
    * ``"throughput/memory/cuda:0"``, the largest number of bytes that tensors took on the device, on accelerators that
      count it; ``"throughput/memory/cpu"``, the largest resident memory of the process since it began, on Linux and
      macOS.

    Args:
        weight_of: The name of the observed mean whose weights are counted; with several models in a step function, that
            of one of them, such as ``"main/gen/loss"``.
        label: The last part of the name for the counted weights, such as ``"tokens"``. With the default one, that of
            the samples, no weights are counted.
        trigger: The trigger that decides when to observe them.

    With several processes, the counts are those of the whole batch, and time, load and memory those of each process.
    """

    priority = WRITER

    def __init__(
        self, weight_of: str = "main/loss", *, label: str = "samples", trigger: TriggerSpec = (1, "epoch")
    ) -> None:
        self.weight_of = weight_of
        self.label = label
        self.trigger = trigger
        self._since = 0.0
        self._updates = 0
        self._samples = 0
        self._weight: float | torch.Tensor | None = None
        self._warned = False
        self._load: _DeviceLoad | None = None

    def initialize(self, trainer: Trainer) -> None:
        """Begin to count."""
        # An updater of another kind has no devices that compute shards.
        updater = trainer.updater
        self._load = _DeviceLoad(updater.clock, updater.devices) if isinstance(updater, ParallelUpdater) else None
        self._restart(trainer)

    def collect(self, trainer: Trainer) -> None:
        """Count the update, its samples and its weight; nothing is read from the device."""
        self._updates += 1
        self._samples += getattr(trainer.result, "num_samples", 0)
        if self._load is not None:
            self._load.end_update(self._updates)
        value = trainer.observation.get(self.weight_of)
        if isinstance(value, Mean) and self.label != "samples":
            self._weight = value.weight if self._weight is None else self._weight + value.weight

    def __call__(self, trainer: Trainer) -> None:
        """Observe the rates, the load and the memory."""
        # Before the clock: reading waits for the work that is still on the device.
        weight = None if self._weight is None else float(self._weight)
        seconds = max(time.perf_counter() - self._since, 1e-9)
        counts: dict[str, float] = {"updates": self._updates} | ({} if weight is None else {self.label: weight})
        counts |= {"samples": self._samples} if self._samples else {}
        for name, count in counts.items():
            trainer.observe(f"throughput/{name}", count / seconds)
        if self.label not in {"samples", *counts} and not self._warned and trainer.is_main:
            self._warned = True
            warn(
                f"`weight_of` must name an observed mean, got {self.weight_of!r}, so Throughput leaves out the rate of "
                f"{self.label}. Values that are observed: {', '.join(sorted(trainer.observation))}."
            )
        for index, share in enumerate([] if self._load is None else self._load.shares(seconds / self._updates)):
            trainer.observe(f"throughput/load/device{index}", share)
        for device in dict.fromkeys(trainer.updater.devices):
            memory = peak_memory(device)
            if memory is not None:
                trainer.observe(f"throughput/memory/{device}", memory)
        self._restart(trainer)

    def finalize(self, trainer: Trainer) -> None:  # noqa: ARG002 - the interface
        """Measure no longer."""
        if self._load is not None:
            self._load.stop()
            self._load = None

    def _restart(self, trainer: Trainer) -> None:
        """Count from now on."""
        for device in trainer.updater.devices:
            restart_peak_memory(device)
        if self._load is not None:
            self._load.restart()
        self._since, self._updates, self._samples, self._weight = time.perf_counter(), 0, 0, None


class _DeviceLoad(Stopwatch):
    """Measures how long devices compute: in every update on CPUs, else in the second one of an interval.

    The first update of an interval may be the first of the run, which chooses kernels and starts threads.
    """

    def __init__(self, clock: Clock, devices: tuple[torch.device, ...]) -> None:
        super().__init__(clock)
        self._always = all(device.type == "cpu" for device in devices)

    def restart(self) -> None:
        """Begin an interval."""
        self.stop()
        self.clear()
        if self._always:
            self.start()

    def end_update(self, number: int) -> None:
        """End an update, by its number in the interval, from 1, and begin another one."""
        self.stop()
        if self._always or number == 1:
            self.start()

    def shares(self, seconds: float) -> list[float]:
        """Return the share of the time of each device, if an update takes this long; none if none was measured."""
        measured = self.num_stretches
        # One update that stands for others may have been slower than they were.
        return [min(each / measured / seconds, 1.0) for each in self.times.busy_seconds] if measured else []
