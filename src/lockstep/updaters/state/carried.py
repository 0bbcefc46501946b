"""Values that are carried from batch to batch along the streams of samples, such as the hidden state of an LSTM."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from lockstep import nest
from lockstep.arguments import check_bool
from lockstep.errors import StateError
from lockstep.precision import to_device
from lockstep.replicas import BatchDim, check_dims, count_samples, positive_dims

ShardValues: TypeAlias = "dict[range, list[torch.Tensor]]"
"""The values that shards have returned, by the samples of the shard."""


@dataclass(frozen=True, slots=True)
class Carried:
    """What each sample of a batch carries over to the sample at the same position in the next batch.

    In truncated backpropagation through time, a batch holds the next piece of several long streams, and the hidden
    state after one piece is where the next one begins. With ``ParallelUpdater(..., carried=Carried(hidden))``, every
    call of the loss function gets the values of its shard as the argument `carried`, without a graph, and returns the
    new ones in ``Loss(value, carried=...)``; it need not detach them. They take effect when the update is applied: a
    skipped update and a failed attempt leave the old values. They are part of `state_dict`, and do not depend on where
    shards are computed.

    Attributes:
        initial: A tensor or nested tensors, with which the run begins.
        dim: The dimension that counts samples, for all tensors or by name. A tuple's tensors are named ``"carried[0]"``
            and so on. The default fits `torch.nn.LSTM` and `torch.nn.GRU`, (layers, samples, features).
        each_epoch: Whether the values return to the initial ones when the main iterator starts an epoch.

    >>> carried = Carried((torch.zeros(2, 20, 200), torch.zeros(2, 20, 200)))
    """

    initial: Any
    dim: BatchDim = 1
    each_epoch: bool = True

    def __post_init__(self) -> None:
        check_dims(self.dim, "dim")
        check_bool("each_epoch", self.each_epoch)
        if not nest.tensors(self.initial):
            raise ValueError("`initial` must hold at least one tensor, got none.")


class CarriedValues:
    """The current values of `Carried`, on one device.

    Args:
        carried: What the user gave.
        device: The device to hold the values on.

    Attributes:
        current: The values that the next update starts from, which are replaced and never changed in place.
        initial: The values that the run began with, on the device.
        names: The names of the tensors.
        dims: The dimension of each tensor that counts samples, 0 or more.
        each_epoch: Whether the values return to the initial ones when the main iterator starts an epoch.
        num_samples: The number of samples in a batch.
    """

    def __init__(self, carried: Carried, device: torch.device) -> None:
        named = nest.named_tensors(carried.initial, "carried")
        self.names = [name for name, _ in named]
        tensors = [tensor for _, tensor in named]
        self.dims = positive_dims(carried.dim, self.names, tensors, "dim")
        if None in self.dims:
            name = self.names[self.dims.index(None)]
            raise ValueError(f"`dim` of Carried must be a number for every tensor, got None for `{name}`.")
        self.num_samples = count_samples(self.names, tensors, self.dims, "carried")
        self._containers, self.each_epoch = carried.initial, carried.each_epoch
        self.initial = [tensor.detach().to(device, copy=True) for tensor in tensors]
        self.current = self.initial

    def start_epoch(self) -> None:
        """Return to the initial values, unless they are to be kept."""
        if self.each_epoch:
            self.current = self.initial

    def check_batch(self, num_samples: int) -> None:
        """Check that a batch has as many samples as there are streams.

        Args:
            num_samples: The number of samples in the batch.

        Raises:
            ValueError: If it does not.
        """
        if num_samples != self.num_samples:
            raise ValueError(
                f"`batch` must hold {self.num_samples} samples, one for each that has values in `carried`, got "
                f"{num_samples}. Drop a last batch that is smaller, and give time-first batches with `batch_dim=1`."
            )

    def part(self, samples: range, device: torch.device) -> Any:
        """Return the values of some samples on a device, in the containers of the user.

        Args:
            samples: The samples.
            device: The device of the result.
        """
        rest = iter([to_device(part, device) for part in self._views(self.current, samples)])
        return nest.map_tensors(lambda _: next(rest).clone(memory_format=torch.contiguous_format), self._containers)

    def check_returned(self, returned: Any, samples: range) -> list[torch.Tensor]:
        """Return the new values of some samples without their graph, after checking their shapes.

        Args:
            returned: What the loss function returned.
            samples: The samples.

        Raises:
            ValueError: If tensors are missing, or if they have other shapes than those that were given.
        """
        shapes = [tuple(view.shape) for view in self._views(self.current, samples)]
        found = [tensor.detach() for tensor in nest.tensors(returned)]
        if [tuple(each.shape) for each in found] != shapes:
            got = [tuple(each.shape) for each in found] or "none"
            raise ValueError(
                f"`loss_fn` must return new values of the shapes {shapes} as `carried`, got {got}. Return "
                "lockstep.Loss(value, carried=hidden), with the hidden state after the last step of the batch."
            )
        return found

    def merged(self, parts: ShardValues) -> list[torch.Tensor]:
        """Return the values after an update.

        Args:
            parts: The new values of all shards. Samples without a shard keep their old values.
        """
        new = [tensor.clone() for tensor in self.current]
        for samples, tensors in parts.items():
            for view, tensor in zip(self._views(new, samples), tensors, strict=True):
                # Converts from half precision, which autocast may have computed in.
                view.copy_(tensor)
        return new

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Check that saved values have the names and shapes of the current ones.

        Raises:
            StateError: If they do not.
        """
        shapes = {name: tuple(tensor.shape) for name, tensor in self.state_dict().items()}
        found = {name: tuple(tensor.shape) for name, tensor in state.items()}
        if found != shapes:
            raise StateError(f"`state` must hold carried values of the shapes {shapes}, got {found}.")

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the current values by name."""
        return dict(zip(self.names, self.current, strict=True))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load saved values, which `check_state` has checked."""
        self.current = [
            state[name].detach().to(own.device, own.dtype, copy=True)
            for name, own in zip(self.names, self.current, strict=True)
        ]

    def _views(self, tensors: Sequence[torch.Tensor], samples: range) -> list[torch.Tensor]:
        """Return the parts of tensors that belong to some samples."""
        cut = slice(samples.start, samples.stop, samples.step)
        return [tensor[(slice(None),) * (dim or 0) + (cut,)] for tensor, dim in zip(tensors, self.dims, strict=True)]


class CarriedAttempt:
    """The values of one attempt: the old ones for the loss function, and the new ones that shards have returned.

    Args:
        values: The current values, which are not changed.
        batch_sizes: The number of samples in each batch of the attempt.

    Raises:
        ValueError: If a batch does not have as many samples as there are values.
    """

    def __init__(self, values: CarriedValues, batch_sizes: Sequence[int]) -> None:
        for size in batch_sizes:
            values.check_batch(size)
        self._values = values
        self.part = values.part
        self._returned: ShardValues = {}

    def keep(self, samples: range, returned: Any) -> None:
        """Keep the new values of some samples; called by the threads of all devices, for other samples each.

        Raises:
            ValueError: If they do not have the shapes of the old ones.
        """
        self._returned[samples] = self._values.check_returned(returned, samples)

    def returned(self, samples: range) -> Sequence[torch.Tensor]:
        """Return the new values of some samples; none before they are kept."""
        return self._returned.get(samples, ())

    def merged(self, gather: Callable[[ShardValues], list[ShardValues]] | None = None) -> list[torch.Tensor]:
        """Return the values after the update.

        Args:
            gather: Sends the values of this process to all others, and returns those of all; None for one process.
        """
        parts = self._returned
        if gather is not None:
            # As they are and not as a sum over ranks, in which -0.0 would become 0.0.
            own = {samples: [each.cpu() for each in tensors] for samples, tensors in parts.items()}
            parts = {samples: tensors for found in gather(own) for samples, tensors in found.items()}
        return self._values.merged(parts)
