"""A learning rate schedule that keeps the accuracy of small batches in training with large ones."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim.optimizer import Optimizer

from lockstep.optim import schedule
from lockstep.optim.schedule import UpdateSchedule


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
    if not base_lr > 0:
        raise ValueError(f"`base_lr` must be above 0, got {base_lr}.")
    if updates_per_epoch < 1:
        raise ValueError(f"`updates_per_epoch` must be at least 1, got {updates_per_epoch}.")
    if not isinstance(warmup, tuple | list):
        raise TypeError(f"`warmup` must be (number, unit), got {warmup!r}.")
    scaled_lr = schedule.linear_scaling(base_lr, batch_size=batch_size, base_batch_size=base_batch_size)
    # For a batch smaller than the base, 1 / k is above 1: the rate would fall during the warmup.
    rise = schedule.warmup(_to_updates(warmup, updates_per_epoch), start=min(1.0, base_batch_size / batch_size))
    falls = schedule.steps([_to_updates((epoch, "epoch"), updates_per_epoch) for epoch in milestones], gamma=gamma)
    return UpdateSchedule(optimizer, schedule.product(rise, falls), base_lr=scaled_lr)


def _to_updates(period: tuple[float, str], updates_per_epoch: int) -> int:
    """Convert a period to a whole number of updates."""
    number, unit = period
    if unit not in {"epoch", "update", "iteration"}:
        raise ValueError(f"The unit of a period must be 'epoch', 'update' or 'iteration', got {unit!r}.")
    return round(number * updates_per_epoch) if unit == "epoch" else round(number)
