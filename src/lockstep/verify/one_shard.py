"""Compare the gradient of a batch as a single shard with that of its shards, both in float64.

The two agree where the loss is a mean over samples, up to rounding. Where they do not, the result of a run depends on
the number of shards, as that of PyTorch's DDP depends on the number of devices.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from lockstep.metrics import Observers, collecting
from lockstep.nest import call_arguments, map_tensors, tensors
from lockstep.plan import Shard
from lockstep.replicas import OTHER_DRAWS, Draws, rows_of, uncompiled
from lockstep.streams import seed_python_and_numpy
from lockstep.updaters import LossFunction, check_loss, is_summed, loss_weight
from lockstep.verify.causes import Cause
from lockstep.verify.modes import users_line

TOLERANCE: Final = 1e-6
"""The largest difference that counts as rounding, relative to the gradients of the shards. Rounding in float64 makes
one of about 1e-12, and of 1e-7 where user code computes a part in float32."""
WRAPPERS: Final = ("loss_fn", "criterion", "func")
"""Attributes under which objects hold the loss function that they call."""

NARROW: Final = frozenset({torch.float32, torch.float16, torch.bfloat16})
CASTS: Final = frozenset({torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16})
PAIR: Final = 2

Calls = list[tuple[str, list[torch.Tensor], list[torch.Tensor]]]
"""The calls of modules in the order of their ends: the name of each, its inputs, and its outputs."""


@dataclass(frozen=True)
class GradientFinding:
    """What the comparison of one gradient has found.

    Attributes:
        status: "equal", "differs" or "skipped".
        reason: Why nothing was compared; empty if it was.
        cause: Why the gradients differ; None if they do not.
        tensor: The parameter whose gradients differ most.
        normalized: The modules with batch statistics of each shard, which were left out of the comparison.
    """

    status: str
    reason: str = ""
    cause: Cause | None = None
    tensor: str = ""
    normalized: Sequence[str] = ()


def compare_attempt(engine: Any, attempt: Any) -> GradientFinding | None:
    """Compare the gradient that an updater is about to compute; None if it is right by definition.

    Args:
        engine: The updater's engine.
        attempt: An attempt whose batches have been planned. It is left as it is.
    """
    request, size = attempt.request, attempt.sizes[0]
    if request.gathers or request.shard_loss is not None or request.inspect_shard is not None:
        return None
    shards = [shard for run in engine.share([size]).shards_by_device for shard in run]
    if len(shards) == 1:
        many = "" if size > 1 else " It has one sample: if there are more, name their dimension by `batch_dim`."
        return GradientFinding("skipped", f"The batch is a single shard.{many}")
    devices = engine.replicas.devices[:1]
    convert = partial(engine.conversion.shards, attempt.batches, devices=devices, first=engine.first_stream())
    whole = Part(*convert([[Shard(0, 0, range(size))]])[0][0])
    try:
        parts = [Part(shard, whole.rows_like(given, shard)) for shard, given in convert([shards])[0]]

        def compared(*, keeps: bool, interleaved: bool = False) -> GradientFinding:
            draws = Draws(keeps=keeps, interleaved=interleaved)
            return _compared(Comparison(engine, request, whole, parts, draws))

        keeps = False
        try:
            found = [compared(keeps=keeps)]
        except RuntimeError as error:
            if OTHER_DRAWS not in str(error):
                raise
            keeps = True
            found = [compared(keeps=keeps)]
        if found[0].status == "differs":
            # Where several rows are drawn for each sample, shards may have others of them.
            found.append(compared(keeps=keeps, interleaved=True))
        return found[-1] if found[-1].status == "equal" else found[0]
    except (Exception, SystemExit) as error:  # noqa: BLE001 - user code may raise anything where its tensors are in float64
        return GradientFinding("skipped", f"It could not be computed in float64: {type(error).__name__}: {error}")


@dataclass(frozen=True)
class Part:
    """Some samples of a batch, with their tensors."""

    shard: Shard
    given: Any

    def rows_like(self, given: Any, shard: Shard) -> Any:
        """Return the tensors of a shard, with the rows of this batch where it has them: a converter may draw.

        Args:
            given: The tensors of the shard.
            shard: The shard.
        """
        held, size = iter(tensors(self.given)), len(self.shard.samples)
        if len(tensors(self.given)) != len(tensors(given)):
            return given

        def rows(own: torch.Tensor) -> torch.Tensor:
            found = rows_of(next(held), own, shard.samples, size)
            return own if found is None else found

        return map_tensors(rows, given)


class Comparison:
    """Computes gradients of parts of one batch, all from the same weights and buffers.

    Args:
        engine: The updater's engine.
        request: Which gradient to compute.
        whole: The batch.
        shards: Its shards.
        draws: Gives shards the random numbers of the batch.

    Attributes:
        model: A copy of the model, in float64.
        names: The parameters to compare.
    """

    def __init__(self, engine: Any, request: Any, whole: Part, shards: Sequence[Part], draws: Draws) -> None:
        self.model: nn.Module = copy.deepcopy(engine.prepared.runners[0].replica).double()
        self.loss_fn: LossFunction = request.loss_fn
        self.whole, self.shards = whole, shards
        self._carried, self._device = engine.training.carried, engine.replicas.devices[0]
        named = engine.prepared.named_parameters.items()
        self.names = [name for name, each in named if request.wanted is None or id(each) in request.wanted]
        self.draws = draws

    def run(self, paired: Sequence[str]) -> GradientFinding:
        """Compare the gradient of the batch with that of its shards.

        Args:
            paired: The lines that pair all samples, as far as they have run.
        """
        normalized = tuple(name for name, each in self.model.named_modules() if _uses_batch_statistics(each))
        for name in normalized:
            _use_running_statistics(self.model.get_submodule(name))
        self._buffers = [buffer.detach().clone() for buffer in self.model.buffers()]
        (one, _), (again, _) = self.gradient(self.whole), self.gradient(self.whole)
        found = [self.gradient(shard) for shard in self.shards]
        gradients, weights = [each for each, _ in found], [weight for _, weight in found]
        shares = [1.0 if is_summed(self.loss_fn) else weight / (sum(weights) or 1.0) for weight in weights]
        limit = TOLERANCE * float(one.norm() + _sum([each.norm() for each in gradients], shares))
        if not math.isfinite(limit):
            return GradientFinding("skipped", "The gradient is not finite in float64.", normalized=normalized)
        if (one - again).norm() > limit:
            reason = "The loss function returns another gradient when it is called once more."
            return GradientFinding("skipped", reason, normalized=normalized)
        apart = one - _sum(gradients, shares)
        if apart.norm() <= limit:
            return GradientFinding("equal", normalized=normalized)
        is_sum = (one - _sum(gradients, [1.0] * len(gradients))).norm() <= limit
        parts = apart.split([self.model.get_parameter(name).numel() for name in self.names])
        most = max(range(len(parts)), key=lambda index: float(parts[index].norm()))
        pairs = Cause("pairs", "the loss function", paired[0]) if paired and paired[0] else None
        cause = pairs or self.cause("total" if is_sum else "mean", shares)
        return GradientFinding("differs", cause=cause, tensor=self.names[most], normalized=normalized)

    def gradient(self, part: Part) -> tuple[torch.Tensor, float]:
        """Return the gradient of some samples as one vector, with zeros where there is none, and their weight."""
        samples = part.shard.samples
        with torch.no_grad():
            for buffer, before in zip(self.model.buffers(), self._buffers, strict=True):
                buffer.copy_(before)
        self.model.zero_grad(set_to_none=True)
        seed_python_and_numpy(0)  # so that each part draws the same from them
        self.draws.start(samples)
        former = {} if self._carried is None else {"carried": self._carried.part(samples, self._device)}
        given, carried = map_tensors(lambda each: widened(each).clone(), (part.given, former))
        args, kwargs = call_arguments(given)
        with collecting(Observers({"": self.model}), len(samples)):
            loss = check_loss(self.loss_fn(self.model, *args, **kwargs, **carried))
        weight = loss_weight(loss, len(samples))
        if weight > 0:
            loss.value.backward()  # type: ignore[no-untyped-call]  # PyTorch has no types here
        self.draws.end()
        wanted = [self.model.get_parameter(name) for name in self.names]
        found = [torch.zeros_like(each) if each.grad is None else each.grad for each in wanted]
        return torch.cat([each.flatten() for each in found]), weight

    def cause(self, kind: str, shares: Sequence[float]) -> Cause:
        """Return what mixes samples: the first module whose inputs agree and outputs do not, or the loss function.

        Args:
            kind: The kind of the cause if it is the loss function.
            shares: The share of each shard in the mean.
        """
        calls = []
        for part in (self.whole, *self.shards):
            with _logged(self.model) as log:
                self.gradient(part)
            calls.append(log)
        alike = len({tuple(name for name, _, _ in log) for log in calls}) == 1
        for (name, *whole), *shards in zip(*calls, strict=True) if alike else ():
            inputs, outputs = (
                [each for each, *parts in zip(*nests, strict=False) if not self._agrees(each, parts, shares)]
                for nests in zip(whole, *(shard[1:] for shard in shards), strict=True)
            )
            one_row = not name and {len(each) for each in whole[1] if each.dim()} == {1}
            if one_row or (outputs and not inputs):
                module = self.model.get_submodule(name)
                what = f"{name!r}, a {type(module).__name__}" if name else f"the model, a {type(module).__name__}"
                # The model itself may return a loss, which has no rows.
                has_rows = name or any(each.dim() and len(each) == len(self.whole.shard.samples) for each in outputs)
                kind = "row" if one_row else "layer" if has_rows and kind == "mean" else kind
                return Cause(kind, "forward", _place(type(module).forward), what)
        return Cause(kind, "the loss function", _place(self.loss_fn))

    def _agrees(self, whole: torch.Tensor, parts: Sequence[torch.Tensor], shares: Sequence[float]) -> bool:
        """Return whether a tensor of the batch has the rows of the shards' tensors, or is their mean."""
        size = len(self.whole.shard.samples)
        pairs = [
            (rows_of(whole, part, each.shard.samples, size), part)
            for part, each in zip(parts, self.shards, strict=True)
        ]
        if all(part.shape == whole.shape for part in parts):
            pairs = [(whole, _sum(parts, shares))]
        return all(
            one is None or not one.is_floating_point() or torch.allclose(one, other, TOLERANCE, TOLERANCE)
            for one, other in pairs
        )


def _compared(comparison: Comparison) -> GradientFinding:
    with in_float64(comparison.draws) as mode:
        return comparison.run(mode.paired)


def _uses_batch_statistics(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)


def _use_running_statistics(module: Any) -> None:
    """Switch a batch normalization to running statistics, with which it computes each sample for itself."""
    module.eval()
    if module.running_mean is None:
        module.running_mean, module.running_var = torch.zeros(module.num_features), torch.ones(module.num_features)


@contextmanager
def _logged(model: nn.Module) -> Iterator[Calls]:
    """Write down what the modules of a model get and return."""
    calls: Calls = []

    def write(name: str, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given, made = ([each.detach().clone() for each in tensors(nest)] for nest in ((args, kwargs), output))
        calls.append((name, given, made))

    with ExitStack() as stack:
        for name, module in model.named_modules():
            handle = module.register_forward_hook(partial(write, name), with_kwargs=True)
            stack.callback(handle.remove)
        yield calls


def _place(called: Any) -> str:
    """Return the file, line and name of a function, or of what an object calls."""
    while not hasattr(called, "__code__"):
        inner = next((getattr(called, name) for name in WRAPPERS if callable(getattr(called, name, None))), None)
        if inner is None:
            kind = type(called)
            return _place(kind.forward if isinstance(called, nn.Module) else kind.__call__)
        called = inner
    code = called.__code__
    return f"{Path(code.co_filename).name}:{code.co_firstlineno} in {called.__qualname__}"


def _sum(terms: Sequence[torch.Tensor], factors: Sequence[float]) -> Any:
    """Return the sum of some tensors, each multiplied by its factor."""
    return sum(factor * each for factor, each in zip(factors, terms, strict=True))


def widened(value: Any) -> Any:
    """Return a tensor, or a dtype, in float64 if it is in a narrower format; anything else as it is.

    Args:
        value: The value.

    >>> widened(torch.zeros(1)).dtype, widened(torch.half), widened(torch.zeros(1, dtype=torch.int64)).dtype
    (torch.float64, torch.float64, torch.int64)
    """
    if isinstance(value, torch.dtype):
        return torch.float64 if value in NARROW else value
    return value.to(torch.float64) if isinstance(value, torch.Tensor) and value.dtype in NARROW else value


class InFloat64(TorchFunctionMode):
    """Gives every function of torch its tensors in float64, also those that a closure holds, and its dtypes.

    Attributes:
        paired: The lines that combine a tensor of shape (n, 1) with one of shape (n,), which pairs all n samples.
    """

    def __init__(self) -> None:
        super().__init__()
        self.paired: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function."""
        func = torch.Tensor.double if func in CASTS else func
        name = getattr(func, "__name__", "")
        shapes = [each.shape for each in args if isinstance(each, torch.Tensor)][:PAIR]
        if sorted(map(len, shapes)) == [1, PAIR] and name != "__get__":
            (length,), matrix = sorted(shapes, key=len)
            if matrix == (length, 1) and length > 1:
                self.paired.append(users_line())
        # What changes its tensor in place must get that tensor.
        in_place = name.startswith(("__i", "__setitem")) or (name.endswith("_") and not name.endswith("__"))
        kept = args[:1] if in_place else ()
        wide = tree_map(widened, args[len(kept) :])
        return func(*kept, *wide, **tree_map(widened, kwargs or {}))


@contextmanager
def in_float64(draws: Draws) -> Iterator[InFloat64]:
    """Compute in float64 and with the same draws; yield the mode, which knows which lines pair rows.

    Args:
        draws: Is told which samples are computed.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.enable_grad(), uncompiled(), draws, InFloat64() as mode:
            yield mode
    finally:
        torch.set_default_dtype(before)
