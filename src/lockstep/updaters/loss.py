"""Loss functions: what they return, the usual one, and one over the outputs of a whole batch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

import torch
from torch import nn
from torch.nn.functional import cross_entropy, nll_loss
from torch.nn.modules.loss import _WeightedLoss

from lockstep.arguments import misfit
from lockstep.errors import OrderError, warn
from lockstep.replicas import REDUCED_BY_MEAN, NoMeans


@dataclass(frozen=True, slots=True)
class BatchLoss:
    """A loss over the whole batch, such as a contrastive loss: a differentiable gather of the outputs of all shards.

    Pass it as `loss_fn` to an updater, or to `compute_gradients` in a step function. The gradient is that of the loss
    on the whole batch, for any number of shards, devices and ranks. With samples x, outputs e = f(x; w) and loss L::

        ∂L/∂w = Σ over shards s of  (∂e_s/∂w)ᵀ · ∂L/∂e_s

    An update has three steps. It computes the outputs of all shards, and keeps no graph. It gathers them, in the order
    of the samples, on the first device of every rank, and computes there the loss and its gradient with respect to the
    outputs. Then it runs forward of each shard again, with the same random streams and buffers, and backward from that
    gradient. Forward therefore runs twice, and memory holds the graph of one shard per device at a time. For one
    process with memory for all graphs, a loss on the output of a `DataParallel` saves the second forward.

    Shapes: Every tensor that `forward` returns has the n samples of its shard along its first dimension. `criterion`
    gets the same nest with all N samples of the batch.

    Args:
        forward: Called as ``forward(model, *batch)`` with a replica and the tensors of one shard, as a loss function
            is. It returns a tensor or a nest of tensors.
        criterion: Called with the outputs of the whole batch. It returns the loss, a tensor of one element, or a `Loss`
            without a weight. It may have parameters if its module is one of several models; it is called itself, and
            not a replica. Outputs in half precision are passed in float32, and autocast is off.

    Raises:
        TypeError: If an argument is not callable.

    Determinism: What is gathered has the order of the samples, and the criterion runs in one thread on the same tensors
    on every rank, so the bits depend on the shards and not on where they are computed.

    References: Gao, Zhang, Han and Callan, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup",
    2021, arXiv:2101.06983, section 3: the gradient cache.

    >>> import torch, lockstep
    >>> loss_fn = BatchLoss(lambda model, x: model(x), lambda outputs: torch.pdist(outputs).mean())
    """

    forward: Callable[..., Any]
    criterion: Callable[[Any], Any]

    def __post_init__(self) -> None:
        for name in ("forward", "criterion"):
            function = getattr(self, name)
            if not callable(function):
                raise TypeError(f"`{name}` must be callable, got a {type(function).__name__}.")
        if reason := misfit(self.criterion, None):
            raise TypeError(
                "`criterion` must take what `forward` returns, for the whole batch, as its only argument, got one with "
                f"others: {reason}. If forward returns several tensors, take them as one tuple or dict."
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002 - called as a loss function
        """Refuse to compute the loss of a single shard.

        Raises:
            OrderError: In every call.
        """
        raise OrderError(
            "A BatchLoss must be computed by an update, because the samples of one shard have no loss of their own. "
            "Pass an Evaluator a loss function of a shard, or metrics of the outputs."
        )


TOLERANCE: Final = 1e-4
"""The relative difference up to which two means are taken for equal."""
IGNORED: Final = -100
"""The label that torch's cross entropies ignore by default."""

_ELEMENTWISE: Final = frozenset(
    {nn.functional.l1_loss, nn.functional.mse_loss, nn.functional.smooth_l1_loss, nn.functional.huber_loss}
    | {each.forward for each in (nn.L1Loss, nn.MSELoss, nn.SmoothL1Loss, nn.HuberLoss)}
)
"""The criteria of torch that stretch an output and a target to one shape."""

_SUMMABLE: Final = frozenset({torch.float32, torch.float64, torch.int64})
"""Dtypes of metrics that are summed as they are. In others, such as float16, a sum over shards may be infinite."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A mean loss with its weight and metrics.

    Args:
        value: The mean loss of the shard; a tensor of one element that requires a gradient.
        weight: The weight of the mean, for example its number of tokens; at least 0, a number or a tensor of one
            element that requires no gradient. None stands for the number of samples. A shard of weight 0 takes no part
            in the update, and its value may be a constant.
        metrics: Pairs (sum, weight) by name, for example ``{"accuracy": (correct, count)}``. They are summed over
            shards, in float64 if they are bool, in half precision or integers of fewer than 64 bits, and the metric is
            their quotient over the whole batch. A pair may also be a tensor of two elements.
        carried: The new values of an updater's `carried`, for the samples of the shard; see `Carried`.

    >>> Loss(torch.tensor(0.5, requires_grad=True), weight=12, metrics={"accuracy": (9, 12)}).weight
    12
    """

    value: torch.Tensor
    weight: float | torch.Tensor | None = None
    metrics: Mapping[str, tuple[float | torch.Tensor, float | torch.Tensor] | torch.Tensor] = field(
        default_factory=dict
    )
    carried: Any = None


class LossFunction(Protocol):
    """Called with a replica, never with the original model, and the tensors of one shard.

    For several networks it is called with a dict of their replicas by name.
    """

    def __call__(self, model: Any, /, *args: Any, **kwargs: Any) -> torch.Tensor | Loss:
        """Return the mean loss over the shard, or a `Loss`."""


@dataclass(frozen=True, slots=True)
class Supervised:
    """Run the model on the inputs and compare its output with the target; see `supervised`.

    Attributes:
        criterion: Called as ``criterion(output, target)``.
        target: The key of the target in a dict batch, or None if the target is the last entry of a tuple.
        divisors: What a criterion with a forward of its own divides by: "weights" of classes, "valid" targets, or, with
            nothing in it, samples; None for other criteria.
        is_elementwise: Whether the criterion would compare all samples with each other if the output and the target
            had other numbers of dimensions.
    """

    criterion: Callable[[Any, Any], torch.Tensor]
    target: str | None = None
    divisors: frozenset[str] | None = None
    is_elementwise: bool = False

    def __call__(self, model: nn.Module, /, *args: Any, **kwargs: Any) -> torch.Tensor | Loss:
        """Return the loss of the shard."""
        inputs: Sequence[Any]
        if self.target is None:
            if not args:
                raise ValueError(
                    "`target` must name the label of a dict batch, got None. Call supervised(criterion, "
                    f"target=...) with one of {sorted(kwargs)}."
                )
            *inputs, target = args
            if not inputs:
                raise ValueError(
                    "A batch must hold inputs and a target for `supervised`, got one entry. Give a dataset of pairs "
                    "(input, target); or, for a loss without targets, pass a function loss_fn(model, input)."
                )
        else:
            if not kwargs:
                raise ValueError(f"`target` must be None for batches that are not dicts, got {self.target!r}.")
            if self.target not in kwargs:
                keys = ", ".join(kwargs)
                raise ValueError(f"`target` must name a key of the batch ({keys}), got {self.target!r}.")
            inputs, target = args, kwargs.pop(self.target)
        try:
            output = model(*inputs, **kwargs)
        except TypeError as error:
            if not misfit(model.forward, *inputs, **kwargs):
                raise
            raise TypeError(
                f"The model is called with the entries of the batch but the target, {_types(inputs, kwargs)}, but "
                f"{error}. Pass a function loss_fn(model, *batch) that calls it otherwise."
            ) from error
        if self.is_elementwise and output.dim() != target.dim():
            raise ValueError(
                f"The output and the target must have as many dimensions, got {tuple(output.shape)} and "
                f"{tuple(target.shape)}, of which the criterion compares each sample with all others. Give them one "
                "shape, as by output.squeeze(-1) or target.unsqueeze(-1)."
            )
        loss, counted = self.criterion(output, target), self._counted(target)
        if counted is None:
            return loss
        weights, ignored = counted
        counts = torch.ones_like(target, dtype=torch.bool) if ignored is None else target != ignored
        weight = counts.sum() if weights is None else weights.to(target.device)[target[counts]].sum()
        # A number, where the host need not wait for it.
        return Loss(loss, weight=weight.item() if weight.is_cpu else weight)

    def _counted(self, target: torch.Tensor) -> tuple[torch.Tensor | None, int | None] | None:
        """Return the class weights and the ignored label of a mean over them, by the criterion's options at present.

        Returns:
            None where the mean is over samples.
        """
        criterion: Any = self.criterion
        if self.divisors is not None:
            weights = criterion.weight if "weights" in self.divisors else None
            ignored = criterion.ignore_index if "valid" in self.divisors else None
            if weights is None and ignored is None:
                return None
        elif isinstance(criterion, nn.CrossEntropyLoss | nn.NLLLoss):
            weights, ignored = criterion.weight, criterion.ignore_index
        else:
            is_partial = isinstance(criterion, partial)
            if (criterion.func if is_partial else criterion) not in (cross_entropy, nll_loss):
                return None
            keywords = criterion.keywords if is_partial else {}
            weights, ignored = keywords.get("weight"), keywords.get("ignore_index", IGNORED)
        # Labels of whole samples are ignored rarely, and to count them an accelerator would have to be waited for. Only
        # one label is negative: the ignored one. Finding it takes less time than counting the others.
        rarely = weights is None and ignored == IGNORED and target.dim() <= 1
        if rarely and not (target.is_cpu and target.amin().item() < 0):
            return None
        # torch divides by the number of samples where targets are probabilities.
        return None if is_summed(self) or target.is_floating_point() else (weights, ignored)


def supervised(criterion: Callable[[Any, Any], torch.Tensor], *, target: str | None = None) -> Supervised:
    """Return a loss function that applies a criterion to the model's output and a target.

    A criterion with ``reduction="sum"``, such as ``nn.MSELoss(reduction="sum")``, yields the sum over the
    whole batch for every number of shards, and the gradient of that sum. Any other criterion must return the
    mean over the samples of a shard. For `torch.nn.CrossEntropyLoss`, `torch.nn.NLLLoss` and the functions
    `cross_entropy` and `nll_loss`, also in a `functools.partial`, means of shards are combined as torch computes the
    mean of the batch: by class weights, and by the targets that are not ignored. Only on accelerators, with one label
    per sample and the default `ignore_index`, ignored targets count as samples; use `token_mean` if there are any.
    A subclass with a forward of its own counts what its means of two samples show that it divides by: class weights,
    the targets that are not ignored, or samples, as a focal loss may. An update warns of one that mixes these.

    Args:
        criterion: The criterion, called as ``criterion(output, target)``. Its reduction is read in each update from its
            attribute `reduction`, or from the keyword argument of a `functools.partial`, also by torch's older
            arguments `size_average` and `reduce`; the default is a mean.
        target: The key of the target in a dict batch. By default the target is the last entry of a tuple.

    Raises:
        TypeError: If the criterion is not callable.
        ValueError: If the reduction of a criterion of torch is ``"none"``.

    Example:
        >>> loss_fn = supervised(nn.functional.mse_loss)
        >>> loss_fn(nn.Identity(), torch.tensor([1.0, 3.0]), torch.tensor([1.0, 1.0]))
        tensor(2.)
    """
    if isinstance(criterion, type):
        name = criterion.__name__
        raise TypeError(f"`criterion` must be an object, got the class {name}. Pass supervised({name}()).")
    if not callable(criterion):
        raise TypeError(f"`criterion` must be callable, got a {type(criterion).__name__}.")
    # A module, and one that is wrapped without options, are the same criterion.
    bare: Any = criterion
    if isinstance(criterion, partial) and not (criterion.args or criterion.keywords):
        bare = criterion.func
    owner = getattr(bare, "__self__", None)
    if isinstance(owner, nn.Module) and bare == owner.forward:
        bare = owner
    criterion = bare if isinstance(bare, nn.Module) else criterion
    own = isinstance(criterion, _WeightedLoss) and type(criterion).forward.__module__ != _WeightedLoss.__module__
    divisors = _divisors_of(criterion) if own else None
    loss_fn = Supervised(criterion, target, divisors, is_elementwise=_function_of(criterion) in _ELEMENTWISE)
    is_summed(loss_fn)  # raises an error if the criterion does not reduce
    return loss_fn


def _divisors_of(criterion: Any) -> frozenset[str]:
    """Return what a criterion with a forward of its own divides by, as two samples show; see `Supervised.divisors`."""
    weight = torch.tensor([1.0, 3.0]) if criterion.weight is None else criterion.weight  # it may get some later
    target = torch.stack([weight.argmax(), weight.argmin()])
    output = torch.linspace(-1, 1, 2 * len(weight), dtype=weight.dtype, device=weight.device).view(2, -1)
    # Taken for means by weights until two samples show what they are: the criterion may take other targets.
    found = {"weights"} if isinstance(criterion, nn.CrossEntropyLoss | nn.NLLLoss) else set()
    try:
        probe = copy.deepcopy(criterion)
        probe.weight, probe.reduction, probe.ignore_index = weight, "mean", IGNORED
        with torch.no_grad(), torch.random.fork_rng(devices=()):
            one, other, both = (float(probe(output[part], target[part])) for part in (slice(1), slice(1, 2), slice(2)))
            first, second = weight[target].tolist()
            by_weights = (first * one + second * other) / (first + second)
            is_close = partial(math.isclose, rel_tol=TOLERANCE)
            found = {"weights"} if is_close(both, by_weights) else set()
            target[1] = IGNORED
            if hasattr(criterion, "ignore_index") and is_close(float(probe(output, target)), one):
                found.add("valid")
    except Exception:  # noqa: BLE001, S110 - it takes other targets, or ignores none
        pass
    return frozenset(found)


def _function_of(criterion: Any) -> Any:
    """Return the function that computes a criterion: that of a partial function, or the forward of a module."""
    called = criterion.func if isinstance(criterion, partial) else criterion
    return type(called).forward if isinstance(called, nn.Module) else called


def is_summed(loss_fn: LossFunction) -> bool:
    """Return whether a loss function returns sums over samples instead of means.

    Raises:
        ValueError: If its criterion does not reduce.
    """
    if not isinstance(loss_fn, Supervised):
        # The parts of a BatchLoss add up to that of the whole batch.
        return isinstance(loss_fn, BatchLoss)
    criterion = loss_fn.criterion
    keywords = criterion.keywords if isinstance(criterion, partial) else {}
    reduction = keywords.get("reduction", getattr(criterion, "reduction", "mean"))
    # The older arguments, which torch reads instead if one is given.
    older = keywords.get("size_average"), keywords.get("reduce")
    if older != (None, None):
        reduction = "none" if older[1] is False else "sum" if older[0] is False else "mean"
    # A criterion with a forward of its own may reduce there what a base leaves.
    if reduction == "none" and getattr(_function_of(criterion), "__module__", "").startswith("torch."):
        raise ValueError(
            "`criterion` must reduce its loss to one element, got reduction='none'. Use reduction='mean', or "
            "'sum' for the sum over the whole batch."
        )
    return bool(reduction == "sum")


def model_is_loss(model: nn.Module, /, *args: Any, **kwargs: Any) -> torch.Tensor | Loss:
    """Return what the model itself returns, where no loss function is given.

    Raises:
        TypeError: If the model does not take the batch, or returns something else than a loss.
        ValueError: If it returns a tensor of several elements.
    """
    try:
        returned: torch.Tensor | Loss = model(*args, **kwargs)
    except TypeError as error:
        if not misfit(model.forward, *args, **kwargs):
            raise
        raise TypeError(
            f"Without `loss_fn` the model is called with the whole batch and must return its loss, but {error}. The "
            f"batch is {_types(args, kwargs)}. {_CRITERION_REMEDY}"
        ) from error
    if isinstance(returned, torch.Tensor) and returned.numel() != 1:
        raise ValueError(
            "Without `loss_fn` the model must return its loss, a tensor of one element, got shape "
            f"{tuple(returned.shape)}. {_CRITERION_REMEDY}"
        )
    if not isinstance(returned, torch.Tensor | Loss):
        raise TypeError(
            "Without `loss_fn` the model must return its loss as a tensor or a lockstep.Loss, got a "
            f"{type(returned).__name__}. {_remedy(returned)}"
        )
    return returned


_CRITERION_REMEDY: Final = (
    "Pass loss_fn=lockstep.supervised(criterion), which calls the model with all entries of the batch but the target, "
    "or a function loss_fn(model, *batch) that returns the loss."
)


def _types(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the arguments of a call by their types."""
    return f"({', '.join([*[type(each).__name__ for each in args], *[f'{name}=' for name in kwargs]])})"


def explained(error: Exception, loss_fn: LossFunction, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Exception:
    """Return an error of a loss function, or one that says how it is called if that is the reason.

    Args:
        error: The error that the loss function raised.
        loss_fn: The loss function.
        args: The positional entries of the batch.
        kwargs: The entries of the batch by keyword.
    """
    if isinstance(error, KeyError) and isinstance(error.args[0] if error.args else None, nn.Module | torch.Tensor):
        return LookupError(
            f"a {type(error.args[0]).__name__} is no key. Devices compute with copies of the model, whose modules and "
            "parameters are others, also in hooks. Keep what belongs to them by their names, or in their attributes."
        )
    if isinstance(error, RuntimeError) and "does not require grad" in str(error):
        return RuntimeError(
            f"{error}. In compute_gradients(optimizer=...) only the parameters of this optimizer require a gradient, "
            "and what other networks return requires none. To differentiate by it, call requires_grad_() on it first, "
            "as in fake = generator(noise).detach().requires_grad_()."
        )
    if not isinstance(error, TypeError) or loss_fn is model_is_loss:
        return error
    if not misfit(loss_fn, None, *args, **kwargs) and "Tensor' object is not callable" not in str(error):
        return error
    entries = [*[f"entry{index}" for index in range(len(args))], *[f"{name}=..." for name in kwargs]]
    return TypeError(
        f"`loss_fn` must take the model first and then each entry of the batch, as loss_fn(model, "
        f"{', '.join(entries)}): {error}. The batch is {_types(args, kwargs)}. Write loss_fn(model, *batch) to take "
        "all entries as one."
    )


def _remedy(returned: object) -> str:
    """Return how a loss function gets from a common kind of return value to a loss."""
    if returned is None:
        return (
            "Return the loss. A function without `return` returns None, and so does `.loss` of a transformers model "
            "if the batch holds no 'labels'."
        )
    if isinstance(returned, Mapping) and hasattr(returned, "logits") and returned.get("loss") is None:
        return (
            "Its `loss` is None, because a transformers model computes one only from labels: add 'labels' to the "
            "batch, or pass a function loss_fn(model, **batch) that computes a loss from its output."
        )
    if type(returned) is dict and "loss" in returned:
        return (
            "Return its entry 'loss'; or, to report the others too, return lockstep.Loss(value, metrics={name: (sum, "
            "weight)})."
        )
    if hasattr(returned, "loss") or (isinstance(returned, Mapping) and "loss" in returned):
        return (
            "Pass loss_fn=lambda model, **batch: model(**batch).loss, or loss_fn=lockstep.token_mean() for the mean "
            "over tokens."
        )
    entries = returned if isinstance(returned, tuple | list) else ()
    at = next((at for at, each in enumerate(entries) if isinstance(each, torch.Tensor) and each.numel() == 1), None)
    entry = "" if at is None else f"If entry [{at}] is the loss, pass lambda model, *batch: model(*batch)[{at}]. "
    return entry + (
        "To report other numbers with the loss, return lockstep.Loss(value, metrics={name: (sum, weight)}); to "
        "apply a criterion to outputs, pass loss_fn=lockstep.supervised(criterion)."
    )


def _check_weight(weight: object, *, training: bool) -> None:
    """Check the weight of a loss; see `check_loss`."""
    # A tensor has `__float__` too; text has not.
    if not hasattr(weight, "__float__"):
        raise TypeError(
            f"`weight` of a Loss must be a number, a tensor or None, got a {type(weight).__name__}. Pass metrics by "
            "name: Loss(value, metrics={...})."
        )
    if not isinstance(weight, torch.Tensor):
        return
    if weight.numel() != 1:
        raise ValueError(
            f"`weight` of a Loss must have one element, got shape {tuple(weight.shape)}. Return the weighted mean with "
            "the sum of the weights: Loss((losses * weights).sum() / weights.sum(), weight=weights.sum())."
        )
    if training and weight.requires_grad:
        raise ValueError(
            "`weight` of a Loss must not require a gradient, got one that does, which would be left out. Return "
            "Loss(value, weight=weight.detach()) if the weight is a constant. If it is to be learned, compute the "
            "weighted mean over the batch by a lockstep.BatchLoss."
        )


def check_loss(returned: object, *, training: bool = True) -> Loss:
    """Check what a loss function returned, and convert it to a `Loss`.

    Args:
        returned: The return value of the loss function.
        training: Whether the loss must require a gradient.

    Raises:
        TypeError: If it is neither a tensor nor a `Loss`, if it is complex, or if a metric is not a pair.
        ValueError: If it or its weight has more than one element, if it does not require a gradient, or if its weight
            requires one.
    """
    loss = returned if isinstance(returned, Loss) else Loss(returned)  # type: ignore[arg-type]  # checked next
    value = loss.value
    if not isinstance(value, torch.Tensor):
        what = "a tensor or a lockstep.Loss"
        raise TypeError(f"`loss_fn` must return {what}, got a {type(value).__name__}. {_remedy(value)}")
    if value.is_complex():
        raise TypeError(f"`loss_fn` must return a real loss, got {value.dtype}. Take its real part.")
    if value.numel() != 1:
        raise ValueError(f"`loss_fn` must return a loss of one element, got shape {tuple(value.shape)}. Take its mean.")
    weight = loss.weight
    if weight is not None:
        _check_weight(weight, training=training)
    if not value.requires_grad and training and (weight is None or float(weight) != 0):
        raise ValueError(
            "`loss_fn` must return a loss that requires a gradient, got one that does not. Compute it from "
            "the output of the model it is given, without detach(), item() or no_grad(). For a shard without any "
            "term return lockstep.Loss(value, weight=0), and for the others Loss(mean, weight=number of terms)."
        )
    if loss.metrics and not hasattr(loss.metrics, "items"):
        rule = "must be a dict of pairs (sum, weight) by name, such as {'accuracy': (correct, count)}"
        raise TypeError(f"`metrics` of a Loss {rule}, got {loss.metrics!r}.")
    for name, pair in loss.metrics.items() if loss.metrics else ():
        if not _is_pair(pair):
            raise TypeError(
                f"`metrics[{name!r}]` of a Loss must be a pair (sum, weight), such as (correct, count), got {pair!r}."
            )
    return loss


def warn_of_rows(loss_fn: LossFunction, args: Sequence[Any], kwargs: Mapping[str, Any], num_samples: int) -> None:
    """Warn if a converter has made the target of `supervised` of other samples than those of its shard.

    Args:
        loss_fn: The loss function.
        args: The positional entries of the batch.
        kwargs: The entries of the batch by keyword.
        num_samples: The number of samples of the shard, for which its loss counts.
    """
    if isinstance(loss_fn, Supervised):
        target = args[-1] if loss_fn.target is None else kwargs[loss_fn.target]
        is_plain = isinstance(target, torch.Tensor) and not target.is_nested and target.dim() > 0
        # Not only the first dimension, which may be time, and several rows per sample are right.
        if is_plain and all(length % num_samples for length in target.shape):
            warn(
                f"`converter` must keep all samples, got a target of shape {tuple(target.shape)} for the {num_samples} "
                "samples of a shard. Its loss counts as the mean over these: leave samples out of the dataset instead, "
                "or pass a loss function that returns Loss(mean, weight=number of rows)."
            )


def _is_pair(value: object) -> bool:
    """Check whether a value is a pair: two values, or a tensor of two elements."""
    two = len(("sum", "weight"))
    if isinstance(value, torch.Tensor):
        return value.shape == (two,)
    return isinstance(value, tuple | list) and len(value) == two


def loss_weight(loss: Loss, num_samples: int, *, batch: int = 0, no_means: NoMeans | None = None) -> float:
    """Return the weight of a shard's loss; waits for the device if the weight is there.

    Args:
        loss: The loss of the shard.
        num_samples: The number of samples in the shard.
        batch: The number of their batch in the update.
        no_means: Receives what a loss without a weight is that is no mean over samples; None to look at nothing.

    Raises:
        ValueError: If the weight is negative or not finite.
    """
    if loss.weight is None:
        if no_means is not None:
            node: Any = loss.value.grad_fn
            # The most usual mean is seen at once, because losses are looked at in every update.
            is_usual = loss.value.is_cpu and node is not None and node.name() == "NllLossBackward0"
            if is_usual and (node._saved_total_weight.item(), node._saved_reduction) == (num_samples, REDUCED_BY_MEAN):  # noqa: SLF001 - autograd has no public names
                no_means.weights.add((batch, 0, "1"))
            else:
                no_means.note(loss.value, batch)
        return float(num_samples)
    weight = float(loss.weight)
    if not (math.isfinite(weight) and weight >= 0):
        raise ValueError(f"`weight` of a Loss must be finite and at least 0, got {weight}.")
    return weight


def metric_pairs(loss: Loss) -> dict[str, tuple[float | torch.Tensor, float | torch.Tensor]]:
    """Return the metrics of a loss as pairs that can be summed over shards and keep no graph alive."""
    return {name: (_summand(total), _summand(weight)) for name, (total, weight) in loss.metrics.items()}


def _summand(value: float | torch.Tensor) -> float | torch.Tensor:
    """Return a number in a dtype in which sums over shards neither overflow nor round coarsely."""
    if not isinstance(value, torch.Tensor):
        # A number of NumPy would be summed in its own precision.
        return value if isinstance(value, int) else float(value)
    # A copy, because the step may change the tensor before it is read.
    return value.detach().clone() if value.dtype in _SUMMABLE else value.detach().double()
