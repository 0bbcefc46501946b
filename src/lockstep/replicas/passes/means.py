"""Notice a loss that is not the mean over its samples, by the last operation that computed it.

The mean over a batch is combined of the means over its shards. Of a loss that is something else, such as a sum, the
gradient then depends on the number of shards.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import torch

REDUCED_BY_SUM: Final = 2
"""The number by which PyTorch knows ``reduction="sum"``."""
REDUCED_BY_MEAN: Final = 1
"""The number by which PyTorch knows ``reduction="mean"``."""
WEIGHTED: Final = "a mean weighted by classes, or by the labels that are not ignored, over them,"
SUMS: Final = frozenset({"AddBackward", "SubBackward"})
"""The nodes of sums of losses."""
PRODUCTS: Final = frozenset({"MulBackward", "DivBackward"})
"""The nodes of losses with a factor."""
SEVERAL: Final = frozenset({"StackBackward", "CatBackward"})
"""The nodes of several losses in one tensor."""
UNCHANGED: Final = frozenset(f"{name}Backward" for name in ("View", "Squeeze", "Unsqueeze", "ToCopy", "Neg", "Clone"))
"""The nodes of operations that leave a sum a sum."""
OF_ONE_NUMBER: Final = frozenset(
    f"{name}Backward" for name in ("Sqrt", "LinalgVectorNorm", "Norm", "Pow", "Log", "Exp")
)
"""The nodes of operations whose result for a mean is not the mean of their results."""


@dataclass(eq=False, slots=True)
class NoMeans:
    """Collects what the losses of shards are that are no means over their samples.

    Attributes:
        found: What they are, for messages.
        weighted: The same for means over weighted labels, which are right where all shards have the same weight.
        weights: The weights per label of means over labels, each after its batch and the position of the term.
    """

    found: set[str] = field(default_factory=set)
    weighted: str = ""
    weights: set[tuple[int, int, str]] = field(default_factory=set)

    def note(self, value: torch.Tensor, num_samples: int, batch: int) -> None:
        """Check the loss of a shard.

        Args:
            value: The loss, before backward.
            num_samples: The number of samples that it was computed from.
            batch: The number of their batch.
        """
        if why := self._why(value, num_samples, batch):
            self.found.add(why)

    def _why(self, value: torch.Tensor, num_samples: int, batch: int) -> str:
        node = _changing(value.grad_fn)
        name = _name(node)
        # What is computed from a single sample is its mean. As many numbers as there are samples may be those of tasks.
        sizes = [*node._saved_self_sym_sizes] if name == "SumBackward" else []  # noqa: SLF001 - autograd has no public names
        if num_samples > 1 and len(sizes) > 1 and sizes[0] == num_samples:
            return "a sum over them,"
        if name in {"MeanBackward", "DivBackward"} and num_samples > 1 and value.is_cpu and _selects(node, num_samples):
            return "a mean of a part of the elements over them,"
        if num_samples > 1 and name in OF_ONE_NUMBER:
            return "a root, power, logarithm or exponential of one number over them,"
        terms = _terms(node)
        start = "a term that is " if len(terms) > 1 else ""
        for at, (term, is_scaled) in enumerate(terms):
            # A sum that is divided by the number of samples is a mean.
            reduction = getattr(term, "_saved_reduction", None)
            if reduction == REDUCED_BY_SUM and not is_scaled:
                return f"{start}a sum over them,"
            # On an accelerator the host would wait.
            if reduction == REDUCED_BY_MEAN and _name(term).startswith("NllLoss") and value.is_cpu:
                total, labels = float(term._saved_total_weight), term._saved_target.numel()  # noqa: SLF001 - as above
                self.weights.add((batch, at, f"{total / (labels or 1):.5g}"))
                if total != labels:
                    self.weighted = f"{start}{WEIGHTED}"
                # Copied, because the threads of other devices add theirs.
                if len(seen := self.weights.copy()) > len({each[:2] for each in seen}):
                    return f"{start}{WEIGHTED}"
        return ""


def _selects(node: Any, num_samples: int) -> bool:
    """Return whether a mean is that of elements that a mask selects, of which samples have different numbers.

    Args:
        node: The node of a mean, or of a division.
        num_samples: The number of samples.
    """
    before = _changing(node.next_functions[0][0])
    if _name(node) == "DivBackward":
        divisor = torch.as_tensor(node._saved_other)  # noqa: SLF001 - as above
        is_constant = divisor.numel() == 1 and not any(each for each, _ in node.next_functions[1:])
        # Other sums are divided by a multiple of the number of samples, which may be no integer.
        is_of_samples = _name(before) == "SumBackward" and [*before._saved_self_sym_sizes][:1] == [num_samples]  # noqa: SLF001 - as above
        return is_constant and is_of_samples and (number := float(divisor)).is_integer() and number % num_samples != 0
    masks = getattr(before, "_saved_indices", None) if _name(before) == "IndexBackward" else None
    mask = masks[0] if masks else getattr(before, "_saved_mask", None)
    if mask is None or mask.dtype != torch.bool or mask.shape[:1] != (num_samples,):
        return False
    counts = mask.reshape(num_samples, -1).sum(1)
    return bool(counts.min() != counts.max())


def _name(node: Any) -> str:
    """Return the name of a node without its number."""
    return "" if node is None else str(node.name()).rstrip("0123456789")


def _changing(node: Any) -> Any:
    """Return the first node, from the result on, that leaves a sum no sum."""
    while _name(node) in UNCHANGED:
        node = node.next_functions[0][0]
    return node


def _terms(node: Any) -> list[tuple[Any, bool]]:
    """Return the nodes of the terms that a loss is combined of, each with whether it is multiplied or divided.

    Args:
        node: The node of the loss.
    """
    # Sums of sums are looked at once, or a sum that is doubled n times would take 2**n steps.
    left, terms, seen = [(node, False)], list[tuple[Any, bool]](), set[Any]()
    while left:
        each, is_scaled = left.pop()
        each = _changing(each)
        name = _name(each)
        parts = [part for part, _ in each.next_functions] if each is not None else []
        is_of_several = name in {"SumBackward", "MeanBackward"} and _name(parts[0]) in SEVERAL
        if name in SUMS or name in PRODUCTS or name in SEVERAL or is_of_several:
            left += [] if each in seen else [(part, is_scaled or name not in SUMS) for part in parts]
            seen.add(each)
        elif each is not None:
            terms.append((each, is_scaled))
    return terms
