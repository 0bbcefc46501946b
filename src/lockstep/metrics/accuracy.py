"""The share of samples whose class a model finds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from lockstep.metrics.observed import read
from lockstep.state import check_keys


class Accuracy:
    """The share of targets among the k classes with the highest scores.

    A target with score s is right when fewer than k classes stand before it; before it stand
    those with a higher score, those with an equal score and a lower index, and those whose
    score is NaN. With k = 1 that is ``scores.argmax(1) == target`` wherever no score is NaN.

    Shapes: ``update(output, target)`` takes scores (N, C, ...) and class indices (N, ...).

    Args:
        top_k: k, at least 1.
        ignore_index: A target value that is not counted at all; none unless given.

    Raises:
        ValueError: `top_k` is less than 1.

    Determinism: comparisons and integer counts only; equal scores give equal bits everywhere.

    >>> accuracy = Accuracy()
    >>> accuracy.update(torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.5, 0.5]]), torch.tensor([1, 1, 0]))
    >>> round(accuracy.compute(), 4)
    0.6667
    """

    def __init__(self, top_k: int = 1, *, ignore_index: int | None = None) -> None:
        if top_k < 1:
            raise ValueError(f"`top_k` must be at least 1, got {top_k}.")
        self.top_k = top_k
        self.ignore_index = ignore_index
        self._correct: int | torch.Tensor = 0
        self._count: int | torch.Tensor = 0

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        """Count one batch; the counts stay on its device.

        Args:
            output: Scores (N, C, ...).
            target: Class indices (N, ...), in 0..C-1 or `ignore_index`.

        Raises:
            ValueError: The shapes do not fit each other.
        """
        if output.ndim < 2 or target.shape != output.shape[:1] + output.shape[2:]:  # noqa: PLR2004 - samples and classes
            shapes = f"{tuple(output.shape)} and {tuple(target.shape)}"
            raise ValueError(f"`output` and `target` must have the shapes (N, C, ...) and (N, ...), got {shapes}.")
        counted = self._counted(target)
        right = _rank(output.detach(), torch.where(counted, target, 0)) < self.top_k
        self._correct = _moved(self._correct, output.device) + (right & counted).sum()
        self._count = _moved(self._count, output.device) + counted.sum()

    def compute(self) -> float:
        """Return the share; waits for the device. NaN where nothing was counted."""
        correct, count = read([self._correct, self._count])
        return correct / count if count else math.nan

    def reset(self) -> None:
        """Forget all batches."""
        self._correct, self._count = 0, 0

    def state_dict(self) -> dict[str, object]:
        """Return both counts as numbers; waits for the device."""
        return {"correct": int(self._correct), "count": int(self._count)}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on from saved counts.

        Raises:
            StateError: A key is missing or unknown.
            TypeError: A count is not a whole number.
        """
        check_keys(state, ("correct", "count"), of="Accuracy")
        correct, count = state["correct"], state["count"]
        if not (isinstance(correct, int) and isinstance(count, int)):
            raise TypeError(f"The state of Accuracy must hold two whole numbers, got {state}.")
        self._correct, self._count = correct, count

    def merge(self, states: Sequence[Mapping[str, object]]) -> None:
        """Become the accuracy over all batches that went into some states, its own among them.

        Raises:
            StateError: A key is missing or unknown.
            TypeError: A count is not a whole number.

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
        if self.ignore_index is None:
            return torch.ones_like(target, dtype=torch.bool)
        return target != self.ignore_index


def _rank(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Count the classes that stand before each target."""
    index = target.long().unsqueeze(1)
    score = output.gather(1, index)
    classes = torch.arange(output.shape[1], device=output.device).view(-1, *[1] * (output.ndim - 2))
    # Not "higher than": a NaN must stand before every score, and no score before a NaN target.
    before = ~(output <= score) | ((output == score) & (classes < index))
    return before.sum(1)


def _moved(count: int | torch.Tensor, device: torch.device) -> int | torch.Tensor:
    return count.to(device) if isinstance(count, torch.Tensor) else count
