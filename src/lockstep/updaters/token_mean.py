"""The mean loss over tokens, exact for any number of shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from lockstep.arguments import check_instance, check_integer
from lockstep.replicas import in_mode
from lockstep.updaters.loss import Loss

_FOUND: Final[WeakKeyDictionary[nn.Module, bool]] = WeakKeyDictionary()
"""Whether a model has been found not to count the first label of each sequence."""


@dataclass(frozen=True, slots=True)
class TokenMean:
    """Computes the mean loss over counted tokens, with their number as its weight; see `token_mean`."""

    ignore_index: int = -100
    target: str = "labels"
    shifted: bool | None = None

    def __post_init__(self) -> None:
        check_integer("ignore_index", self.ignore_index)
        check_instance("target", self.target, str, "the key of the labels")
        check_instance("shifted", self.shifted, bool | None, "True, False or None")

    def __call__(self, model: nn.Module, /, *args: Any, **kwargs: Any) -> Loss:
        """Return the loss of the shard."""
        if kwargs:
            return self._of_model(model, args, kwargs)
        if len(args) < len(("input", "target")):
            raise ValueError("A batch for `token_mean` must be a dict, or a tuple whose last entry is the target.")
        *inputs, target = args
        logits = model(*inputs)
        if not isinstance(logits, torch.Tensor) or logits.dim() != target.dim() + 1:
            got = tuple(logits.shape) if isinstance(logits, torch.Tensor) else f"a {type(logits).__name__}"
            raise ValueError(
                "The model must return scores for `token_mean`, with the shape of the target "
                f"{tuple(target.shape)} and the number of classes as a last dimension, got {got}."
            )
        loss = cross_entropy(logits.flatten(0, -2), target.flatten(), ignore_index=self.ignore_index)
        return Loss(loss, weight=self._count(target))

    def _of_model(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Loss:
        """Return the loss that a model computes from the labels in its keyword arguments."""
        if self.target not in kwargs:
            raise ValueError(f"`target` must name a key of the batch ({', '.join(kwargs)}), got {self.target!r}.")
        labels = kwargs[self.target]
        # A model of transformers divides by this number of the whole batch instead of the shard's number of tokens.
        kwargs.pop("num_items_in_batch", None)
        output = model(*args, **kwargs)
        loss = _loss_of(output)
        if not isinstance(loss, torch.Tensor):
            raise TypeError(
                f"The model must return its loss as `loss` where the batch is a dict, got a {type(output).__name__} "
                f"without. Check that it is given {self.target!r}."
            )
        shifted = _FOUND.get(model) if self.shifted is None else self.shifted
        if shifted is None:
            shifted = self._shifts_labels(model, args, kwargs)
        return Loss(loss, weight=self._count(labels[..., 1:] if shifted else labels))

    def _shifts_labels(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether a model leaves out the first label of each sequence: whether its loss is the same without.

        The model is asked once, in evaluation mode, in which it keeps its buffers.
        """
        labels = kwargs[self.target]
        without = labels.clone()
        without[..., 0] = self.ignore_index
        # Where no first label counts, both numbers are the same. Of no labels at all there is no mean.
        if torch.equal(labels, without):
            return False
        first, other = (self._asked(model, args, kwargs | {self.target: each}) for each in (labels, without))
        # Of no labels there is no mean: the first ones were the only ones, and do not count for the model.
        return not bool(first.isfinite()) or _FOUND.setdefault(model, torch.equal(first, other))

    @torch.no_grad()
    def _asked(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Return the loss of a model, and leave the random stream as it is, so that each call draws the same."""
        devices = [each.device for each in [kwargs[self.target]] if each.is_cuda]
        with in_mode(model, training=False), torch.random.fork_rng(devices):
            loss = _loss_of(model(*args, **kwargs))
        if not isinstance(loss, torch.Tensor):
            raise ValueError(  # noqa: TRY004 - the model is right, and the argument is missing
                f"`shifted` must be True or False for a {type(model).__name__}, which returns no loss in evaluation "
                "mode, got None. Say whether the model leaves out the first label of each sequence."
            )
        return loss

    def _count(self, labels: torch.Tensor) -> torch.Tensor:
        return (labels != self.ignore_index).sum()


def token_mean(ignore_index: int = -100, *, target: str = "labels", shifted: bool | None = None) -> TokenMean:
    """Return a loss function for the mean over tokens, exact for any number of shards.

    A shard with more counted tokens has more influence on the mean of the batch, so every shard's mean is
    weighted by its number of tokens; a shard without counted tokens takes no part in the update.

    With a dict batch the model is called with its entries by keyword and must return its own mean loss as
    ``output.loss``, as models of Hugging Face transformers do; ``num_items_in_batch`` is not passed on.
    With a tuple the last entry is the target, and the loss is the cross entropy of the model's output, whose last
    dimension is the classes.

    Args:
        ignore_index: The label of tokens that are not counted.
        target: The key of the labels in a dict batch.
        shifted: Whether the model compares the output at each position with the label at the next one, so that
            the first label of each sequence is not counted. By default, the model is called twice more in evaluation
            mode, once for each device: with the labels, and without the first ones. Their losses are equal if it is.

    Raises:
        TypeError: If `ignore_index` is not an integer.

    Determinism: weights are counts of labels and do not depend on devices.

    Example:
        >>> logits, labels = torch.zeros(2, 3, 5), torch.tensor([[1, 2, -100], [4, -100, -100]])
        >>> token_mean()(nn.Identity(), logits, labels).weight
        tensor(3)
    """
    return TokenMean(ignore_index, target, shifted)


def _loss_of(output: Any) -> Any:
    """Return what a model has returned as its loss."""
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
