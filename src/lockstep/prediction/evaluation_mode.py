"""Run a model in evaluation mode, and leave everything as it was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch

from lockstep.replicas import OneIntraOpThread
from lockstep.streams import restored_generators

NO_OUTPUT: Final = object()
"""Stands for the output of a model that has not run."""


@contextmanager
def evaluation_mode(model: torch.nn.Module, replicas: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Set a model and its replicas to evaluation mode, without gradients and on one intra-op thread.

    Afterwards the mode of each module, the number of threads and the random generators of torch's CPU, of Python and
    of NumPy are restored, also after an error.

    Args:
        model: The model to evaluate.
        replicas: The replicas that run.
    """
    modes = [(module, module.training) for root in (model, *replicas) for module in root.modules()]
    try:
        # By attribute, because `eval` of a module may be overridden.
        for module, _ in modes:
            module.training = False
        # Iterating over a DataLoader draws a seed from the default generator: training must not depend on evaluations.
        with restored_generators(), OneIntraOpThread(), torch.no_grad():
            yield
    finally:
        # One by one, because train() would also set the children of a frozen part to training mode.
        for module, training in modes:
            module.training = training


@contextmanager
def recording_outputs(networks: Sequence[torch.nn.Module]) -> Iterator[list[Any]]:
    """Record the last output of each network, so that the run of the loss function serves the metrics too.

    Args:
        networks: The replicas of the network, each of which has a forward hook within the ``with`` block.

    Returns:
        A list of the last output of each; `NO_OUTPUT` where there is none.
    """
    outputs: list[Any] = [NO_OUTPUT] * len(networks)

    def recorder(place: int) -> Any:
        def record(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
            outputs[place] = output

        return record

    with ExitStack() as stack:
        for place, network in enumerate(networks):
            stack.callback(network.register_forward_hook(recorder(place)).remove)
        yield outputs
