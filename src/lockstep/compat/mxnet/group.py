"""MXNet's group of executors: one model on several devices, its inputs, and the rule that splits a batch."""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import torch
from torch import nn

from lockstep import nest
from lockstep.metrics import Metric
from lockstep.replicas import Monitor, ReplicaGroup

Self = TypeVar("Self", bound="DataDesc")


class _NameAndShape(NamedTuple):
    name: str
    shape: Sequence[int]


class DataDesc(_NameAndShape):
    """The name and the shape of an input, as a pair, with a dtype and a layout.

    Two descriptions are equal if their names and shapes are.

    Args:
        name: The name of the input.
        shape: The shape of the input, with the samples of the whole batch.
        dtype: The dtype of the values; informational.
        layout: A letter for each dimension, with N for the samples. Only the position of the N is used.

    >>> DataDesc("x", (5, 7, 3), layout="TNC").batch_axis
    1
    """

    dtype: torch.dtype
    layout: str | None

    def __new__(
        cls: type[Self],
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        layout: str | None = "NCHW",
    ) -> Self:
        """Return a pair with two attributes."""
        pair = super().__new__(cls, name, tuple(shape))
        pair.dtype, pair.layout = dtype, layout
        return pair

    def __repr__(self) -> str:
        return f"DataDesc[{self.name},{self.shape},{self.dtype},{self.layout}]"

    @property
    def batch_axis(self) -> int | None:
        """The dimension of the samples, or None if every device gets the whole array."""
        return self.axis_of(self.layout)

    @staticmethod
    def axis_of(layout: str | None) -> int | None:
        """Return the dimension of the samples in a layout, or None if there is none."""
        axis = DataDesc.get_batch_axis(layout)
        return None if axis < 0 else axis

    @staticmethod
    def get_batch_axis(layout: str | None) -> int:
        """Return the position of the N in a layout: 0 without a layout, -1 if there is no N.

        >>> [DataDesc.get_batch_axis(layout) for layout in ("NCHW", "TNC", None, "TC")]
        [0, 1, 0, -1]
        """
        return 0 if layout is None else layout.find("N")

    @staticmethod
    def get_list(
        shapes: Sequence[tuple[str, Sequence[int]]], types: Sequence[tuple[str, torch.dtype]] | None
    ) -> list[DataDesc]:
        """Return descriptions of pairs of a name and a shape.

        Args:
            shapes: The names and shapes.
            types: The names and dtypes; None for float32.
        """
        dtypes = dict(types or [(name, torch.float32) for name, _ in shapes])
        return [DataDesc(name, shape, dtypes[name]) for name, shape in shapes]


Description: TypeAlias = "DataDesc | tuple[str, Sequence[int]]"


def parse_descriptions(descriptions: Sequence[Description] | None) -> list[DataDesc]:
    """Convert descriptions to `DataDesc`; a pair of a name and a shape has MXNet's default layout."""
    return [each if isinstance(each, DataDesc) else DataDesc(*each) for each in descriptions or ()]


def batch_axes(descriptions: Sequence[DataDesc]) -> dict[str, int | None]:
    """Return the dimension of the samples of each input by name, as `lockstep.ReplicaGroup` accepts it."""
    return {each.name: each.batch_axis for each in descriptions}


@dataclass(eq=False)
class DataBatch:
    """The arrays of one batch, in the order of the descriptions.

    Args:
        data: The inputs of the batch.
        label: The labels, if there are any.
        pad: The number of samples at the end that are padding.
        index: The indices of the samples, for your own use.
        bucket_key: Any value, for your own use.
        provide_data: The descriptions of the data, for your own use.
        provide_label: The descriptions of the labels, for your own use.
    """

    data: Sequence[torch.Tensor]
    label: Sequence[torch.Tensor] | None = None
    pad: int | None = None
    index: Sequence[int] | None = None
    bucket_key: Any = None
    provide_data: Sequence[Description] | None = None
    provide_label: Sequence[Description] | None = None


def merge_batches(batches: Sequence[DataBatch], descriptions: Sequence[DataDesc]) -> DataBatch:
    """Merge batches that were split before, one per device.

    Args:
        batches: The batches, at least one; either all of them have labels or none.
        descriptions: The descriptions of the data and then of the labels.

    Raises:
        ValueError: If an array without a dimension for samples differs between devices.
    """
    rows = [[*batch.data, *(batch.label or ())] for batch in batches]
    # Not strict, because without labels there are fewer arrays than descriptions.
    for each, first, *others in zip(descriptions, *rows, strict=False):
        if each.batch_axis is None and not all(torch.equal(first, part.to(first)) for part in others):
            raise ValueError(
                f"`data_batch` must hold the same {each.name!r} for every device, because its layout ({each.layout!r}) "
                "has no N, got different ones. Repeat each for the samples of its device, along a dimension N."
            )
    arrays = [
        parts[0] if each.batch_axis is None else torch.cat(parts, each.batch_axis)
        for each, *parts in zip(descriptions, *rows, strict=False)
    ]
    num_data = len(batches[0].data)
    label = arrays[num_data:] if batches[0].label is not None else None
    return DataBatch(arrays[:num_data], label, batches[-1].pad)


def split_input_slice(
    batch_size: int, work_load_list: Sequence[float], *, rule: Literal["python", "scala"] = "python"
) -> list[slice]:
    """Split a batch into one slice per device, as MXNet does.

    A device of workload w gets ``round(w * batch_size / sum of workloads)`` samples as long as there are some;
    the last device also gets the remaining ones. (`lockstep.plan` assigns numbers that differ from the exact
    proportions by at most one, and leaves no device without a sample if there are enough. MXNet's rule does
    neither.)

    Args:
        batch_size: The number of samples, at least 1.
        work_load_list: The relative speeds of the devices.
        rule: The rounding: "python" rounds half to even, "scala" rounds half up, in float32.

    Raises:
        ValueError: If a slice is empty, or the sum of the workloads, as the rule computes it, is 0 or not finite.

    >>> split_input_slice(8, [1, 1, 1, 1, 1, 1])[-2:]
    [slice(4, 5, None), slice(5, 8, None)]
    """
    shares = (_shares_in_float32 if rule == "scala" else _shares)(batch_size, work_load_list)
    if not shares or not all(map(math.isfinite, shares)):
        raise ValueError(
            "`work_load_list` must have a finite sum other than 0, and finite products with the batch size "
            f"({batch_size}), got {list(work_load_list)}."
        )
    # Python's `round` rounds half to even.
    lengths = [math.floor(share + 0.5) if rule == "scala" else round(share) for share in shares]
    # Rounding down on every device can leave several samples, all of which go to the last one.
    lengths[-1] += max(batch_size - sum(lengths), 0)
    slices = [slice(begin, min(end, batch_size)) for begin, end in pairwise(accumulate(lengths, initial=0))]
    for device, part in enumerate(slices):
        if part.start >= part.stop:
            raise ValueError(
                f"`work_load_list` must leave a sample for every device of a batch of {batch_size}, got "
                f"{list(work_load_list)}, by which device {device} has none. Use fewer devices or a larger batch."
            )
    return slices


def check_workloads(num_devices: int, work_load_list: Sequence[float] | None) -> list[float]:
    """Check that there is one workload per device, and return the workloads; None stands for equal ones.

    Raises:
        ValueError: If the number of workloads is not the number of devices.
    """
    loads = [1.0] * num_devices if work_load_list is None else list(work_load_list)
    if len(loads) != num_devices:
        raise ValueError(f"`workload` must hold one workload per device ({num_devices}), got {len(loads)}.")
    return loads


def _shares(batch_size: int, loads: Sequence[float]) -> list[float]:
    """Return the exact share of each device, which is NaN if the sum of the workloads is 0."""
    # Not by `sum`, which compensates for rounding from Python 3.12 on; MXNet's Python did not.
    total = reduce(operator.add, loads, 0)
    return [load * batch_size / total if total else math.nan for load in loads]


def _shares_in_float32(batch_size: int, loads: Sequence[float]) -> list[float]:
    """Return the exact share of each device, where each operation is in float32 as in the JVM."""
    narrow = torch.tensor(list(loads), dtype=torch.float32)
    shares: list[float] = (narrow * batch_size / reduce(torch.add, narrow.unbind(), torch.zeros(()))).tolist()
    return shares


GradReq: TypeAlias = Literal["write", "add", "null"]
GradReqs: TypeAlias = "GradReq | Sequence[GradReq] | Mapping[str, GradReq]"


def parse_grad_req(
    grad_req: GradReqs,
    *,
    data: Sequence[str],
    parameters: Sequence[str],
    labels: Sequence[str],
    fixed: Sequence[str],
    inputs_need_grad: bool,
) -> dict[str, Any]:
    """Return the options for the gradients of parameters and data.

    A single mode applies to all parameters that are not fixed, and to the data if their gradients are requested. A
    list holds a mode for each of data, parameters and labels, and is taken literally. A mapping takes precedence
    over all other arguments.

    Args:
        grad_req: A mode, a list of modes in order, or a mapping of modes by name.
        data: The names of the data.
        parameters: The names of the parameters.
        labels: The names of the labels.
        fixed: The names of the parameters without a gradient.
        inputs_need_grad: Whether gradients of the data are requested.

    Raises:
        ValueError: If a list has another length, or a name is unknown.
    """
    if isinstance(grad_req, str):
        return {"grad_mode": grad_req, "fixed": list(fixed), "input_grads": inputs_need_grad}
    modes = _modes_by_name(grad_req, [*data, *parameters, *labels])
    literal = not isinstance(grad_req, Mapping)
    default: GradReq = "write" if inputs_need_grad else "null"
    data_modes = {name: modes.get(name, default) for name in data}
    return {
        "grad_mode": {name: mode for name, mode in modes.items() if name in parameters},
        "fixed": [] if literal else list(fixed),
        "input_grads": data_modes if set(data_modes.values()) != {"null"} else False,
    }


def _modes_by_name(grad_req: Sequence[GradReq] | Mapping[str, GradReq], names: Sequence[str]) -> dict[str, GradReq]:
    """Return the modes by name."""
    if not isinstance(grad_req, Mapping):
        if len(grad_req) != len(names):
            raise ValueError(f"`grad_req` must hold one mode for each of {list(names)}, got {len(grad_req)}.")
        return dict(zip(names, grad_req, strict=True))
    unknown = sorted(set(grad_req) - set(names))
    if unknown:
        raise ValueError(f"`grad_req` must name some of {list(names)}, got {unknown}.")
    return dict(grad_req)


Tensors: TypeAlias = "Sequence[torch.Tensor | None]"


class DataParallelExecutorGroup:
    """A model on several devices that split each batch, based on `lockstep.ReplicaGroup`.

    Specific to MXNet: a batch is split by `split_input_slice`; the names and shapes of inputs are fixed from the
    start; metrics are updated once per device; names that are missing in `set_params` are ignored. Gradients are
    those of what the model returns: for a loss that is a mean over samples, those of the mean. For a sum over samples,
    return one loss per sample and pass `backward` ones: of a single number, the group takes the mean over devices, and
    warns if it sees that it is a sum.

    Args:
        symbol: The model; it is called with the data and then the labels as positional arguments.
        contexts: The names of the devices.
        workload: The workload of each device, or None for equal ones.
        data_shapes: The descriptions of the data.
        label_shapes: The descriptions of the labels, with which the model is called too; None for none.
        param_names: The names of the parameters that get a gradient; None for all.
        for_training: Whether backward is possible.
        inputs_need_grad: Whether backward computes the gradients of the data.
        shared_group: A group whose parameters and gradients are used.
        logger: The logger that reports how the batch is split.
        fixed_param_names: The names of parameters without a gradient.
        grad_req: What happens to gradients: "write", "add" or "null"; or one of these for each of data, parameters
            and labels in that order; or a dict by name, which takes precedence over `fixed_param_names`.
        state_names: Not supported; pass states as data.
        group2ctxs: Not supported; place parts of the model on other devices with `lockstep.OnDevice`.
        output_layouts: The layouts of outputs by name, "output" or "output[0]"; in other outputs the first
            dimension is that of the samples.

    Attributes:
        core: The `lockstep.ReplicaGroup`, for methods that MXNet does not have.
        param_names: The names of the parameters that `get_params` returns.

    Raises:
        ValueError: If an argument is out of range, names do not match, or MXNet's rule leaves a device without
            samples.
        TypeError: If the model is not a module.

    Determinism: as `lockstep.ReplicaGroup` with one shard per device.

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
        remedy = "Pass states as data, and place parts of the model with `lockstep.OnDevice`."
        for name, value in (("state_names", state_names), ("group2ctxs", group2ctxs)):
            if value:
                raise ValueError(f"`{name}` must be None, got {value!r}. {remedy}")
        if inputs_need_grad and not for_training:
            raise ValueError("`inputs_need_grad` must be False if `for_training` is, got True.")
        self.workload = check_workloads(len(contexts), workload)
        self.logger = logger
        self._data, self._labels = parse_descriptions(data_shapes), parse_descriptions(label_shapes)
        names = [name for name, _ in symbol.named_parameters()]
        trained = self.param_names = names if param_names is None else list(param_names)
        self.core: ReplicaGroup = ReplicaGroup(
            symbol,
            list(contexts),
            workloads=self._slice_lengths(self._data + self._labels),
            batch_dim=batch_axes(self._data + self._labels),
            output_dim={name: DataDesc.axis_of(layout) for name, layout in (output_layouts or {}).items()},
            training=for_training,
            shared_group=None if shared_group is None else shared_group.core,
            **parse_grad_req(
                grad_req if for_training else "null",
                data=[each.name for each in self._data],
                parameters=names,
                labels=[each.name for each in self._labels],
                fixed=[*(fixed_param_names or ()), *(name for name in names if name not in trained)],
                inputs_need_grad=inputs_need_grad,
            ),
        )
        self._outputs: Any = None
        self._pad = 0
        self.bind_exec(data_shapes, label_shapes, shared_group)

    def bind_exec(
        self,
        data_shapes: Sequence[Description],
        label_shapes: Sequence[Description] | None,
        shared_group: DataParallelExecutorGroup | None = None,  # noqa: ARG002 - the constructor has used it
        reshape: bool = False,
    ) -> None:
        """Fix the names and shapes of inputs, which the constructor has done; or change the shapes.

        Args:
            data_shapes: The descriptions of the data.
            label_shapes: The descriptions of the labels.
            shared_group: The group that was passed to the constructor.
            reshape: Whether to change shapes, see `reshape`.

        Raises:
            OrderError: If the shapes are fixed already, and `reshape` is False.
            ValueError: If shapes do not fit, or MXNet's rule leaves a device without samples; nothing has changed
                then.
        """
        if reshape:
            self.reshape(data_shapes, label_shapes)
        else:
            self.core.bind(parse_descriptions(data_shapes), parse_descriptions(label_shapes))

    def reshape(self, data_shapes: Sequence[Description], label_shapes: Sequence[Description] | None) -> None:
        """Change the shapes of inputs and their layouts; parameters and gradients are kept.

        Descriptions that are equal to the previous ones change nothing, even if layouts differ, as in MXNet.

        Args:
            data_shapes: The descriptions of the data, with the same names.
            label_shapes: The descriptions of the labels, with the same names; None for a model that is called without
                labels from now on.

        Raises:
            ValueError: If shapes do not fit, or MXNet's rule leaves a device without samples; nothing has changed
                then.
        """
        data, labels = parse_descriptions(data_shapes), parse_descriptions(label_shapes)
        if (data, labels) == (self._data, self._labels):
            return
        # Computed before the first change, because it raises if a device is left without samples.
        workloads = self._slice_lengths(data + labels)
        self.core.reshape(data, labels, batch_dim=batch_axes(data + labels))
        self.core.workloads, self._data, self._labels = workloads, data, labels

    def forward(self, data_batch: DataBatch | Sequence[DataBatch], is_train: bool | None = None) -> None:
        """Split a batch and run forward on each device.

        Args:
            data_batch: A batch of the fixed shapes; or one batch per device, split before.
            is_train: Whether to run in training mode; None for the mode of the constructor.

        Raises:
            ValueError: If the batch has other shapes.
            ReplicaError: If the model raised an error on a device.
        """
        inputs = self._data + self._labels
        batch = data_batch if isinstance(data_batch, DataBatch) else merge_batches(data_batch, inputs)
        # A batch may have labels that were not described: the model does not take them.
        labels = list(batch.label or ()) if self._labels else []
        self._outputs = self.core.forward((*batch.data, *labels), is_train)
        self._pad = batch.pad or 0

    def backward(self, out_grads: Tensors | torch.Tensor | None = None) -> None:
        """Run backward on all devices; it can be called several times per forward.

        Args:
            out_grads: The gradient of each merged output; None or an empty list if the model returns a loss.

        Raises:
            OrderError: If the group is not for training, or there was no forward.
            ValueError: If gradients are missing or have other shapes; nothing has changed then.
        """
        grads = [out_grads] if isinstance(out_grads, torch.Tensor) else list(out_grads or ())
        count = len(self.core.output_shapes())
        if grads and len(grads) != count:
            raise ValueError(f"`out_grads` must hold one gradient per output ({count}), got {len(grads)}.")
        remaining = iter(grads)
        nested = nest.map_tensors(lambda _: next(remaining), self._outputs) if grads else None
        # MXNet keeps the graph, so that backward can run again with other gradients.
        self.core.backward(nested, retain_graph=True)

    def get_batch_size(self) -> int:
        """Return the number of samples of a batch."""
        return self.core.batch_size

    def get_outputs(self) -> list[list[torch.Tensor]]:
        """Return, for each output, its part on each device."""
        return self.core.outputs(merge=False)

    def get_outputs_merged(self) -> list[torch.Tensor]:
        """Return each output for the whole batch, in the order of the samples."""
        return self.core.outputs()

    def get_output_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return the name and the shape of each output for the whole batch, after a forward."""
        return self.core.output_shapes()

    def get_input_grads(self) -> list[list[torch.Tensor]]:
        """Return, for each of the data, the gradient of its part on each device."""
        # The labels are inputs too, after the data.
        return self.core.input_grads(merge=False)[: len(self._data)]

    def get_input_grads_merged(self) -> list[torch.Tensor]:
        """Return the gradient of each of the data; for data that every device gets whole, the sum over devices."""
        return self.core.input_grads()[: len(self._data)]

    def get_params(self, arg_params: Mapping[str, torch.Tensor], aux_params: Mapping[str, torch.Tensor]) -> None:
        """Copy parameters and buffers to existing tensors.

        Args:
            arg_params: The tensors by the names of parameters, those of `param_names`, changed in place; other names
                are ignored.
            aux_params: The tensors by the names of buffers, changed in place; other names are ignored.

        Raises:
            KeyError: If the tensor of a parameter or buffer is missing; nothing has changed then.
        """
        # All tensors are found before the first is written, so that a missing name changes nothing.
        targets: list[tuple[torch.Tensor, torch.Tensor]] = []
        parameters, buffers = self.core.get_parameters()
        wanted = {name: value for name, value in parameters.items() if name in self.param_names}
        for tensors, values in ((arg_params, wanted), (aux_params, buffers)):
            targets += [(tensors[name], value) for name, value in values.items()]
        for target, value in targets:
            target.copy_(value)

    def set_params(
        self,
        arg_params: Mapping[str, torch.Tensor],
        aux_params: Mapping[str, torch.Tensor] | None,
        allow_extra: bool = False,
    ) -> None:
        """Copy values to the model and thereby to all replicas; names that are missing keep their values.

        Args:
            arg_params: The values by the names of parameters.
            aux_params: The values by the names of buffers; None for none.
            allow_extra: Whether to ignore names that the model does not have.

        Raises:
            ValueError: If a name is unknown or a shape differs; nothing has changed then.
        """
        self.core.set_parameters(arg_params, aux_params, allow_missing=True, allow_extra=allow_extra)

    def install_monitor(self, monitor: Monitor) -> None:
        """Install a monitor on all replicas.

        Args:
            monitor: The monitor to install.
        """
        self.core.install_monitor(monitor)

    def update_metric(self, eval_metric: Metric, labels: Sequence[torch.Tensor]) -> None:
        """Update a metric with the outputs of the last forward, one device after another.

        Args:
            eval_metric: A metric, called as ``update(output, label)`` once per device with the samples of the device.
            labels: The labels of the batch; padding at its end is not counted.

        Raises:
            ValueError: If the labels have another number of samples; nothing was counted then.
        """
        target = labels[0] if len(labels) == 1 else tuple(labels)
        self.core.update_metric(eval_metric, target, per_device=True, pad=self._pad)

    def _slice_lengths(self, inputs: Sequence[DataDesc]) -> list[float]:
        """Return the lengths of MXNet's slices, which as workloads make the core split in the same way."""
        sizes = [each.shape[each.batch_axis] for each in inputs if each.batch_axis is not None]
        if not sizes:
            return self.workload
        slices = split_input_slice(sizes[0], self.workload)
        self.logger.debug("A batch of %d samples is split into %s.", sizes[0], slices)
        return [float(each.stop - each.start) for each in slices]
