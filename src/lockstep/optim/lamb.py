"""LAMB: steps of Adam's direction, each as long as its parameter's norm says."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lockstep.optim.hooked import ForeachOptimizer
from lockstep.optim.norm import norms


@torch.no_grad()
def lamb_step(
    weights: list[Tensor],
    means: list[Tensor],
    mean_squares: list[Tensor],
    grads: list[Tensor],
    *,
    count: int | None,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    norm_bounds: tuple[float, float],
    threshold: float,
) -> None:
    """Move the weights one step along Adam's direction, by a share of their norms.

    With weight w, gradient g, means m and v of g and g², step t, learning rate η, decay λ, threshold θ, and
    φ(x) for x brought into ``norm_bounds``::

        m ← β₁·m + (1 - β₁)·g
        v ← β₂·v + (1 - β₂)·g²
        u = (m / (1 - β₁ᵗ)) / (√(v / (1 - β₂ᵗ)) + ε) + λ·w
        r = φ(‖w‖) / ‖u‖   where φ(‖w‖) > 0 and ‖u‖ > θ, else 1
        w ← w - η·r·u

    Shapes: each list holds P tensors; the p-th of all four have one shape and one dtype.

    Args:
        weights: Changed in place.
        means: m, changed in place; zeros before the first step.
        mean_squares: v, changed in place; zeros before the first step.
        grads: Left untouched. Gradients of the mean loss over the whole batch.
        count: t, from 1; None leaves m and v as they are, small in the first steps, where r makes up for
            most of it.
        lr: η, at least 0.
        betas: β₁ and β₂, in [0, 1).
        eps: ε, above 0.
        weight_decay: λ, at least 0.
        norm_bounds: The least and the greatest value of φ.
        threshold: θ, at least 0.

    Determinism: elementwise but for the norms, whose order of summation is a function of the shape (see
    `lockstep.optim.norm`). Nothing waits for the device.

    References: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", 2020,
    arXiv:1904.00962, algorithm 2.

    >>> weight, mean, mean_square = torch.tensor([3.0, 4.0]), torch.zeros(2), torch.zeros(2)
    >>> numbers = {"betas": (0.0, 0.0), "eps": 1e-6, "norm_bounds": (0.0, 10.0), "threshold": 0.0}
    >>> grad = torch.tensor([0.0, 8.0])
    >>> lamb_step([weight], [mean], [mean_square], [grad], count=1, lr=0.1, weight_decay=0.0, **numbers)
    >>> weight
    tensor([3.0000, 3.5000])
    """
    if not weights:
        return
    beta1, beta2 = betas
    torch._foreach_lerp_(means, grads, 1 - beta1)
    torch._foreach_mul_(mean_squares, beta2)
    torch._foreach_addcmul_(mean_squares, grads, grads, 1 - beta2)
    roots = torch._foreach_sqrt(mean_squares)  # noqa: SLF001 - torch's multi-tensor kernels have no other name
    if count is not None:
        torch._foreach_div_(roots, math.sqrt(1 - beta2**count))
    torch._foreach_add_(roots, eps)
    updates = torch._foreach_div(means, roots)  # noqa: SLF001 - see above
    if count is not None:
        torch._foreach_div_(updates, 1 - beta1**count)
    if weight_decay != 0:
        # Not with `alpha`, which on a CPU rounds the last elements of a half-precision tensor otherwise
        # than the rest, so that bits would depend on how many threads share it.
        decays = torch._foreach_mul(weights, weight_decay)  # noqa: SLF001 - see above
        torch._foreach_add_(updates, decays)
    sizes = torch.stack(norms(weights)).clamp(*norm_bounds)
    lengths = torch.stack(norms(updates))
    ratios = torch.where((sizes > 0) & (lengths > threshold), sizes / lengths, 1.0)
    torch._foreach_mul_(updates, list((ratios * lr).unbind()))
    torch._foreach_sub_(weights, updates)


class LAMB(ForeachOptimizer):
    """Step in Adam's direction, each parameter by a share of its norm.

    The rule is that of `lamb_step`. While the bounds of the norm are not reached, η is the share of its norm
    that a parameter moves in a step. A parameter of zeros, and one whose step is no longer than the threshold
    (as where gradients vanish), takes the step as it is: else the first could not leave zero, and the second
    would go its whole way along noise.

    NNabla's Lamb has its epsilon for the threshold, (0, 10) for the bounds, and no bias correction; where its
    lower bound is 0, it leaves parameters of zeros at zero for good, which is not copied. MXNet's lamb has a
    threshold of 0.

    Args:
        params: Parameters, or dicts of groups with options of their own. Real, with dense gradients.
        lr: η, at least 0.
        betas: β₁ and β₂, in [0, 1): how much of the means of gradients and of their squares outlives a step.
        eps: ε, above 0.
        weight_decay: λ, at least 0. It acts inside the step whose length is set, and so turns it only.
        norm_bounds: The least and the greatest norm that a parameter counts with; 0 and above.
        threshold: θ, at least 0. A step of a norm up to this keeps it.
        bias_correction: Whether the means are divided by the share of them that is there, as of t steps.
        missing_grad: "skip" leaves a parameter without gradient alone, "zero" has the means move it.
        frozen: Whether the parameters stay as they are.

    Raises:
        ValueError: An option is out of range.
        TypeError: A parameter is complex; from `step`: a gradient is sparse. Then nothing has moved.

    Determinism: as `lamb_step`; the same bits wherever each parameter is stepped.

    References: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", 2020,
    arXiv:1904.00962, algorithm 2. The bounds are those of the paper's φ, the ratio of 1 is that of the
    implementations that came after it.

    >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> optimizer = LAMB([weight], lr=0.1)
    >>> weight.grad = torch.tensor([0.0, 8.0])
    >>> optimizer.step()
    >>> weight
    Parameter containing:
    tensor([3.0000, 3.5000], requires_grad=True)
    """

    _remembered = ("mean", "mean_square")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        norm_bounds: tuple[float, float] = (0.0, math.inf),
        threshold: float = 1e-6,
        bias_correction: bool = True,
        missing_grad: str = "skip",
        frozen: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "norm_bounds": norm_bounds,
            "threshold": threshold,
            "bias_correction": bias_correction,
            "missing_grad": missing_grad,
            "frozen": frozen,
        }
        super().__init__(params, defaults)

    def state_keys(self, group: Mapping[str, Any]) -> frozenset[str]:
        """Name what is remembered for a parameter: the means m and v, and how many steps they are of."""
        return super().state_keys(group) | {"count"}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take more parameters in, with options of their own.

        Args:
            param_group: "params" and any of the options; the others are those of the constructor.

        Raises:
            ValueError: An option is out of range.
            TypeError: A parameter is complex.
        """
        super().add_param_group(param_group)
        found = [weight.dtype for weight in self.param_groups[-1]["params"] if weight.dtype.is_complex]
        if found:
            del self.param_groups[-1]
            raise TypeError(f"`params` must be real, got one of {found[0]}.")

    @property
    def momentum(self) -> float:
        """The β₁ of the first group; may be set, in [0, 1)."""
        beta1: float = self.param_groups[0]["betas"][0]
        return beta1

    @momentum.setter
    def momentum(self, momentum: float) -> None:
        self._set_option("betas", (momentum, self.param_groups[0]["betas"][1]))

    def _check_options(self, options: Mapping[str, Any]) -> None:
        super()._check_options(options)
        eps = options["eps"]
        for name, beta in zip(("betas[0]", "betas[1]"), options["betas"], strict=True):
            if not 0 <= beta < 1:
                raise ValueError(f"`{name}` must lie in [0, 1), got {beta}.")
        if not 0 < eps < math.inf:
            raise ValueError(f"`eps` must be finite and above 0, got {eps}.")
        for name in ("weight_decay", "threshold"):
            if not 0 <= options[name] < math.inf:
                raise ValueError(f"`{name}` must be finite and at least 0, got {options[name]}.")
        least, greatest = options["norm_bounds"]
        if not (0 <= least <= greatest and least < math.inf and greatest > 0):
            raise ValueError(
                f"`norm_bounds` must be at least 0 and in ascending order, the second above 0, got {(least, greatest)}."
            )

    def advance(self) -> None:
        """Move the weights one step by their gradients, and do nothing else: no hook, no count.

        What is remembered belongs to one parameter, so each `part` may advance in a thread of its own.

        Raises:
            TypeError: A gradient is sparse; nothing has moved.
        """
        _check_dense(self.moving_parameters())
        super().advance()

    def _advance_lists(self, group: dict[str, Any], *lists: list[Tensor]) -> None:
        names = ("lr", "betas", "eps", "weight_decay", "norm_bounds", "threshold")
        numbers = {name: group[name] for name in names}
        for count, some in self._counted(lists):
            lamb_step(*some, count=count if group["bias_correction"] else None, **numbers)

    def _begin(self, state: dict[str, Any], weight: Tensor) -> None:
        super()._begin(state, weight)
        state["count"] = 0

    def _counted(self, lists: Sequence[list[Tensor]]) -> list[tuple[int, list[list[Tensor]]]]:
        """Count a step of each parameter, and sort them by it; they differ where some were skipped."""
        rows_by_count: dict[int, list[tuple[Tensor, ...]]] = {}
        for row in zip(*lists, strict=True):
            state = self.state[row[0]]
            state["count"] += 1
            rows_by_count.setdefault(state["count"], []).append(row)
        return [(count, [list(column) for column in zip(*rows, strict=True)]) for count, rows in rows_by_count.items()]


def _check_dense(weights: Iterable[Tensor]) -> None:
    """Refuse sparse gradients, which would have to bring about dense means."""
    for weight in weights:
        if weight.grad is not None and weight.grad.layout != torch.strided:
            raise TypeError(
                f"The gradients of LAMB must be dense, got one of layout {weight.grad.layout} for a "
                f"parameter of shape {tuple(weight.shape)}. Give such parameters to another "
                "optimizer, or have their layer make dense gradients (sparse=False)."
            )
