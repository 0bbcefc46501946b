"""Predictions with the model of a trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.integers import check_integer
from lockstep.prediction import Prediction, runner_of
from lockstep.replicas import BatchDim
from lockstep.updaters import Converter, Updater, look_up


class Predicting:
    """The part of a trainer that predicts.

    Attributes:
        updater: The updater whose model, devices, ranks and precision are used.
    """

    updater: Updater

    def predict(
        self,
        dataset: Any,
        *,
        batch_size: int = 32,
        num_shards: int = 1,
        model_name: str = "main",
        output: Callable[[Any], Any] | None = None,
        target: bool | str | None = None,
        converter: Converter | None = None,
        output_dim: BatchDim = 0,
    ) -> Any:
        """Run the model on a dataset, on the devices and ranks of the updater and in its precision.

        Every rank makes this call, before, after or during a run (from an extension), and receives the outputs of all
        samples, on the CPU and in order. Training is not affected. See `lockstep.predict` for the arguments.

        Args:
            dataset: A dataset, or an iterable of batches.
            batch_size: The number of samples per batch of a dataset, at least 1.
            num_shards: The number of shards per batch, at least 1. With 1 each batch runs as a whole.
            model_name: The name of the updater's model to run.
            output: A function of the output of the model that returns what is collected.
            target: True if the last entry of a tuple is a target, or the key of the target in a dict.
            converter: Converts samples to tensors; by default that of the updater.
            output_dim: The dimension of outputs that counts samples.

        Returns:
            The outputs in containers like those of the model.

        Raises:
            KeyError: If there is no model of this name.
            ValueError: If there is no sample, or the outputs do not fit together.
            ReplicaError: If the model raised; the original error is the cause.
            DisagreementError: If the ranks were given different batches.
        """
        check_integer("batch_size", batch_size, minimum=1)
        check_integer("num_shards", num_shards, minimum=1)
        updater = self.updater
        look_up(model_name, updater.get_all_models())
        runner = runner_of(updater, num_shards=num_shards, model_name=model_name)
        try:
            return Prediction(output, target, converter, output_dim).run(runner, dataset, batch_size)
        finally:
            runner.release()
