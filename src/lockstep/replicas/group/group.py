"""Forward and backward of one model on several devices, as if it were on one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from torch import nn

from lockstep.errors import OrderError
from lockstep.integers import check_integer
from lockstep.replicas.batch import (
    NO_GRADIENTS,
    BatchDim,
    GradMode,
    InputGradients,
    check_dims,
    positional_names,
    read_input_modes,
)
from lockstep.replicas.binding import Description, InputBinding
from lockstep.replicas.buffers import BufferRule, refuse_computed_buffers, trained_buffers
from lockstep.replicas.group.gradients import GradientStore, read_grad_modes, read_output_grads
from lockstep.replicas.group.metric_updates import Updatable, metric_inputs
from lockstep.replicas.group.parameters import read_parameters, share_parameters, write_parameters
from lockstep.replicas.group.signature import Signature
from lockstep.replicas.monitor import Monitor
from lockstep.replicas.passes import Backward, Forward, ForwardBackward, schedule
from lockstep.replicas.pool import REQUIRES_GRAD, CallSigint, Devices, ReplicaSet, Timeout
from lockstep.tree import Tensors


class ReplicaGroup(ReplicaSet):
    """One model on several devices: forward and backward of a batch that is split over them.

    A batch is cut into shards, the devices run their shards at the same time, and the results are put together
    again: sample k of the batch is entry k of every output. Gradients are those of one device for any split. A
    replica on the device where the model lives shares the memory of its parameters; one elsewhere holds a copy, which
    receives the values before every use.

    Without `num_shards` each device has one shard, sized by its workload: by the largest remainder, ties to the earlier
    device, none empty while there are samples for all. With `num_shards` the batch is cut into that many shards of
    equal size (the first ones a sample longer), which are assigned by workload; then devices and workloads change no
    bit.

    Args:
        model: The model. It stays where it is and is never run itself. Each replica is called with the entries of a
            tuple or list by position, of a dict by name, or with anything else as the only argument.
        devices: ``"auto"`` for every GPU, or else every core; or names of devices, which may repeat.
        workloads: The relative speeds of the devices, positive and finite; equal by default.
        batch_dim: The dimension that counts samples: one for all inputs, or one for each by the name of the argument or
            the path in it (``"pair[0]"``), 0 where none is given. With None the input is given whole to every shard,
            and its gradient is the sum over shards; at least one input must be split.
        output_dim: The same for outputs, by the key of a dict or ``"output[0]"``; by default that of the inputs where
            it is one number, else 0. With None, and always for an output without dimensions, the output is the mean
            over shards, weighted by their samples.
        grad_mode: ``"write"`` replaces ``parameter.grad``, ``"add"`` adds to it, ``"null"`` does not compute it; one
            word for all, inputs included, or words by parameter (or by buffer that requires a gradient).
        fixed: The names of parameters without a gradient, unless `grad_mode` names them.
        input_grads: Whether backward also computes the gradients of inputs (of `data`, where labels are bound), written
            or added as `grad_mode` says, if that is one word; or ``"write"``, ``"add"`` or ``"null"`` by input, named
            as in `batch_dim`, where an input that is not named has none.
        device_grads: Whether the part of each device is kept beside the sum, for ``gradients(merge=False)``; this takes
            the memory of a gradient for each device.
        training: Whether this group trains. One that does not keeps no graphs and has no gradients.
        num_shards: The number of shards of a batch, or None for one per device.
        buffers: The rule by which the buffers of shards become the model's: ``"mean"`` or ``"first"``.
        shared_group: A group whose model's parameters and buffers are used wherever names agree: the same memory and
            the same gradients. Outputs stay each group's own.
        timeout: The number of seconds after which a device that is still at work counts as hung; the first one then has
            a thread of its own too. ``"auto"`` is half an hour for the threads of the other devices, while the calling
            thread is not watched. None waits without end.

    Raises:
        TypeError: The model is no module or cannot be copied, `fixed` is a string, or a dimension no number.
        ValueError: A device, workload, name or number is not what it must be, or gradients of inputs are asked for in a
            group that does not train.

    Determinism: with `num_shards` the bits of outputs, gradients and buffers depend on the model, the batch,
    that number and one draw of each forward from the default generator; not on devices and workloads.

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
        buffers: BufferRule = "mean",
        shared_group: ReplicaGroup | None = None,
        timeout: Timeout = "auto",
    ) -> None:
        if num_shards is not None:
            check_integer("num_shards", num_shards, minimum=1)
        if input_grads and not training:
            raise ValueError("`input_grads` must be False in a group with training=False, got True.")
        check_dims(batch_dim, "batch_dim")
        if output_dim == "batch_dim":
            output_dim = batch_dim if isinstance(batch_dim, int) else 0
        check_dims(output_dim, "output_dim")
        super().__init__(model, devices, workloads=workloads, timeout=timeout)
        arguments = positional_names(model.forward)
        self._binding = InputBinding(model, arguments, batch_dim, training=training)
        self._signature = Signature(arguments, batch_dim)
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
        """Fix the names and shapes of inputs; a forward with others is refused from now on.

        Args:
            data: The name and shape of each input, in the order of the model's arguments.
            labels: Those of the arguments that follow; they have no gradient and may be left out.

        Raises:
            OrderError: Inputs are bound already.
            TypeError: A description is not a name and a shape.
            ValueError: Names come twice, numbers of samples differ, or the model cannot compute with the shapes.
        """
        self._binding.bind(data, labels)

    def reshape(self, data: Sequence[Description], labels: Sequence[Description] | None = None) -> bool:
        """Change the shapes of bound inputs; parameters and gradients stay as they are.

        Args:
            data: As in `bind`, with the same names and numbers of dimensions.
            labels: As in `bind`.

        Returns:
            Whether a shape has changed; if so, outputs are those of the next forward.

        Raises:
            OrderError: No inputs are bound.
            ValueError: As `bind`, or names or numbers of dimensions are others; nothing has changed.
        """
        changed = self._binding.reshape(data, labels)
        if changed:
            self._drop_forward()
        return changed

    @property
    def batch_size(self) -> int:
        """The number of samples of the bound inputs, else of the last forward; an OrderError if there is neither."""
        bound = self._binding.bound
        return self._last().inputs.num_samples if bound is None else bound.num_samples

    @property
    def slices(self) -> list[slice]:
        """Which samples each device has; empty where it has none. Needs bound inputs or a forward."""
        shards = schedule(self.batch_size, self._num_shards, tuple(self.workloads))
        stops = list(accumulate((sum(len(shard.samples) for shard in run) for run in shards), initial=0))
        return [slice(start, stop) for start, stop in pairwise(stops)]

    def forward(self, batch: Any, training: bool | None = None) -> Any:
        """Run forward on all devices.

        Args:
            batch: The arguments of the model: a tuple or list by position, a dict by name, else the only one.
            training: Whether modules run as in training (dropout, batch statistics): True for the modes the model has,
                or all of them in training mode where the model is in evaluation mode as a whole; False for evaluation
                mode. None takes what the group was made with.

        Returns:
            What the model returns, of the whole batch, without a graph. The graphs for `backward` are kept until then,
            or until the next forward; under ``torch.no_grad()`` there are none.

        Raises:
            OrderError: The group is closed.
            ReplicaError: The model raised in a shard, or a device hung; it is named, and the group can be used on.
            ReplicaInterrupt: Ctrl-C came while devices were at work; the group can be used on.
            TypeError: The model returned something that cannot be put together.
            ValueError: The batch does not fit what was bound, or `batch_dim`, or outputs do not fit it; or a buffer
                that requires a gradient was computed from other tensors.
        """
        modes = self._input_modes if torch.is_grad_enabled() else NO_GRADIENTS
        inputs = self._signature.read_batch(batch, modes, self._binding.bound)
        self._drop_forward()
        if self._trains and torch.is_grad_enabled():
            if any(map(REQUIRES_GRAD, self.model.buffers())):
                refuse_computed_buffers(self.model)
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
        return forward.outputs.nest(self._merged)

    def backward(self, output_grads: Any = None, *, retain_graph: bool = False) -> None:
        """Run backward on all devices, and write or add the gradients.

        The sum over devices is then in ``parameter.grad`` of the model, where an optimizer finds it, and in
        ``buffer.grad`` of buffers that require a gradient; hooks on parameters see it once.

        Args:
            output_grads: The gradient of what forward returned, in the same containers, None where nothing flows back;
                or None where the model returns a loss.
            retain_graph: Whether backward is to be possible once more for this forward.

        Raises:
            OrderError: The group does not train, or there is no forward with a graph to follow.
            ReplicaError: Backward raised in a shard, or a device hung; gradients are as before.
            ReplicaInterrupt: Ctrl-C came while devices were at work; likewise.
            TypeError: A gradient is no tensor.
            ValueError: A gradient has another shape than its output, or none was given and there is no loss.
        """
        if not self._trains:
            raise OrderError("A group made with training=False has no gradients; make one with training=True.")
        forward = self._forward or self._last()
        grads = read_output_grads(forward.outputs, self._merged, output_grads)
        backward = self._passes.backward(forward, grads, retain_graph=retain_graph)
        with CallSigint():
            self._keep(forward, backward)

    def outputs(self, *, merge: bool = True) -> list[Any]:
        """Return the outputs of the last forward.

        Args:
            merge: One tensor for each output; else for each output a list with one tensor per device, None where the
                device had no samples.

        Raises:
            OrderError: There was no forward.
        """
        forward = self._last()
        return list(self._merged) if merge else forward.outputs.by_device(self.devices, forward.done)

    def output_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return the name and shape of each output, of the whole batch: the last forward's, or the next one's.

        Before the first forward, and after a `reshape`, they follow from the bound shapes: a copy of the model is run
        on tensors without values, or, where it looks at values, on zeros. No state, random number or buffer changes by
        that, and no hook of yours is called.

        Raises:
            OrderError: There was no forward, and inputs are not bound or do not tell.
        """
        inferred = self._binding.output_shapes() if self._forward is None else None
        if inferred is not None:
            return inferred
        names = self._last().outputs.names
        return [(name, tuple(tensor.shape)) for name, tensor in zip(names, self._merged, strict=True)]

    def input_grads(self, *, merge: bool = True) -> list[Any]:
        """Return the gradients of inputs that the last backward gave, in the order of the call.

        Args:
            merge: One tensor for each input, on its device; else for each input a list with one per device. None stands
                for an input without a gradient: whole numbers, labels, and what backward did not reach.

        Raises:
            OrderError: They were not asked for, or there was no backward.
        """
        if not self._input_modes.wanted:
            raise OrderError("Gradients of inputs are there with input_grads=True, and a `grad_mode` not 'null'.")
        if self._input_gradients is None:
            raise OrderError("Gradients of inputs must follow a backward.")
        return self._input_gradients.merged() if merge else self._input_gradients.by_device(self.devices)

    def update_metric(self, metric: Updatable, labels: Any, *, per_device: bool = False, pad: int = 0) -> None:
        """Update a metric with the outputs of the last forward: ``metric.update(outputs, labels)``.

        Args:
            metric: Anything with `update`, also of torchmetrics.
            labels: A tensor or nest with one entry for each sample, cut as the bound labels are.
            per_device: Whether there is one call for each device with its own samples; else one for all, so that the
                result is that of one device whatever the metric counts.
            pad: The number of samples at the end of the batch that are padding, which is not counted; an output that is
                one value for all samples comes as it is.

        Raises:
            OrderError: There was no forward.
            ValueError: Labels are for another number of samples, or `pad` leaves none; nothing was counted.
        """
        forward = self._last()
        read = self._signature.read_labels(labels, forward.inputs.num_samples, self._binding.bound)
        for outputs, target in metric_inputs(forward, self.devices, read, per_device=per_device, pad=pad):
            metric.update(outputs, target)

    def _last(self) -> Forward:
        if self._forward is None:
            raise OrderError("A forward must come first.")
        return self._forward

    def _drop_forward(self) -> None:
        """Let go of the last forward, so that its graph and the next one's are never there together."""
        self._forward = None
        self._merged = []

    def gradients(self, *, merge: bool = True) -> dict[str, Any]:
        """Give the gradients of parameters, and of buffers that require one, by name.

        Args:
            merge: The sum over devices, ``parameter.grad``; else a list with the part of each device, None where there
                is none. Parts of a gradient that was changed from outside are forgotten, and so are, in the next
                forward that keeps graphs, those that its backward will replace.

        Raises:
            OrderError: Parts are asked for, and were not to be kept.
        """
        buffers = [(buffer.name, buffer.tensor) for buffer in trained_buffers(self.model)]
        named: list[tuple[str, torch.Tensor]] = [*self.model.named_parameters(), *buffers]
        if merge:
            return {name: parameter.grad for name, parameter in named}
        if not self._keeps_parts:
            raise OrderError("Gradients by device are there with device_grads=True.")
        return {name: self._store.parts(parameter, len(self.devices)) for name, parameter in named}

    def zero_grad(self) -> None:
        """Forget the gradients of parameters, buffers and inputs."""
        leaves = [buffer for buffer in self.model.buffers() if buffer.is_leaf]
        for tensor in (*self.model.parameters(), *leaves):
            self._store.clear(tensor)
        self._input_gradients = None

    def get_parameters(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return copies of the parameters, and of the buffers that belong to the model's state, by name."""
        return read_parameters(self.model)

    def set_parameters(
        self,
        parameters: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor] | None = None,
        *,
        allow_missing: bool = False,
        allow_extra: bool = False,
    ) -> None:
        """Copy values into the model and so into all replicas; where something does not fit, nothing changes.

        Args:
            parameters: By name.
            buffers: By name; None leaves all of them alone.
            allow_missing: Leave what is not named as it is.
            allow_extra: Pass over names that the model does not have.

        Raises:
            TypeError: A value is no tensor.
            ValueError: Names are missing or unknown, all of which are told, or a shape differs.
        """
        write_parameters(self.model, parameters, buffers, allow_missing=allow_missing, allow_extra=allow_extra)

    def install_monitor(self, monitor: Monitor | None) -> None:
        """Let a monitor watch the replicas and report this group's parameters and buffers; None takes it away."""
        if monitor is not None:
            monitor.attach(self)
        self._passes.watch = monitor

    def release(self) -> None:
        """Let go of threads and replicas until they are needed again; the model is left as it is."""
        super().release()
        self._drop_forward()
        self._passes.release()

    def _keep(self, forward: Forward, backward: Backward) -> None:
        """Write or add what backward gave."""
        kept = range(len(self.devices)) if self._keeps_parts else ()
        parts = [backward.device_total(place) for place in kept]
        totals = backward.total(keep=self._keeps_parts)
        nothing: Tensors = [None] * len(totals)
        by_parameter = zip(*[part or nothing for part in parts], strict=True) if parts else [()] * len(totals)
        for (name, parameter), total, own in zip(forward.parameters, totals, by_parameter, strict=True):
            self._store.store(parameter, total, list(own), add=self._modes.get(name) == "add")
        gradients = InputGradients(forward.inputs, forward.shards, backward.inputs)
        self._input_gradients = gradients.plus(self._input_gradients, self._input_modes)
