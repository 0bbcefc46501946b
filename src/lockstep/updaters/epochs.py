"""Tell optimizers and schedulers that an epoch begins, once for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol, runtime_checkable

from torch.optim.lr_scheduler import LRScheduler


@runtime_checkable
class CountsEpochs(Protocol):
    """An optimizer that wants to know of epochs, as lockstep's own do.

    Attributes:
        use_auto_new_epoch: Set by an updater that calls `new_epoch`, so that nobody else does.
    """

    use_auto_new_epoch: bool

    def new_epoch(self, auto: bool = False) -> None:
        """Count an epoch; ``auto`` says that an updater calls."""


class Epochs:
    """Those who are told when an epoch begins.

    Args:
        optimizers: Those of them that count epochs are told, and from now on by nobody else.
        schedulers: Stepped.
    """

    def __init__(self, optimizers: Mapping[str, object], schedulers: Mapping[str, LRScheduler]) -> None:
        counting = [each for each in optimizers.values() if isinstance(each, CountsEpochs)]
        for optimizer in counting:
            optimizer.use_auto_new_epoch = True
        self._calls: list[Callable[[], object]] = [partial(optimizer.new_epoch, auto=True) for optimizer in counting]
        self._calls += [scheduler.step for scheduler in schedulers.values()]

    def begin(self, epochs: int) -> list[BaseException]:
        """Tell all of them of so many epochs.

        Returns:
            What they raised; all have been called all the same.
        """
        return [error for _ in range(epochs) for call in self._calls for error in raised(call)]


def raised(call: Callable[[], object]) -> list[BaseException]:
    """Call a function of the user's; return what it raised, if anything, for the caller to raise later."""
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - raised by the caller when the update is complete
        return [error]
    return []
