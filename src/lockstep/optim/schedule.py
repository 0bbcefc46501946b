"""Learning rates as functions of the number of updates, and a scheduler that applies them.

A `Factor` is a pure function: it takes the number of applied updates and returns the factor that the base
learning rate is multiplied by in the next update. It has no state to save, so a run can stop and resume at any
point of it. Factors can be multiplied (`product`) and started later (`delayed`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from lockstep.arguments import check_number
from lockstep.errors import StateError
from lockstep.state import check_keys

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
    _check_finite(1, batch_size=batch_size, base_batch_size=base_batch_size)
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
    _check_finite(0, updates=updates, start=start)
    return lambda count: 1.0 if count >= updates else start + (1.0 - start) * count / updates


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
    _check_finite(0, gamma=gamma)
    return _bounded(lambda count: gamma ** bisect_right(milestones, count), None, rises=gamma > 1)


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
    _check_finite(1, updates=updates)
    _check_finite(0, gamma=gamma)
    _check_final(final, f"gamma={gamma}", rises=gamma > 1)
    return _bounded(lambda count: gamma ** (count // updates), final, rises=gamma > 1)


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
    _check_finite(0, rate=rate)
    _check_final(final, f"rate={rate}", rises=rate > 1)
    return _bounded(lambda count: rate**count, final, rises=rate > 1)


def _bounded(factor: Factor, bound: float | None, *, rises: bool) -> Factor:
    """Clamp a factor at its largest value if it rises, or at its smallest."""
    if bound is not None and math.isnan(bound):
        raise ValueError(f"`bound` must be a number or None, got {bound}.")
    limit = (math.inf if rises else -math.inf) if bound is None else float(bound)

    def bounded(count: int) -> float:
        try:
            value = float(factor(count))
        except OverflowError:
            value = math.inf
        return min(value, limit) if rises else max(value, limit)

    return bounded


def _check_final(final: float | None, cause: str, *, rises: bool) -> None:
    """Check that a bound lies where a factor leads."""
    bound = 1.0 if final is None else final
    _check_finite(final=bound)
    if (bound < 1) if rises else (bound > 1):
        rule = "at least 1 where the factor grows" if rises else "at most 1 where the factor does not grow"
        raise ValueError(f"`final` must be {rule}, got {final} with {cause}.")


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
    _check_finite(1, updates=updates)
    _check_finite(final=final)
    return lambda count: final + (1.0 - final) * (1.0 + math.cos(math.pi * min(count / updates, 1.0))) / 2.0


def polynomial(updates: int, *, power: float = 1.0, final: float = 0.0, bound: float | None = None) -> Factor:
    """Move from 1 to ``final`` polynomially, and stay there; a power of 1 is a straight line.

    With the fraction p of the updates that are done: final + (1 - final)·(1 - p)^power. With a power below 0, the
    factor has no end to reach: it grows until it reaches the bound.

    Args:
        updates: The number of updates after which ``final`` is reached, at least 1.
        power: The exponent.
        final: The factor at the end; it may be negative or above 1, and must be 0 with a power below 0.
        bound: The smallest factor, or with a power below 0 the largest, which may be reached before the end; None for
            no bound, which a power below 0 requires.

    Raises:
        ValueError: If a number is out of range.

    >>> [polynomial(4, power=2)(count) for count in range(6)]
    [1.0, 0.5625, 0.25, 0.0625, 0.0, 0.0]
    >>> [polynomial(4, power=-1, bound=3)(count) for count in range(6)]
    [1.0, 1.3333333333333333, 2.0, 3.0, 3.0, 3.0]
    """
    _check_finite(1, updates=updates)
    _check_finite(power=power, final=final)
    if power < 0 and (bound is None or final != 0):
        raise ValueError(
            f"`bound` must be given, and `final` must be 0, with a `power` below 0, got {bound} and {final}. Pass the "
            "largest factor, because this one grows without end."
        )

    def factor(count: int) -> float:
        left = 1.0 - min(count / updates, 1.0)
        return final + (1.0 - final) * (math.pow(left, power) if left or power >= 0 else math.inf)

    return _bounded(factor, bound, rises=power < 0)


def inverse(gamma: float, *, power: float = 1.0, final: float | None = None) -> Factor:
    """Fall as a power of the number of updates, (1 + gamma·count)^-power, or grow with a power below 0.

    Args:
        gamma: The factor of the count, at least 0.
        power: The exponent.
        final: The smallest factor, at most 1, or with a power below 0 the largest, at least 1; None for no bound.

    Raises:
        ValueError: If a number is out of range.

    >>> [inverse(1.0, final=0.3)(count) for count in range(4)]
    [1.0, 0.5, 0.3333333333333333, 0.3]
    >>> [inverse(1.0, power=-1, final=2.5)(count) for count in range(4)]
    [1.0, 2.0, 2.5, 2.5]
    """
    _check_finite(0, gamma=gamma)
    _check_finite(power=power)
    _check_final(final, f"power={power}", rises=power < 0)
    return _bounded(lambda count: (1.0 + gamma * count) ** -power, final, rises=power < 0)


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
    _check_finite(0, updates=updates)
    return lambda count: factor(max(count - updates, 0))


class UpdateSchedule(LRScheduler):
    """Set the learning rates of an optimizer, or another option, by a function of the number of applied updates.

    Before update number n (counted from 0), the learning rate of each group is ``base_lr · factor(n)``. Call
    `step` after each update that was applied, and not after one that was skipped; the number of processes and
    of batches per update does not matter.

    Loading a state also sets the optimizer's learning rates, so that a run resumes correctly in whichever
    order optimizer and schedule are created and loaded, during a warmup and after it.

    Args:
        optimizer: Any torch optimizer.
        factor: A pure function of the number of updates; it is not saved.
        base_lr: The base learning rate, or base value of the option, one number for all groups or one per group. By
            default the current value of each group; for a learning rate its ``initial_lr`` where an earlier schedule
            or a loaded state has set one.
        option: The option of the groups to set: "lr", or another number such as "momentum", "weight_decay" or
            "betas[0]".

    Raises:
        ValueError: If the number of base rates is not the number of groups, or a group has no such number.

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

    def __init__(
        self,
        optimizer: Optimizer,
        factor: Factor,
        *,
        base_lr: float | Sequence[float] | None = None,
        option: str = "lr",
    ) -> None:
        self.factor, self.option, self.optimizer = factor, option, optimizer
        bases = [_read(group, option) for group in optimizer.param_groups]
        if base_lr is not None:
            bases = [base_lr] * len(bases) if isinstance(base_lr, (int, float)) else list(base_lr)
        elif option == "lr":
            bases = [group.get("initial_lr", lr) for group, lr in zip(optimizer.param_groups, bases, strict=True)]
        self._set_bases(bases, "`base_lr`", ValueError)
        super().__init__(optimizer)

    def _update_lr(self, epoch: int | None = None) -> None:
        # torch calls this after its checks, and would set learning rates only.
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        self._last_lr = self.get_lr()
        for group, value in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            _write(group, self.option, value)

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rate, or the value of the option, of each group for the next update."""
        factor = self.factor(self.last_epoch)
        return [base * factor for base in self._bases]

    def state_dict(self) -> dict[str, Any]:
        """Return the number of updates and the base rates."""
        return {"last_epoch": self.last_epoch, "base_lrs": [float(lr) for lr in self._bases]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the number of updates and the base rates, and set the optimizer's learning rates accordingly.

        Raises:
            StateError: If a key is missing or unknown, or the number of groups differs.
        """
        check_keys(state_dict, ["last_epoch", "base_lrs"], of="a schedule")
        self._set_bases(state_dict["base_lrs"], "`base_lrs`", StateError)
        # torch also counts the step that its constructor takes.
        self._step_count = state_dict["last_epoch"] + 1
        self._update_lr(state_dict["last_epoch"])

    def _set_bases(self, bases: Sequence[float | Tensor], name: str, error: type[Exception]) -> None:
        """Store the base values; learning rates also where torch's schedulers, and later ones of ours, read them."""
        groups = self.optimizer.param_groups
        if len(bases) != len(groups):
            raise error(f"{name} must hold a rate for each of {len(groups)} groups, got {len(bases)}.")
        # Copies, because a rate that is a tensor is changed in place.
        self._bases = [base.clone() if isinstance(base, Tensor) else base for base in bases]
        if self.option == "lr":
            self.base_lrs = self._bases
            for group, lr in zip(groups, self._bases, strict=True):
                group["initial_lr"] = lr


def _read(group: Mapping[str, Any], option: str) -> float | Tensor:
    """Return the number under an option, or at an index of it."""
    name, _, index = option.rstrip("]").partition("[")
    value = group.get(name)
    if index in {"0", "1"} and isinstance(value, tuple | list):
        value = value[int(index)]
    if isinstance(value, int | float | Tensor) and not isinstance(value, bool):
        return value
    options = sorted(key for key in group if key != "params")
    raise ValueError(f"`option` must name a number of each group ({options}), got {option!r}, which is {value!r}.")


def _write(group: dict[str, Any], option: str, value: float | Tensor) -> None:
    """Set an option; a tensor is changed in place, because compiled steps hold a reference to it."""
    name, _, index = option.rstrip("]").partition("[")
    if isinstance(group[name], Tensor):
        group[name].fill_(value)
    elif index:
        group[name] = tuple(value if str(at) == index else old for at, old in enumerate(group[name]))
    else:
        group[name] = value


def _check_finite(least: float | None = None, /, **numbers: float) -> None:
    """Check that numbers are finite and at least ``least``."""
    for name, value in numbers.items():
        check_number(name, value, least=least, finite=True)


_warmup_factor: Final = warmup  # `large_batch_schedule` has an argument of that name


def large_batch_schedule(
    optimizer: Optimizer,
    base_lr: float,
    batch_size: int,
    base_batch_size: int = 256,
    *,
    warmup: tuple[float, str] = (5, "epoch"),
    milestones: Sequence[float] = (30, 60, 80),
    gamma: float = 0.1,
    updates_per_epoch: int,
) -> UpdateSchedule:
    """Create a schedule that scales the learning rate with the batch size, warms up, and decays in steps.

    With k = batch_size / base_batch_size, the learning rate starts at base_lr, rises linearly to k·base_lr
    during the warmup, and is multiplied by gamma at each milestone. (If k is less than 1, there is nothing
    to warm up to: the learning rate starts at k·base_lr.)

    Use it with `lockstep.optim.CorrectedMomentumSGD`, ``torch.optim.SGD``, or
    ``MomentumSGD(correction=True)``: with these, a new learning rate applies to the momentum at once.

    Args:
        optimizer: The optimizer whose learning rates are set, now and whenever the schedule steps.
        base_lr: The learning rate that suits ``base_batch_size``, above 0.
        batch_size: The number of samples per update, over all devices and accumulated batches.
        base_batch_size: The number of samples per update for which ``base_lr`` was chosen.
        warmup: How long the learning rate rises, as a number and a unit: "epoch" or "update" (also called
            "iteration").
        milestones: The epochs at which the learning rate decays, in ascending order.
        gamma: The factor that the learning rate is multiplied by at each milestone, at least 0; it grows above 1.
        updates_per_epoch: The number of updates in an epoch: the samples divided by ``batch_size``.

    Returns:
        The schedule. Call its ``step()`` after each applied update.

    Raises:
        ValueError: If a number is out of range or a unit is unknown.
        TypeError: If `warmup` is not a number with a unit.

    References: Goyal et al., "Accurate, Large Minibatch SGD", 2017, arXiv:1706.02677, sections 2.1,
    2.2 and 5.1.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> made = large_batch_schedule(
    ...     optimizer, base_lr=0.1, batch_size=8192, warmup=(5, "epoch"), updates_per_epoch=157
    ... )
    >>> [round(made.factor(157 * epoch) * 3.2, 4) for epoch in (0, 1, 5, 29, 30, 60, 80)]
    [0.1, 0.72, 3.2, 3.2, 0.32, 0.032, 0.0032]
    """
    check_number("base_lr", base_lr, above=0)
    check_number("updates_per_epoch", updates_per_epoch, least=1)
    if not isinstance(warmup, tuple | list):
        raise TypeError(f"`warmup` must be (number, unit), got {warmup!r}.")
    scaled_lr = linear_scaling(base_lr, batch_size=batch_size, base_batch_size=base_batch_size)
    # For a batch smaller than the base, 1 / k is above 1: the rate would fall during the warmup.
    rise = _warmup_factor(_to_updates(warmup, updates_per_epoch), start=min(1.0, base_batch_size / batch_size))
    falls = steps([_to_updates((epoch, "epoch"), updates_per_epoch) for epoch in milestones], gamma=gamma)
    return UpdateSchedule(optimizer, product(rise, falls), base_lr=scaled_lr)


def _to_updates(period: tuple[float, str], updates_per_epoch: int) -> int:
    """Convert a period to a whole number of updates."""
    number, unit = period
    if unit not in {"epoch", "update", "iteration"}:
        raise ValueError(f"The unit of a period must be 'epoch', 'update' or 'iteration', got {unit!r}.")
    return round(number * updates_per_epoch) if unit == "epoch" else round(number)
