"""The forward and backward of one model on several devices, as if it were on one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from torch import nn

from lockstep.arguments import check_bool, check_instance, check_integer
from lockstep.errors import OrderError
from lockstep.metrics import Metric
from lockstep.plan import Shard
from lockstep.replicas.batch.input_gradients import NO_GRADIENTS, GradMode, InputGradients, read_input_modes
from lockstep.replicas.batch.inputs import BatchDim, Inputs, ShardInputs, check_dims
from lockstep.replicas.buffers.buffer_refs import BufferRules, check_no_computed_buffers, trained_buffers
from lockstep.replicas.group.gradients import GradientStore, read_grad_modes, read_output_grads
from lockstep.replicas.group.parameters import share_parameters, write_parameters
from lockstep.replicas.group.signature import Description, Signature
from lockstep.replicas.monitor import Monitor
from lockstep.replicas.passes.forward_backward import Backward, Forward, ForwardBackward, shards_of_batch
from lockstep.replicas.passes.forward_check import warn_of_dependence
from lockstep.replicas.pool.copies import REQUIRES_GRAD
from lockstep.replicas.pool.devices import Devices
from lockstep.replicas.pool.interrupts import CallSigint
from lockstep.replicas.pool.replica_set import ReplicaSet
from lockstep.replicas.pool.worker import Timeout
from lockstep.tree import Tensors


def metric_inputs(
    forward: Forward, devices: Sequence[torch.device], labels: Inputs, *, per_device: bool, pad: int
) -> list[tuple[Any, Any]]:
    """Return the pairs of outputs and labels to update a metric with.

    Args:
        forward: The forward whose outputs are used.
        devices: The devices of the group. Labels are moved to the device of the outputs.
        labels: The labels of all samples.
        per_device: Whether to return one pair for each device that has samples, instead of one pair for all.
        pad: The number of samples at the end of the batch that are padding and left out.

    Raises:
        ValueError: If `pad` is negative or leaves no sample.
    """
    num_samples = forward.inputs.num_samples
    if not 0 <= pad < num_samples:
        raise ValueError(f"`pad` must lie in 0..{num_samples - 1}, got {pad}.")
    groups = forward.shards if per_device else [[shard for device_shards in forward.shards for shard in device_shards]]
    cut = [
        # Padding is at the end of the batch, so a device with nothing else gets an empty range and is left out below.
        (place, range(shards[0].samples.start, min(shards[-1].samples.stop, num_samples - pad)))
        for place, shards in enumerate(groups)
        if shards
    ]
    return [
        (
            _outputs(forward, groups[place], samples, devices[place]),
            _target(labels.shard_inputs(samples, devices[place])),
        )
        for place, samples in cut
        if len(samples) > 0
    ]


def _outputs(forward: Forward, shards: Sequence[Shard], samples: range, device: torch.device) -> Any:
    """Return the merged outputs of some shards, as the model returns them and without padding."""
    outputs = forward.outputs
    selected = [each for each in outputs.results if each.shard in shards]
    parts = outputs.merged(device, selected)
    return outputs.unflatten(
        [
            part if dim is None else part.narrow(dim, 0, len(samples))
            for part, dim in zip(parts, outputs.dims, strict=True)
        ]
    )


def _target(inputs: ShardInputs) -> Any:
    """Return labels in the form in which they were passed."""
    if inputs.kwargs:
        return inputs.kwargs
    return inputs.args[0] if len(inputs.args) == 1 else inputs.args


class ReplicaGroup(ReplicaSet):
    """One model on several devices: forward and backward of a batch that is split over them.

    A batch is cut into shards, the devices run their shards at the same time, and the results are merged: sample k of
    the batch is entry k of every output. Gradients are those of one device for any split. A replica shares the memory
    of the model's parameters on their device, and elsewhere holds a copy that receives the values before every use.

    Without `num_shards` each device has one shard, sized by its workload by the largest remainder method: ties go to
    the earlier device, and no shard is empty if there are samples for all. With `num_shards` the batch is cut into that
    many shards of equal size (the first ones one sample longer), which are assigned by workload; then devices and
    workloads change no bit.

    Args:
        model: The model. It stays where it is and is never run itself. Each replica is called with the entries of a
            tuple or list by position, of a dict by name, or with anything else as the only argument.
        devices: ``"auto"`` for this rank's GPUs, or else its cores; a number of devices; or names, which may repeat.
        workloads: The relative speeds of the devices, positive and finite. They are equal by default.
        batch_dim: The dimension that counts samples: one for all inputs, or one for each by the name of the argument or
            the path in it (``"pair[0]"``), 0 if none is given. With None the input is given whole to every shard, and
            its gradient is the sum over shards. At least one input must be split.
        output_dim: The same for outputs, by the key of a dict or ``"output[0]"``. The default is `batch_dim` if that is
            one number, or else 0. With None, and always for an output without dimensions, the output is the mean over
            shards, weighted by their samples.
        grad_mode: ``"write"`` replaces ``parameter.grad``, ``"add"`` adds to it, ``"null"`` does not compute it. One
            mode for all, including inputs, or modes by parameter (or by buffer that requires a gradient).
        fixed: The names of parameters without a gradient, unless `grad_mode` names them.
        input_grads: Whether backward also computes the gradients of inputs (of `data`, if labels are bound), written or
            added as `grad_mode` says, if that is one mode; or ``"write"``, ``"add"`` or ``"null"`` by input, named as
            in `batch_dim`, where an input that is not named has no gradient.
        device_grads: Whether ``gradients(merge=False)`` is possible, which takes the memory of a gradient per device.
        training: Whether this group trains. If not, it keeps no graphs and has no gradients.
        num_shards: The number of shards of a batch, or None for one per device.
        buffers: The rules by which the buffers of shards are combined, as for `ParallelUpdater`.
        shared_group: A group whose model shares parameters, buffers and gradients with this one wherever names agree.
        timeout: The number of seconds after which a device counts as hung, for which the first one gets a thread too.
            ``"auto"`` is half an hour, where the calling thread is not watched. None waits without limit.

    Raises:
        TypeError: If the model is no module or cannot be copied, or an argument has another type.
        ValueError: If an argument is out of range, or input gradients are requested in a group that does not train.

    Determinism: With `num_shards` the bits of outputs, gradients and buffers depend only on the model, the batch, that
    number and one draw per forward from the default generator, and not on devices and workloads.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> with ReplicaGroup(model, devices=["cpu", "cpu"], workloads=[2, 1]) as group:
        ...     out = group.forward(torch.ones(6, 2))
        ...     group.backward(torch.ones(6, 1))
        ...     print(tuple(out.shape), group.slices, model.weight.grad)
        (6, 1) [slice(0, 4, None), slice(4, 6, None)] tensor([[6., 6.]])
    """

    def __init__(
        self,
        model: nn.Module,
        devices: Devices = "auto",
        *,
        workloads: Sequence[float] | None = None,
        batch_dim: BatchDim = 0,
        output_dim: BatchDim | Literal["batch_dim"] = "batch_dim",
        grad_mode: GradMode | Mapping[str, GradMode] = "write",
        fixed: Iterable[str] = (),
        input_grads: bool | Mapping[str, GradMode] = False,
        device_grads: bool = True,
        training: bool = True,
        num_shards: int | None = None,
        buffers: BufferRules = "mean",
        shared_group: ReplicaGroup | None = None,
        timeout: Timeout = "auto",
    ) -> None:
        if num_shards is not None:
            check_integer("num_shards", num_shards, minimum=1)
        for name, value in {"training": training, "device_grads": device_grads}.items():
            check_bool(name, value)
        check_instance("input_grads", input_grads, bool | Mapping, "True, False or a dict of modes by input")
        check_instance("shared_group", shared_group, ReplicaGroup | None, "a ReplicaGroup or None")
        if input_grads and not training:
            raise ValueError("`input_grads` must be False in a group with training=False, got True.")
        check_dims(batch_dim, "batch_dim")
        if output_dim == "batch_dim":
            output_dim = batch_dim if isinstance(batch_dim, int) else 0
        check_dims(output_dim, "output_dim")
        super().__init__(model, devices, workloads=workloads, timeout=timeout)
        self._signature = Signature(model, batch_dim, training=training)
        self._trains = training
        self._input_modes = read_input_modes(input_grads, grad_mode)
        self._forward: Forward | None = None
        self._merged: list[torch.Tensor] = []
        self._input_gradients: InputGradients | None = None
        self._modes = read_grad_modes(model, grad_mode, fixed)
        self.frozen = frozenset(name for name, mode in self._modes.items() if mode == "null")
        if shared_group is not None:
            share_parameters(model, shared_group.model)
        self._store: GradientStore = GradientStore() if shared_group is None else shared_group._store  # noqa: SLF001 - shared on purpose
        self._passes = ForwardBackward(self, buffers=buffers)
        self._output_dim = output_dim
        self._num_shards = num_shards
        self._keeps_parts = device_grads

    def bind(self, data: Sequence[Description], labels: Sequence[Description] | None = None) -> None:
        """Fix the names and shapes of inputs. A forward with others raises an error from now on.

        Args:
            data: The name and shape of each input, in the order of the model's arguments.
            labels: The name and shape of the arguments that follow, which have no gradient and may be left out.

        Raises:
            OrderError: If inputs are bound already.
            TypeError: If a description is not a pair of a name and a shape.
            ValueError: If a name occurs twice, numbers of samples differ, or the model cannot compute with the shapes.
        """
        self._signature.bind(data, labels)

    def reshape(
        self,
        data: Sequence[Description],
        labels: Sequence[Description] | None = None,
        *,
        batch_dim: BatchDim | Literal["same"] = "same",
    ) -> bool:
        """Change the shapes of bound inputs. Parameters and gradients are not changed.

        Args:
            data: The name and shape of each input, with the names and numbers of dimensions of `bind`.
            labels: The name and shape of each label, in the same way; None if calls have no labels from now on.
            batch_dim: The dimension that counts samples from now on, as in the constructor; the same by default.

        Returns:
            Whether a shape or dimension has changed. If so, there are no outputs until the next forward.

        Raises:
            OrderError: If no inputs are bound.
            ValueError: As in `bind`, or if names or numbers of dimensions differ. Nothing has changed in that case.
        """
        if batch_dim != "same":
            check_dims(batch_dim, "batch_dim")
        changed = self._signature.reshape(data, labels, batch_dim)
        if changed:
            self._drop_forward()
        return changed

    @property
    def batch_size(self) -> int:
        """The number of samples of the bound inputs, or else of the last forward; an OrderError if there is neither."""
        bound = self._signature.bound
        return self._last_forward().inputs.num_samples if bound is None else bound.num_samples

    @property
    def slices(self) -> list[slice]:
        """The samples of each device, which requires bound inputs or a forward. The slice of a device may be empty."""
        shards = shards_of_batch(self.batch_size, self._num_shards, tuple(self.workloads))
        stops = list(accumulate((sum(len(shard.samples) for shard in run) for run in shards), initial=0))
        return [slice(start, stop) for start, stop in pairwise(stops)]

    def forward(self, batch: Any, training: bool | None = None) -> Any:
        """Run forward on all devices.

        Args:
            batch: The arguments of the model: a tuple or list by position, a dict by name, or else the only one.
            training: Whether modules run as in training (dropout, batch statistics). True means the modes of the model,
                or training mode for all modules if the model is in evaluation mode as a whole. False means evaluation
                mode. None means the `training` argument of the constructor.

        Returns:
            The output of the model for the whole batch, without a graph. The graphs for `backward` are kept until then,
            or until the next forward. Under ``torch.no_grad()`` there are none.

        Raises:
            OrderError: If the group is closed.
            ReplicaError: If the model raised in a shard, or a device hangs. The group can still be used.
            ReplicaInterrupt: If Ctrl-C was pressed while devices were at work. The group can still be used.
            TypeError: If the model returned a value that cannot be merged.
            ValueError: If the batch does not fit the bound inputs or `batch_dim`, outputs do not fit the batch, or a
                buffer that requires a gradient was computed from other tensors.
        """
        modes = self._input_modes if torch.is_grad_enabled() else NO_GRADIENTS
        inputs = self._signature.read_batch(batch, modes)
        # Before the new forward, so that two graphs never take memory at the same time.
        self._drop_forward()
        if self._trains and torch.is_grad_enabled():
            if any(map(REQUIRES_GRAD, self.model.buffers())):
                check_no_computed_buffers(self.model)
            self._store.drop_outdated()
        with nullcontext() if self._trains else torch.no_grad():
            forward = self._passes.forward(
                inputs,
                num_shards=self._num_shards,
                training=self._trains if training is None else training,
                output_dim=self._output_dim,
            )
        self._merged = forward.outputs.merged(self.devices[0])
        self._forward = forward
        return forward.outputs.unflatten(self._merged)

    def backward(self, output_grads: Any = None, *, retain_graph: bool = False) -> None:
        """Run backward on all devices, and write or add the gradients.

        The sum over devices is then in ``parameter.grad`` of the model, where an optimizer finds it, and in
        ``buffer.grad`` of buffers that require a gradient. Hooks on parameters are called once with the sum.

        Args:
            output_grads: The gradient of what forward returned, in the same containers, with None where nothing flows
                back; or None if the model returns a loss.
            retain_graph: Whether backward can be run again for this forward.

        Raises:
            OrderError: If the group does not train, or there is no forward with a graph.
            ReplicaError: If backward raised in a shard, or a device hangs. Gradients are unchanged.
            ReplicaInterrupt: If Ctrl-C was pressed while devices were at work. Gradients are unchanged.
            TypeError: If a gradient is not a tensor.
            ValueError: If a gradient has another shape than its output, or none was given and there is no loss.
        """
        if not self._trains:
            raise OrderError("A group created with training=False has no gradients. Create one with training=True.")
        forward = self._forward or self._last_forward()
        grads = read_output_grads(forward.outputs, self._merged, output_grads)
        if forward.dependent:
            warn_of_dependence(
                forward.dependent,
                grads,
                "`output_grads` must be given unless the model returns the mean over its samples as the loss, but it",
                "Return one loss for each sample, and pass their gradients: ones for the sum.",
            )
        backward = self._passes.backward(forward, grads, retain_graph=retain_graph)
        # An interrupt waits, so that either all gradients are stored or none.
        with CallSigint():
            self._store_gradients(forward, backward)

    def outputs(self, *, merge: bool = True) -> list[Any]:
        """Return the outputs of the last forward.

        Args:
            merge: If True, return one tensor per output. If False, return for each output a list with one tensor per
                device, or None for a device without samples.

        Raises:
            OrderError: If there was no forward.
        """
        forward = self._last_forward()
        return list(self._merged) if merge else forward.outputs.by_device(self.devices, forward.results)

    def output_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return the name and shape of each output for the whole batch, of the last forward or the next one.

        Before the first forward, and after a `reshape`, they are inferred from the bound shapes by a copy of the model,
        on tensors without values. This changes no state or random number, and calls no hook of yours.

        Raises:
            OrderError: If there was no forward, and inputs are not bound or the shapes cannot be inferred.
        """
        inferred = self._signature.output_shapes() if self._forward is None else None
        if inferred is not None:
            return inferred
        names = self._last_forward().outputs.names
        return [(name, tuple(tensor.shape)) for name, tensor in zip(names, self._merged, strict=True)]

    def input_grads(self, *, merge: bool = True) -> list[Any]:
        """Return the gradients of inputs from the last backward, in the order of the call.

        Args:
            merge: If True, return one tensor per input, on its device. If False, return for each input a list with one
                tensor per device. Inputs without a gradient (integers, labels, unreached ones) have None.

        Raises:
            OrderError: If they were not requested, or there was no backward.
        """
        if not self._input_modes.any_wanted:
            raise OrderError("Gradients of inputs require input_grads=True and a `grad_mode` other than 'null'.")
        if self._input_gradients is None:
            raise OrderError("Gradients of inputs must follow a backward.")
        return self._input_gradients.merged() if merge else self._input_gradients.by_device(self.devices)

    def update_metric(self, metric: Metric, labels: Any, *, per_device: bool = False, pad: int = 0) -> None:
        """Update a metric with the outputs of the last forward: ``metric.update(outputs, labels)``.

        Args:
            metric: An object with an `update` method, such as a metric of torchmetrics.
            labels: A tensor or nest with one entry per sample, split as the bound labels are.
            per_device: Whether to make one call per device with its own samples. By default there is one call for all
                samples, so that the result is that of one device for any kind of metric.
            pad: The number of samples at the end of the batch that are padding and not counted. An output that is one
                value for all samples is passed as it is.

        Raises:
            OrderError: If there was no forward.
            ValueError: If labels are for another number of samples, or `pad` leaves none. Nothing was counted then.
        """
        forward = self._last_forward()
        read = self._signature.read_labels(labels, forward.inputs.num_samples)
        for outputs, target in metric_inputs(forward, self.devices, read, per_device=per_device, pad=pad):
            metric.update(outputs, target)

    def _last_forward(self) -> Forward:
        if self._forward is None:
            raise OrderError("A forward must come first.")
        return self._forward

    def _drop_forward(self) -> None:
        """Drop the last forward and its graph."""
        self._forward = None
        self._merged = []

    def gradients(self, *, merge: bool = True) -> dict[str, Any]:
        """Return the gradients of parameters, and of buffers that require one, by name.

        Args:
            merge: If True, return the sum over devices, ``parameter.grad``. If False, return a list with the part of
                each device, or None. Parts are dropped when other code changes the gradient, and by the next forward
                that keeps graphs if its backward will replace them.

        Raises:
            OrderError: If the parts are requested in a group that does not keep them.
        """
        buffers = trained_buffers(self.model).values()
        named: list[tuple[str, torch.Tensor]] = [*self.model.named_parameters(), *buffers]
        if merge:
            return {name: parameter.grad for name, parameter in named}
        if not self._keeps_parts:
            raise OrderError("Gradients by device require device_grads=True.")
        return {name: self._store.parts(parameter, len(self.devices)) for name, parameter in named}

    def zero_grad(self) -> None:
        """Drop the gradients of parameters, buffers and inputs."""
        leaves = [buffer for buffer in self.model.buffers() if buffer.is_leaf]
        for tensor in (*self.model.parameters(), *leaves):
            self._store.clear(tensor)
        self._input_gradients = None

    def get_parameters(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return copies of the parameters, and of the buffers that belong to the model's state, by name."""
        persistent = self.model.state_dict()
        parameters = {name: each.detach().clone() for name, each in self.model.named_parameters()}
        buffers = {name: each.detach().clone() for name, each in self.model.named_buffers() if name in persistent}
        return parameters, buffers

    def set_parameters(
        self,
        parameters: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor] | None = None,
        *,
        allow_missing: bool = False,
        allow_extra: bool = False,
    ) -> None:
        """Copy values into the model, and thereby into all replicas, unless one of them does not fit.

        Args:
            parameters: The parameters by name.
            buffers: The buffers by name, or None to leave all of them unchanged.
            allow_missing: Whether names may be missing, whose values are then left unchanged.
            allow_extra: Whether names may occur that the model does not have, which are then ignored.

        Raises:
            TypeError: If a value is not a tensor.
            ValueError: If names are missing or unknown, all of which the message lists, or a shape differs.
        """
        write_parameters(self.model, parameters, buffers, allow_missing=allow_missing, allow_extra=allow_extra)

    def install_monitor(self, monitor: Monitor | None) -> None:
        """Install a monitor on the replicas, which also reports this group's parameters and buffers, or remove it.

        Args:
            monitor: The monitor, or None to remove the current one.
        """
        if monitor is not None:
            monitor.attach(self)
        self._passes.shard_hooks = monitor

    def release(self) -> None:
        """Drop threads and replicas until they are needed again. The model is left as it is."""
        super().release()
        self._drop_forward()
        self._passes.release()

    def _store_gradients(self, forward: Forward, backward: Backward) -> None:
        """Write or add the gradients of a backward."""
        places = range(len(self.devices)) if self._keeps_parts else ()
        parts = [backward.device_total(place) for place in places]
        # The sum may be added up in place only if the parts of the devices are not stored.
        totals = backward.total(keep=self._keeps_parts)
        no_gradients: Tensors = [None] * len(totals)
        by_parameter = zip(*[part or no_gradients for part in parts], strict=True) if parts else [()] * len(totals)
        for (name, parameter), total, device_parts in zip(forward.trained_tensors, totals, by_parameter, strict=True):
            self._store.store(parameter, total, list(device_parts), add=self._modes.get(name) == "add")
        gradients = InputGradients(forward.inputs, forward.shards, backward.input_gradients)
        self._input_gradients = gradients.plus(self._input_gradients, self._input_modes)
