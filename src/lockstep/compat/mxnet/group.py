"""MXNet's group of executors: one model on several devices, cut by MXNet's own rule."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from lockstep import nest
from lockstep.compat.mxnet.descriptions import DataBatch, DataDesc, Description, batch_size, described, joined, pairs
from lockstep.compat.mxnet.grad_req import GradReqs, read_grad_req
from lockstep.compat.mxnet.slices import loads_of, split_input_slice
from lockstep.replicas import Monitor, ReplicaGroup, Updatable

Tensors: TypeAlias = "Sequence[torch.Tensor | None]"


class DataParallelExecutorGroup:
    """A model on several devices that share the work of a batch; see `lockstep.ReplicaGroup`, which does it.

    Peculiar to MXNet: a batch is cut by `split_input_slice`; inputs are fixed by name and shape from the
    beginning; metrics are updated once for each device; names that are missing in `set_params` are passed
    over. Gradients are those of what the model returns: a loss that is a mean over samples gives the mean's.

    Args:
        symbol: The model; called with the data and then the labels, by position.
        contexts: Names of devices.
        workload: The load of each device, or None for equal ones.
        data_shapes: Descriptions of the data.
        label_shapes: Descriptions of the labels, which the model is called with, too; None for none.
        param_names: The parameters that get a gradient; None for all.
        for_training: Whether backward is possible.
        inputs_need_grad: Whether backward gives the gradients of the data.
        shared_group: Use the parameters and gradients of this group.
        logger: Told how the batch is cut.
        fixed_param_names: Parameters without a gradient.
        grad_req: What becomes of gradients: "write", "add" or "null"; or one for each of data, parameters and
            labels in that order, taken literally; or words by name, which go before `fixed_param_names`.
        state_names: Not supported; give states as data.
        group2ctxs: Not supported; put parts of the model on other devices by `lockstep.OnDevice`.
        output_layouts: The layout of outputs by name, "output" or "output[0]"; others count samples first.

    Attributes:
        core: What computes, for what MXNet has no name for.

    Raises:
        ValueError: An argument is out of range, names do not fit, or MXNet's rule leaves a device empty.
        TypeError: The model is no module.

    Determinism: as `lockstep.ReplicaGroup` with one shard a device.

    References: Apache MXNet 1.9.1, ``mxnet.module.executor_group.DataParallelExecutorGroup``.

    >>> batch = DataBatch([torch.ones(6, 2)])
    >>> group = DataParallelExecutorGroup(
    ...     nn.Linear(2, 1), ["cpu", "cpu"], [2, 1], [DataDesc("x", (6, 2))], None, None, True, False
    ... )
    >>> group.forward(batch)
    >>> [tuple(part.shape) for part in group.get_outputs()[0]]
    [(4, 1), (2, 1)]
    >>> group.core.close()
    """

    def __init__(
        self,
        symbol: nn.Module,
        contexts: Sequence[str | torch.device],
        workload: Sequence[float] | None,
        data_shapes: Sequence[Description],
        label_shapes: Sequence[Description] | None,
        param_names: Sequence[str] | None,
        for_training: bool,
        inputs_need_grad: bool,
        shared_group: DataParallelExecutorGroup | None = None,
        logger: Any = logging,
        fixed_param_names: Sequence[str] | None = None,
        grad_req: GradReqs = "write",
        state_names: Sequence[str] | None = None,
        group2ctxs: Any = None,
        *,
        output_layouts: Mapping[str, str] | None = None,
    ) -> None:
        _refuse(state_names=state_names, group2ctxs=group2ctxs)
        self.workload = loads_of(len(contexts), workload)
        self.logger = logger
        self._data, self._labels = described(data_shapes), described(label_shapes)
        names = [name for name, _ in symbol.named_parameters()]
        given = names if param_names is None else list(param_names)
        self.core: ReplicaGroup = ReplicaGroup(
            symbol,
            list(contexts),
            workloads=self._cut(self._data + self._labels),
            batch_dim={each.name: each.batch_axis for each in self._data + self._labels},
            output_dim={name: DataDesc.axis_of(layout) for name, layout in (output_layouts or {}).items()},
            training=for_training,
            shared_group=None if shared_group is None else shared_group.core,
            **read_grad_req(
                grad_req,
                data=[each.name for each in self._data],
                parameters=names,
                labels=[each.name for each in self._labels],
                fixed=[*(fixed_param_names or ()), *(name for name in names if name not in given)],
                inputs_need_grad=inputs_need_grad,
            ),
        )
        self._returned: Any = None
        self._pad = 0
        self.bind_exec(data_shapes, label_shapes, shared_group)

    def bind_exec(
        self,
        data_shapes: Sequence[Description],
        label_shapes: Sequence[Description] | None,
        shared_group: DataParallelExecutorGroup | None = None,  # noqa: ARG002 - the constructor has shared
        reshape: bool = False,
    ) -> None:
        """Fix names and shapes, which the constructor has done; or change shapes.

        Args:
            data_shapes: Descriptions of the data.
            label_shapes: Descriptions of the labels.
            shared_group: As the constructor was given it.
            reshape: As `reshape`.

        Raises:
            OrderError: They are fixed already, and `reshape` is False.
            ValueError: Shapes do not fit, or MXNet's rule leaves a device empty; nothing has changed.
        """
        if reshape:
            self.reshape(data_shapes, label_shapes)
        else:
            self.core.bind(pairs(described(data_shapes)), pairs(described(label_shapes)))

    def reshape(self, data_shapes: Sequence[Description], label_shapes: Sequence[Description] | None) -> None:
        """Change the shapes of inputs; parameters and gradients stay as they are.

        Args:
            data_shapes: Descriptions of the data, with the same names.
            label_shapes: Descriptions of the labels.

        Raises:
            ValueError: Shapes do not fit, or MXNet's rule leaves a device empty; nothing has changed.
        """
        data, labels = described(data_shapes), described(label_shapes)
        loads = self._cut(data + labels)
        self.core.reshape(pairs(data), pairs(labels))
        self.core.workloads = loads

    def forward(self, data_batch: DataBatch | Sequence[DataBatch], is_train: bool | None = None) -> None:
        """Split a batch and run forward on each device.

        Args:
            data_batch: A batch of the shapes that are bound; or one for each device, cut already.
            is_train: Whether as in training; None for what the group was made for.

        Raises:
            ValueError: The batch has other shapes.
            ReplicaError: The model raised on a device.
        """
        descriptions = self._data + self._labels
        batch = data_batch if isinstance(data_batch, DataBatch) else joined(data_batch, descriptions)
        labels = list(batch.label or ()) if self._labels else []
        self._returned = self.core.forward((*batch.data, *labels), is_train)
        self._pad = batch.pad or 0

    def backward(self, out_grads: Tensors | torch.Tensor | None = None) -> None:
        """Run backward on all devices; again, if called again before the next forward.

        Args:
            out_grads: The gradient of each merged output; not needed where the model returns a loss.

        Raises:
            OrderError: The group was not made for training, or there was no forward.
            ValueError: Gradients are missing or of another shape; nothing has changed.
        """
        grads = [out_grads] if isinstance(out_grads, torch.Tensor) else list(out_grads or ())
        count = len(self.core.output_shapes())
        if out_grads is not None and len(grads) != count:
            raise ValueError(f"`out_grads` must hold one gradient an output ({count}), got {len(grads)}.")
        rest = iter(grads)
        given = None if out_grads is None else nest.map_tensors(lambda _: next(rest), self._returned)
        self.core.backward(given, retain_graph=True)

    def get_batch_size(self) -> int:
        """Give the number of samples of a batch."""
        return self.core.batch_size

    def get_outputs(self) -> list[list[torch.Tensor]]:
        """Give for each output its part on each device."""
        return self.core.outputs(merge=False)

    def get_outputs_merged(self) -> list[torch.Tensor]:
        """Give each output of the whole batch, sample k at place k."""
        return self.core.outputs()

    def get_output_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Give the name and the shape of each output of the whole batch, after a forward."""
        return self.core.output_shapes()

    def get_input_grads(self) -> list[list[torch.Tensor]]:
        """Give for each of the data the gradient of what each device was given."""
        return self.core.input_grads(merge=False)[: len(self._data)]

    def get_input_grads_merged(self) -> list[torch.Tensor]:
        """Give the gradient of each of the data; of what was given whole to each device, the sum."""
        return self.core.input_grads()[: len(self._data)]

    def get_params(self, arg_params: Mapping[str, torch.Tensor], aux_params: Mapping[str, torch.Tensor]) -> None:
        """Copy parameters and buffers into tensors that are there.

        Args:
            arg_params: A tensor for each parameter, changed in place; others are left alone.
            aux_params: Likewise for buffers.

        Raises:
            KeyError: There is no tensor for one; nothing has changed.
        """
        targets: list[tuple[torch.Tensor, torch.Tensor]] = []
        for given, own in zip((arg_params, aux_params), self.core.get_parameters(), strict=True):
            targets += [(given[name], value) for name, value in own.items()]
        for target, value in targets:
            target.copy_(value)

    def set_params(
        self,
        arg_params: Mapping[str, torch.Tensor],
        aux_params: Mapping[str, torch.Tensor] | None,
        allow_extra: bool = False,
    ) -> None:
        """Copy values into the model and so into all replicas; names that are missing stay as they are.

        Args:
            arg_params: By the names of parameters.
            aux_params: By the names of buffers; None for none.
            allow_extra: Pass over names that the model does not have.

        Raises:
            ValueError: A name is unknown or a shape differs; nothing has changed.
        """
        self.core.set_parameters(arg_params, aux_params, allow_missing=True, allow_extra=allow_extra)

    def install_monitor(self, monitor: Monitor) -> None:
        """Have a monitor look at all replicas."""
        self.core.install_monitor(monitor)

    def update_metric(self, eval_metric: Updatable, labels: Sequence[torch.Tensor]) -> None:
        """Show a metric the outputs of the last forward, one device after another.

        Args:
            eval_metric: Called as ``update(output, label)``, once for each device with its own samples.
            labels: Those of the batch; what is padding at its end is not counted.

        Raises:
            ValueError: Labels are for another number of samples; nothing was counted.
        """
        target = labels[0] if len(labels) == 1 else tuple(labels)
        self.core.update_metric(eval_metric, target, per_device=True, pad=self._pad)

    def _cut(self, descriptions: Sequence[DataDesc]) -> list[float]:
        """Give the lengths of MXNet's slices; by them as work loads the core cuts exactly so."""
        size = batch_size(descriptions)
        if size is None:
            return self.workload
        slices = split_input_slice(size, self.workload)
        self.logger.debug("A batch of %d is cut into %s.", size, slices)
        return [float(each.stop - each.start) for each in slices]


def _refuse(**unsupported: object) -> None:
    for name, given in unsupported.items():
        if given:
            raise ValueError(f"`{name}` must be None, got {given!r}. See `lockstep.OnDevice`; states are data.")
