"""Top-k accuracy of a classifier, and the accuracy of binary and multilabel targets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from lockstep.arguments import check_number
from lockstep.metrics.average import read
from lockstep.state import check_keys


class Accuracy:
    """The fraction of targets that are among the k classes with the highest scores.

    A target with score s is correct if fewer than k classes precede it. The classes that precede it are
    those with a higher score, those with an equal score and a lower index, and those whose score is NaN.
    With k = 1 this equals ``scores.argmax(1) == target`` unless a score is NaN.

    With a threshold, every target is 0 or 1, and correct if it is 1 where the score is at least the threshold, and 0
    where the score is less. A score of NaN is correct for neither.

    Shapes: ``update(output, target)`` expects scores of shape (N, C, ...) and class indices of shape (N, ...). With a
    threshold, both have one shape, for example (N,) or (N, labels), or the scores have one dimension of 1 more, (N, 1).

    Args:
        top_k: The number of classes k that count as the answer, at least 1.
        ignore_index: A target value that is not counted; by default all are.
        threshold: The smallest score of the answer 1, for binary and multilabel targets: 0.0 for logits, 0.5 for
            probabilities. None for classes.

    Raises:
        ValueError: If `top_k` is less than 1, or not 1 with a threshold, or the threshold is NaN.

    Determinism: comparisons and integer counts only; equal scores yield equal bits on every device.

    >>> accuracy = Accuracy()
    >>> accuracy.update(torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.5, 0.5]]), torch.tensor([1, 1, 0]))
    >>> round(accuracy.compute(), 4)
    0.6667
    >>> accuracy = Accuracy(threshold=0.5)
    >>> accuracy.update(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([[0, 1], [0, 0]]))
    >>> accuracy.compute()
    0.75
    """

    def __init__(self, top_k: int = 1, *, ignore_index: int | None = None, threshold: float | None = None) -> None:
        check_number("top_k", top_k, least=1)
        if threshold is not None and (top_k != 1 or math.isnan(threshold)):
            raise ValueError(f"`threshold` must be a number, and `top_k` must be 1 then, got {threshold} and {top_k}.")
        self.top_k = top_k
        self.threshold = threshold
        self.ignore_index = ignore_index
        self._correct: int | torch.Tensor = 0
        self._count: int | torch.Tensor = 0

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        """Count one batch; the counts stay on the device of the batch.

        Args:
            output: The scores, of shape (N, C, ...).
            target: The class indices, of shape (N, ...), in 0..C-1 or `ignore_index`; with a threshold 0 or 1.

        Raises:
            ValueError: If the shapes do not match, there is only one class, or a target on the CPU is out of range.
            TypeError: If targets are not integers, without a threshold.
        """
        shapes = f"{tuple(output.shape)} and {tuple(target.shape)}"
        counted = self._counted(target)
        if self.threshold is not None:
            scores = output.squeeze(1) if output.shape[1:] == (1,) and target.ndim == 1 else output
            if scores.shape != target.shape:
                raise ValueError(f"`output` and `target` must have one shape with a threshold, got {shapes}.")
            _check_range(target, counted & (target != 0) & (target != 1), "0 or 1 with a threshold")
            correct = ((scores >= self.threshold) == target) & ~scores.isnan()
        else:
            several = output.ndim > 1 and output.shape[1] > 1
            if not several or target.shape != output.shape[:1] + output.shape[2:]:
                raise ValueError(
                    "`output` and `target` must have the shapes (N, C, ...) and (N, ...) with at least 2 classes, got "
                    f"{shapes}. Pass `threshold=0.0` (logits) or `threshold=0.5` (probabilities) for targets that are "
                    "0 or 1, in one label or several."
                )
            if target.is_floating_point() or target.is_complex():
                raise TypeError(
                    f"`target` must be integer classes, got {target.dtype}. If the last entry of a batch is not the "
                    "target, as in (x, y, weight), choose it by its position: Evaluator(..., target=1)."
                )
            num_classes = output.shape[1]
            _check_range(target, counted & ((target < 0) | (target >= num_classes)), f"in 0..{num_classes - 1}")
            # An ignored target may lie outside of 0..C-1, where it cannot be an index.
            correct = _num_preceding(output.detach(), torch.where(counted, target, 0)) < self.top_k
        self._correct = _to_device(self._correct, output.device) + (correct & counted).sum()
        self._count = _to_device(self._count, output.device) + counted.sum()

    def compute(self) -> float:
        """Return the accuracy; NaN if nothing was counted. Synchronizes with the device."""
        correct, count = read([self._correct, self._count])
        return correct / count if count else math.nan

    def reset(self) -> None:
        """Reset both counts to 0."""
        self._correct, self._count = 0, 0

    def state_dict(self) -> dict[str, object]:
        """Return both counts as numbers; synchronizes with the device."""
        return {"correct": int(self._correct), "count": int(self._count)}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Load saved counts.

        Raises:
            StateError: If a key is missing or unknown.
            TypeError: If a count is not an integer.
        """
        check_keys(state, ("correct", "count"), of="Accuracy")
        correct, count = state["correct"], state["count"]
        if not (isinstance(correct, int) and isinstance(count, int)):
            raise TypeError(f"The state of Accuracy must hold two integers, got {state}.")
        self._correct, self._count = correct, count

    def merge(self, states: Sequence[Mapping[str, object]]) -> None:
        """Set this metric to the accuracy over all batches that several states have counted.

        Args:
            states: The states to merge. Include the one of this metric: its current counts are replaced.

        Raises:
            StateError: If a key is missing or unknown.
            TypeError: If a count is not an integer.

        >>> accuracy = Accuracy()
        >>> accuracy.merge([{"correct": 2, "count": 3}, {"correct": 1, "count": 1}])
        >>> accuracy.compute()
        0.75
        """
        correct = count = 0
        for state in states:
            self.load_state_dict(state)
            correct, count = correct + int(self._correct), count + int(self._count)
        self._correct, self._count = correct, count

    def _counted(self, target: torch.Tensor) -> torch.Tensor:
        """Return a mask of the targets that count."""
        return torch.ones_like(target, dtype=torch.bool) if self.ignore_index is None else target != self.ignore_index


def _check_range(target: torch.Tensor, is_wrong: torch.Tensor, rule: str) -> None:
    """Check that no target is wrong, on the CPU only: elsewhere it would wait for the device."""
    if is_wrong.is_cpu and bool(is_wrong.any()):
        raise ValueError(
            f"`target` must be {rule}, got {target[is_wrong][0].item()}. Pass Accuracy(..., ignore_index=...) for the "
            "value of labels that do not count, such as -100."
        )


def _num_preceding(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Count the classes that precede each target."""
    index = target.long().unsqueeze(1)
    score = output.gather(1, index)
    classes = torch.arange(output.shape[1], device=output.device).view(-1, *[1] * (output.ndim - 2))
    # Not `output > score`: comparisons with NaN are False, so a target with the score NaN would count as correct.
    preceding = ~(output <= score) | ((output == score) & (classes < index))
    return preceding.sum(1)


def _to_device(count: int | torch.Tensor, device: torch.device) -> int | torch.Tensor:
    """Move a count to the device of a batch; the batches of one metric may be on several devices."""
    return count.to(device) if isinstance(count, torch.Tensor) else count
