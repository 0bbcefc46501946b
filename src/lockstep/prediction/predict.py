"""Predict a dataset with a model, on all devices and ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from lockstep.communicators import Communicator, find_communicator
from lockstep.data import collate
from lockstep.integers import check_integer
from lockstep.prediction.prediction import Prediction
from lockstep.replicas import BatchDim, Devices
from lockstep.updaters import Converter, InferenceRunner


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
    joined = find_communicator() if communicator is None else communicator
    joined.check_same(model)
    runner = InferenceRunner.of_model(
        model, joined, num_shards=num_shards, devices=devices, precision=precision, converter=converter, seed=seed
    )
    try:
        return Prediction(output, target, None, output_dim).run(runner, dataset, batch_size)
    finally:
        runner.release()
