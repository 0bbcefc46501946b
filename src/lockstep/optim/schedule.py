"""Learning rates as functions of the number of updates, and a scheduler that applies them.

A `Factor` is a pure function: it takes the number of applied updates and returns the factor that the base
learning rate is multiplied by in the next update. It has no state to save, so a run can stop and resume at any
point of it. Factors can be multiplied (`product`) and started later (`delayed`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from lockstep.errors import StateError

Factor: TypeAlias = Callable[[int], float]


def linear_scaling(base_lr: float, *, batch_size: int, base_batch_size: int) -> float:
    """Scale a learning rate linearly with the batch size.

    k updates on batches of n samples move the weights by about as much as one update on k·n samples with k
    times the learning rate, as long as the gradient changes little between them.

    Args:
        base_lr: The learning rate that suits ``base_batch_size``.
        batch_size: The number of samples per update, over all devices and accumulated batches; at least 1.
        base_batch_size: The number of samples per update for which ``base_lr`` was chosen; at least 1.

    Raises:
        ValueError: If a size is out of range.

    References: Goyal et al., "Accurate, Large Minibatch SGD", 2017, arXiv:1706.02677, section 2.1.

    >>> linear_scaling(0.1, batch_size=8192, base_batch_size=256)
    3.2
    """
    for name, size in (("batch_size", batch_size), ("base_batch_size", base_batch_size)):
        if size < 1:
            raise ValueError(f"`{name}` must be at least 1, got {size}.")
    return base_lr * batch_size / base_batch_size


def warmup(updates: int, *, start: float = 0.0) -> Factor:
    """Rise linearly from ``start`` to 1 over a number of updates, and stay at 1.

    Args:
        updates: The number of updates after which 1 is reached; with 0 there is no warmup.
        start: The factor of the first update, at least 0.

    Raises:
        ValueError: If a number is out of range.

    References: Goyal et al., "Accurate, Large Minibatch SGD", 2017, arXiv:1706.02677, section 2.2.

    >>> [warmup(4, start=0.5)(count) for count in range(6)]
    [0.5, 0.625, 0.75, 0.875, 1.0, 1.0]
    """
    _check_at_least("updates", updates, 0)
    _check_at_least("start", start, 0)

    def factor(count: int) -> float:
        return 1.0 if count >= updates else start + (1.0 - start) * count / updates

    return factor


def steps(milestones: Sequence[int], *, gamma: float = 0.1) -> Factor:
    """Multiply the factor by ``gamma`` at each milestone.

    Args:
        milestones: Numbers of updates, in ascending order; a number that occurs twice counts twice.
        gamma: The factor per milestone, at least 0.

    Raises:
        ValueError: If the milestones are not in ascending order, or a number is out of range.

    >>> [steps([2, 3], gamma=0.5)(count) for count in range(5)]
    [1.0, 1.0, 0.5, 0.25, 0.25]
    """
    if list(milestones) != sorted(milestones):
        raise ValueError(f"`milestones` must be in ascending order, got {list(milestones)}.")
    _check_at_least("gamma", gamma, 0)
    return lambda count: float(gamma ** bisect_right(milestones, count))


def every(updates: int, *, gamma: float = 0.1, final: float | None = None) -> Factor:
    """Multiply the factor by ``gamma`` each time a fixed number of updates has passed.

    Args:
        updates: The number of updates between two changes, at least 1.
        gamma: The factor per change, at least 0.
        final: The smallest factor if ``gamma`` is at most 1, the largest if it is above 1; None for no bound.

    Raises:
        ValueError: If a number is out of range, or ``final`` lies where ``gamma`` does not lead.

    >>> [every(2, gamma=0.5, final=0.3)(count) for count in range(6)]
    [1.0, 1.0, 0.5, 0.5, 0.3, 0.3]
    >>> [every(2, gamma=2.0)(count) for count in range(6)]
    [1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    """
    _check_at_least("updates", updates, 1)
    power = _bounded_power("gamma", gamma, final)
    return lambda count: power(count // updates)


def exponential(rate: float, *, final: float | None = None) -> Factor:
    """Multiply the factor by ``rate`` in every update.

    Args:
        rate: The factor per update, at least 0.
        final: The smallest factor if ``rate`` is at most 1, the largest if it is above 1; None for no bound.

    Raises:
        ValueError: If the rate is out of range, or ``final`` lies where the rate does not lead.

    >>> [exponential(0.5, final=0.2)(count) for count in range(4)]
    [1.0, 0.5, 0.25, 0.2]
    """
    return _bounded_power("rate", rate, final)


def _bounded_power(name: str, base: float, final: float | None) -> Factor:
    """Return the powers of a number as a factor, clamped at a bound in the direction in which they lead."""
    _check_at_least(name, base, 0)
    if final is None:
        return lambda count: float(base**count)
    _check_finite("final", final)
    if (final < 1) if base > 1 else (final > 1):
        rule = "at least 1 where `{}` is above 1" if base > 1 else "at most 1 where `{}` is at most 1"
        raise ValueError(f"`final` must be {rule.format(name)}, got {final} and {base}.")
    bound = float(final)

    def factor(count: int) -> float:
        try:
            value = float(base**count)
        except OverflowError:
            # Only a base above 1 can overflow, and then the bound is the upper one.
            return bound
        return min(value, bound) if base > 1 else max(value, bound)

    return factor


def cosine(updates: int, *, final: float = 0.0) -> Factor:
    """Fall from 1 to ``final`` along half a cosine wave, and stay there.

    Args:
        updates: The number of updates after which ``final`` is reached, at least 1.
        final: The factor at the end; it may be negative or above 1.

    Raises:
        ValueError: If a number is out of range.

    References: Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2016,
    arXiv:1608.03983, equation 5, without restarts.

    >>> [round(cosine(4)(count), 3) for count in range(6)]
    [1.0, 0.854, 0.5, 0.146, 0.0, 0.0]
    """
    _check_at_least("updates", updates, 1)
    _check_finite("final", final)

    def factor(count: int) -> float:
        done = min(count / updates, 1.0)
        return final + (1.0 - final) * (1.0 + math.cos(math.pi * done)) / 2.0

    return factor


def polynomial(updates: int, *, power: float = 1.0, final: float = 0.0, bound: float | None = None) -> Factor:
    """Fall from 1 to ``final`` polynomially, and stay there; a power of 1 is a straight line.

    With the fraction p of the updates that are done: final + (1 - final)·(1 - p)^power.

    Args:
        updates: The number of updates after which ``final`` is reached, at least 1.
        power: The exponent, above 0.
        final: The factor at the end; it may be negative or above 1.
        bound: The smallest factor, which may be reached before the end; None for no bound.

    Raises:
        ValueError: If a number is out of range.

    >>> [polynomial(4, power=2)(count) for count in range(6)]
    [1.0, 0.5625, 0.25, 0.0625, 0.0, 0.0]
    """
    _check_at_least("updates", updates, 1)
    if not power > 0:
        raise ValueError(f"`power` must be above 0, got {power}.")
    _check_finite("final", final)
    least = -math.inf if bound is None else bound
    if math.isnan(least):
        raise ValueError(f"`bound` must be a number or None, got {bound}.")

    def factor(count: int) -> float:
        left = 1.0 - min(count / updates, 1.0)
        return max(final + (1.0 - final) * math.pow(left, power), least)

    return factor


def inverse(gamma: float, *, power: float = 1.0, final: float = 0.0) -> Factor:
    """Fall as a power of the number of updates: (1 + gamma·count)^-power.

    Args:
        gamma: The factor of the count, at least 0.
        power: The exponent, at least 0.
        final: The smallest factor, at most 1.

    Raises:
        ValueError: If a number is out of range.

    >>> [inverse(1.0, final=0.3)(count) for count in range(4)]
    [1.0, 0.5, 0.3333333333333333, 0.3]
    """
    _check_at_least("gamma", gamma, 0)
    _check_at_least("power", power, 0)
    _check_finite("final", final)
    if final > 1:
        raise ValueError(f"`final` must be at most 1, got {final}.")
    return lambda count: max(float((1.0 + gamma * count) ** -power), final)


def product(*factors: Factor) -> Factor:
    """Multiply factors, for example a warmup and the decay after it.

    >>> [product(warmup(2), steps([3], gamma=0.5))(count) for count in range(5)]
    [0.0, 0.5, 1.0, 0.5, 0.5]
    """
    return lambda count: math.prod(factor(count) for factor in factors)


def delayed(factor: Factor, updates: int) -> Factor:
    """Start a factor later; until then it has its first value.

    Args:
        factor: The factor to start later.
        updates: The number of updates to wait, at least 0.

    Raises:
        ValueError: If ``updates`` is out of range.

    >>> [delayed(polynomial(2), 2)(count) for count in range(5)]
    [1.0, 1.0, 1.0, 0.5, 0.0]
    """
    _check_at_least("updates", updates, 0)
    return lambda count: factor(max(count - updates, 0))


class UpdateSchedule(LRScheduler):
    """Set the learning rates of an optimizer by a function of the number of applied updates.

    Before update number n (counted from 0), the learning rate of each group is ``base_lr · factor(n)``. Call
    `step` after each update that was applied, and not after one that was skipped; the number of processes and
    of batches per update does not matter.

    Loading a state also sets the optimizer's learning rates, so that a run resumes correctly in whichever
    order optimizer and schedule are created and loaded, during a warmup and after it.

    Args:
        optimizer: Any torch optimizer.
        factor: A pure function of the number of updates; it is not saved.
        base_lr: The base learning rate, one number for all groups or one per group. By default each group's
            current learning rate, or its ``initial_lr`` where an earlier schedule or a loaded state has set one.

    Raises:
        ValueError: If the number of base rates is not the number of groups.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    >>> schedule = UpdateSchedule(optimizer, warmup(2))
    >>> rates = []
    >>> for _ in range(4):
    ...     rates.append(optimizer.param_groups[0]["lr"])
    ...     optimizer.step()
    ...     schedule.step()
    >>> rates
    [0.0, 0.25, 0.5, 0.5]
    """

    def __init__(self, optimizer: Optimizer, factor: Factor, *, base_lr: float | Sequence[float] | None = None) -> None:
        self.factor = factor
        if base_lr is not None:
            # torch's scheduler reads the base rates from there.
            _set_initial_lrs(optimizer, _base_lrs(optimizer, base_lr))
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rate of each group for the next update."""
        factor = self.factor(self.last_epoch)
        return [base * factor for base in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """Return the number of updates and the base rates."""
        return {"last_epoch": self.last_epoch, "base_lrs": [float(lr) for lr in self.base_lrs]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the number of updates and the base rates, and set the optimizer's learning rates accordingly.

        Raises:
            StateError: If a key is missing or unknown, or the number of groups differs.
        """
        if state_dict.keys() != {"last_epoch", "base_lrs"}:
            raise StateError(f"The state of a schedule must hold ['base_lrs', 'last_epoch'], got {sorted(state_dict)}.")
        if len(state_dict["base_lrs"]) != len(self.base_lrs):
            raise StateError(
                f"`base_lrs` must hold a rate for each of {len(self.base_lrs)} groups, "
                f"got {len(state_dict['base_lrs'])}."
            )
        self.last_epoch = state_dict["last_epoch"]
        # torch also counts the step that its constructor takes.
        self._step_count = self.last_epoch + 1
        self.base_lrs = list(state_dict["base_lrs"])
        # A schedule that is created later reads its base rates from the groups.
        _set_initial_lrs(self.optimizer, state_dict["base_lrs"])
        self._last_lr = self.get_lr()
        for group, lr in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            _set_lr(group, lr)


def _base_lrs(optimizer: Optimizer, base_lr: float | Sequence[float]) -> list[float]:
    """Return the base rate of each group."""
    count = len(optimizer.param_groups)
    base_lrs = [base_lr] * count if isinstance(base_lr, (int, float)) else list(base_lr)
    if len(base_lrs) != count:
        raise ValueError(f"`base_lr` must hold a rate for each of {count} groups, got {len(base_lrs)}.")
    return base_lrs


def _set_initial_lrs(optimizer: Optimizer, base_lrs: Sequence[float]) -> None:
    """Store the base rate of each group where torch's schedulers look for it."""
    for group, lr in zip(optimizer.param_groups, base_lrs, strict=True):
        group["initial_lr"] = lr


def _set_lr(group: dict[str, Any], lr: float | Tensor) -> None:
    """Set a group's learning rate; a tensor is changed in place, because compiled steps hold a reference to it."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr


def _check_finite(name: str, value: float) -> None:
    """Check that a number is neither infinite nor NaN."""
    if not math.isfinite(value):
        raise ValueError(f"`{name}` must be finite, got {value}.")


def _check_at_least(name: str, value: float, least: float) -> None:
    """Check that a number is finite and at least ``least``."""
    if not least <= value < math.inf:
        raise ValueError(f"`{name}` must be finite and at least {least}, got {value}.")
