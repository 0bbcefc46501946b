"""A loss that compares all samples of a batch with each other, whichever devices and ranks compute them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lockstep.errors import OrderError


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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002 - called as a loss function
        """Refuse to compute the loss of a single shard.

        Raises:
            OrderError: In every call.
        """
        raise OrderError(
            "A BatchLoss must be computed by an update, because the samples of one shard have no loss of their own. "
            "Pass an Evaluator a loss function of a shard, or metrics of the outputs."
        )
