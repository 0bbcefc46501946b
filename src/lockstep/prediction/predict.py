"""Predict a dataset with a model, on all devices and ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, Final, TypeAlias

import torch
from torch import nn

from lockstep import nest
from lockstep.arguments import check_instance, check_integer
from lockstep.communicators import Communicator, find_communicator
from lockstep.data import BatchIterator, Iterator, MapDataset, Parts, collate
from lockstep.nest import call_arguments
from lockstep.plan import Shard
from lockstep.prediction.data_pass import DataPass, check_one_pass, in_held_precision, rewound
from lockstep.replicas import BatchDim, Devices, ShardForward, check_dims, read_outputs
from lockstep.updaters import Converter, InferenceRunner, check_functions


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """Chooses the entries of a batch that a model receives; a target is left out.

    Attributes:
        target: True if the last entry of a tuple is the target, or the key of the target in a dict; False if there is
            none; None to decide by the parameters of the forward.
        required: The number of positional parameters without a default.
        positional: The number of positional parameters; None without a limit.
        names: The names of the parameters; None if the forward takes any keyword.
    """

    target: bool | str | None
    required: int
    positional: int | None
    names: frozenset[str] | None

    @classmethod
    def of_forward(cls, forward: Callable[..., Any], target: bool | str | None) -> ModelInputs:
        """Return the inputs of a forward.

        Args:
            forward: The bound forward of the model.
            target: The target of a batch, see the class.
        """
        parameters = inspect.signature(forward).parameters.values()
        kinds = {each.kind for each in parameters}
        by_position = [each for each in parameters if each.kind in {each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD}]
        return cls(
            target,
            sum(each.default is each.empty for each in by_position),
            None if inspect.Parameter.VAR_POSITIONAL in kinds else len(by_position),
            None if inspect.Parameter.VAR_KEYWORD in kinds else frozenset(each.name for each in parameters),
        )

    def of_batch(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and the keyword arguments of the model for a batch.

        Args:
            batch: The tensors of a batch or of a shard.

        Raises:
            KeyError: If a dict lacks the key of the target.
            ValueError: If the target is not known, and it is unclear whether the last entry of a tuple is one.
        """
        args, kwargs = call_arguments(batch)
        return self._without_target(args), (self._without_key(kwargs) if isinstance(batch, Mapping) else kwargs)

    def _without_target(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        # A single entry is always an input.
        if self.target is False or len(args) <= 1:
            return args
        if self.target is not None:
            return args[:-1]
        if len(args) <= self.required:
            return args
        if self.positional is not None and len(args) == self.positional + 1:
            return args[:-1]
        raise ValueError(
            "`target` must be given if the model may take the last entry of a batch or not, got None for "
            f"{len(args)} entries and a forward with {self.required} required parameters. Pass target=True to leave "
            "out the last entry, or target=False to pass all of them."
        )

    def _without_key(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        if isinstance(self.target, str):
            if self.target not in kwargs:
                raise KeyError(f"`target` must be one of {sorted(kwargs)}, the keys of a batch, got {self.target!r}.")
            return {name: value for name, value in kwargs.items() if name != self.target}
        if self.target is None and self.names is not None:
            return {name: value for name, value in kwargs.items() if name in self.names}
        return kwargs


EXCHANGED_WINDOWS: Final = 16
"""How many windows of batches are computed between two exchanges of outputs: fewer exchanges wait less."""

ShardOutput: TypeAlias = "tuple[tuple[int, int], range, Any]"
"""The batch and the number of a shard, its samples within the batch, and what the model returned, on the CPU."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a prediction computes, wherever it runs.

    Attributes:
        output: A function of the output of the model that returns what is collected; None for the output itself.
        target: Which entry of a batch the model does not receive, see `predict`.
        converter: Converts samples to tensors; None for the converter of the runner.
        output_dim: The dimension of outputs that counts samples.
    """

    output: Callable[[Any], Any] | None = None
    target: bool | str | None = None
    converter: Converter | None = None
    output_dim: BatchDim = 0

    def __post_init__(self) -> None:
        if self.output is not None and not callable(self.output):
            raise TypeError(f"`output` must be a function of the output of the model, or None, got {self.output!r}.")
        check_instance("target", self.target, bool | str | None, "True, False, the key of the target or None")
        check_functions(converter=self.converter)
        check_dims(self.output_dim, "output_dim")

    def run(self, runner: InferenceRunner, dataset: Any, size: int) -> Any:
        """Predict a dataset on the devices and ranks of a runner.

        Args:
            runner: Runs the shards of this rank, and is released at the end.
            dataset: The dataset or the batches.
            size: The number of samples per batch, at least 1, of a dataset.

        Returns:
            The outputs of all samples.
        """
        data_pass = DataPass(runner, self.converter, name="dataset")
        collected: list[ShardOutput] = []
        own: list[ShardOutput] = []

        def compute(place: int, given: Any) -> Any:
            args, kwargs = in_held_precision(given, runner.precision)
            output = data_pass.networks[place](*args, **kwargs)
            return output if self.output is None else self.output(output)

        with ExitStack() as stack:
            stack.callback(runner.release)
            stack.enter_context(data_pass.running())
            batches = _batches(dataset, size, runner)
            inputs = ModelInputs.of_forward(data_pass.networks[0].forward, self.target)
            for index, results in enumerate(data_pass.results(batches, compute, inputs.of_batch)):
                own += [
                    ((batch, each.shard.index), each.shard.samples, _on_cpu(each.returned)) for batch, each in results
                ]
                if index % EXCHANGED_WINDOWS == EXCHANGED_WINDOWS - 1:
                    collected += chain.from_iterable(data_pass.gather(own))
                    own.clear()
            collected += chain.from_iterable(data_pass.gather(own))
        return self._merged(sorted(collected, key=lambda each: each[0]), data_pass.sizes)

    def _merged(self, collected: list[ShardOutput], sizes: list[int]) -> Any:
        """Merge the outputs of all shards in the order of samples."""
        forwards = [
            ShardForward(Shard(index, batch, samples), [], returned, nest.tensors(returned), [], None)
            for index, ((batch, _), samples, returned) in enumerate(collected)
        ]
        try:
            outputs = read_outputs(forwards, sum(sizes), self.output_dim)
        except (TypeError, ValueError) as error:
            cure = "Pass output=lambda out: out.logits or the like to choose what is collected."
            raise type(error)(f"{error} {cure}") from None
        for name, dim, *tensors in zip(outputs.names, outputs.dims, *(each.tensors for each in forwards), strict=True):
            shapes = {tuple(each.shape[:dim] + each.shape[dim + 1 :]) for each in tensors} if dim is not None else ()
            if len(shapes) > 1:
                raise ValueError(
                    f"`{name}` must have the same shape for all samples, got {sorted(shapes)}. Pad the samples to one "
                    "length in the converter, or pass an `output` function that returns something of one size."
                )
        merged = outputs.merged(torch.device("cpu"))
        order = _order(collected, sizes)
        for index, (tensor, dim) in enumerate(zip(merged, outputs.dims, strict=True)):
            if order is not None and dim is not None:
                merged[index] = tensor.index_select(dim, order)
            elif len(forwards) == 1:
                # The only part itself, which may be the memory of an input or of a weight.
                merged[index] = tensor.clone()
        return outputs.unflatten(merged)


def _batches(dataset: Any, size: int, runner: InferenceRunner) -> Iterable[Any]:
    """Return the batches of one pass over a dataset."""
    is_readable = hasattr(dataset, "__iter__") or hasattr(dataset, "__getitem__")
    if isinstance(dataset, Mapping | tuple | str) or not is_readable:
        raise TypeError(
            f"`dataset` must be a dataset or an iterable of batches, got a {type(dataset).__name__}. Pass "
            "torch.utils.data.TensorDataset(*tensors) for tensors of all samples."
        )
    if isinstance(dataset, MapDataset) and not isinstance(dataset, Iterator):
        # The outputs are in the order of the dataset, which is not that of parts that are read side by side.
        in_order = (lambda order, _: order) if isinstance(dataset, Parts) else None
        dataset = BatchIterator(dataset, size, repeat=False, order_sampler=in_order)
    check_one_pass(dataset, "dataset")
    batches: Iterable[Any] = rewound(dataset, runner)
    return batches


def _on_cpu(returned: Any) -> Any:
    """Return an output whose tensors are on the CPU, without the memory of larger tensors that they are views of."""

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        moved = tensor.detach().cpu()
        if moved.layout is not torch.strided:
            raise TypeError(
                f"`output` must return dense tensors, got one of {moved.layout}. Pass output=lambda out: "
                "out.to_dense() or the like."
            )
        # A view such as the last position of a sequence would keep and send all positions.
        is_view = moved.untyped_storage().nbytes() > moved.numel() * moved.element_size()
        return moved.clone(memory_format=torch.contiguous_format) if is_view else moved

    return nest.map_tensors(copied, returned)


def _order(collected: list[ShardOutput], sizes: list[int]) -> torch.Tensor | None:
    """Return where each sample lies in the merged outputs; None if they are in order, as without strided shards."""
    starts = list(accumulate(sizes, initial=0))
    positions = [starts[batch] + sample for (batch, _), samples, _ in collected for sample in samples]
    return None if positions == list(range(len(positions))) else torch.tensor(positions, device="cpu").argsort()


def predict(
    model: nn.Module,
    dataset: Any,
    *,
    devices: Devices = "auto",
    batch_size: int = 32,
    num_shards: int = 1,
    precision: str | None = None,
    output: Callable[[Any], Any] | None = None,
    target: bool | str | None = None,
    converter: Converter = collate,
    output_dim: BatchDim = 0,
    seed: int = 0,
    communicator: Communicator | None = None,
) -> Any:
    """Run a model on a dataset in evaluation mode, and return the outputs of all samples in their order.

    The batches are distributed over the devices of all ranks. Every rank makes this call with the same model and the
    same data, and receives the outputs of all samples, on the CPU. The model, its buffers and modes, and the random
    generators are as before.

    A tuple batch is passed to the model by position, a dict batch by keyword. Data may have labels: the last entry of a
    tuple is left out if the forward of the model cannot take it, and so are the keys of a dict that the forward does
    not name. If the forward has optional parameters, a tuple may be ambiguous; then you must pass `target`.

    Outputs may be tensors in tuples, lists, dicts and dataclasses. They are concatenated along `output_dim`; one
    without dimensions, such as a loss, becomes the mean over samples.

    Args:
        model: The model. It stays where it is and is not changed.
        dataset: Any object with ``len()`` and ``[index]``, a list of samples for example; or an iterable of batches,
            such as a DataLoader or a `BatchIterator` with ``repeat=False``.
        devices: The devices of this rank: ``"auto"``, a number, or a list of names, as in `ParallelUpdater`.
        batch_size: The number of samples per batch of a dataset, at least 1.
        num_shards: The number of shards per batch, at least 1. With 1 each batch runs as a whole.
        precision: ``"fp32"``, or ``"bf16"`` or ``"fp16"`` for autocast, or ``"bf16-true"`` or ``"fp16-true"`` for a
            model that is held in it. By default that of the parameters, without autocast.
        output: A function of the output of the model for a shard, such as ``lambda out: out.logits``, that returns what
            is collected. It runs on the device, so it can also make large outputs small.
        target: True if the last entry of a tuple is a target that the model does not receive, or the key of the target
            in a dict; False if there is none; None to decide by the parameters of the forward.
        converter: Called as ``converter(samples, device)`` for the samples of one shard.
        output_dim: The dimension of outputs that counts samples, or a dict by name, with None for an output that is one
            value for all samples.
        seed: The seed of the random streams, for a model that draws random numbers in evaluation mode.
        communicator: The communicator of the ranks. By default it is found in the environment.

    Returns:
        The outputs in containers like those of the model.

    Raises:
        ValueError: If there is no sample, the outputs do not fit together, or it is unclear which entry is a target.
        TypeError: If the model returns something that is neither a tensor nor a plain value; pass `output` then.
        ReplicaError: If the model raised; the original error is the cause.
        DisagreementError: If the ranks have different models or were given different batches.

    Determinism: the bits depend on the model, the data, the sizes of batches, `num_shards` and `seed`, and not on
    devices and ranks.

    >>> import torch
    >>> data = torch.utils.data.TensorDataset(torch.arange(5.0)[:, None], torch.zeros(5))
    >>> predict(torch.nn.Flatten(), data, devices=["cpu", "cpu"], batch_size=2).flatten()
    tensor([0., 1., 2., 3., 4.])
    """
    check_integer("batch_size", batch_size, minimum=1)
    check_integer("num_shards", num_shards, minimum=1)
    check_integer("seed", seed)
    check_instance("model", model, nn.Module, "a torch.nn.Module")
    check_instance("communicator", communicator, Communicator | None, "a Communicator or None")
    prediction = Prediction(output, target, None, output_dim)
    if converter is None:
        raise TypeError("`converter` must be callable, got a NoneType.")
    check_functions(converter=converter)
    joined = find_communicator() if communicator is None else communicator
    joined.check_same(model)
    runner = InferenceRunner.of_model(
        model, joined, num_shards=num_shards, devices=devices, precision=precision, converter=converter, seed=seed
    )
    return prediction.run(runner, dataset, batch_size)
