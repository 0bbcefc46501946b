"""Notice a loss that is not the mean over its samples, by the last operation that computed it.

The mean over a batch is combined of the means over its shards. Of a loss that is something else, such as a sum, the
gradient then depends on the number of shards.
"""

from __future__ import annotations

from typing import Any, Final

import torch

REDUCED_BY_SUM: Final = 2
"""The number by which PyTorch knows ``reduction="sum"``."""
UNCHANGED: Final = frozenset(f"{name}Backward" for name in ("View", "Squeeze", "Unsqueeze", "ToCopy", "Neg", "Clone"))
"""The nodes of operations that leave a sum a sum."""
OF_ONE_NUMBER: Final = frozenset(
    f"{name}Backward" for name in ("Sqrt", "LinalgVectorNorm", "Norm", "Pow", "Log", "Exp")
)
"""The nodes of operations whose result for a mean is not the mean of their results."""


def why_no_mean(value: torch.Tensor, num_samples: int) -> str:
    """Return what a loss is if the last operation shows that it is no mean over its samples; otherwise nothing.

    Args:
        value: The loss, before backward.
        num_samples: The number of samples that it was computed from.
    """
    node: Any = value.grad_fn
    while node is not None and node.name().rstrip("0123456789") in UNCHANGED:
        node = node.next_functions[0][0]
    name = "" if node is None else node.name().rstrip("0123456789")
    if getattr(node, "_saved_reduction", None) == REDUCED_BY_SUM:
        return "a sum"
    # What is computed from a single sample is its mean.
    if num_samples > 1 and name == "SumBackward" and [*node._saved_self_sym_sizes][:1] == [num_samples]:  # noqa: SLF001 - as below
        before = node.next_functions[0][0]
        # A sum of means, or of the losses of several tasks, may have as many terms as there are samples.
        is_of_means = before is not None and before.name().startswith(("Mean", "Stack", "Cat"))
        return "" if is_of_means else "a sum"
    if num_samples > 1 and name in OF_ONE_NUMBER:
        return "a root, power, logarithm or exponential of one number"
    # On an accelerator the host would wait.
    if name.startswith("NllLoss") and value.is_cpu:
        total, targets = node._saved_total_weight, node._saved_target  # noqa: SLF001 - autograd has no public names
        if float(total) != targets.numel():
            return "a mean weighted by classes, or by the labels that are not ignored,"
    return ""
