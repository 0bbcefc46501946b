"""Find the largest batch size that fits into memory, by updates with batches that grow."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

import torch

from lockstep.arguments import check_choice, check_instance, check_integer, check_number
from lockstep.data import BatchIterator
from lockstep.errors import PeerError, is_memory_error
from lockstep.replicas import free_reserved_memory, peak_memory, restart_peak_memory
from lockstep.state import temporarily
from lockstep.tuning.restored import restored
from lockstep.updaters import MAIN, ParallelUpdater

Limit: TypeAlias = Literal["memory", "max_batch_size", "dataset"]

FITS: Final = "fits"
MEMORY: Final = "out of memory"
PEER: Final = "another rank failed"
"""How an update ended on a rank; any other text is an error of that rank."""


@dataclass(frozen=True, slots=True)
class BatchSizeTrial:
    """Updates with batches of one size.

    Attributes:
        batch_size: The number of samples in a batch.
        shard_size: The number of samples in the largest shard, on which the memory for activations depends.
        fits: Whether memory sufficed on all ranks.
        seconds: The seconds per update, without the first one; None if memory did not suffice.
        samples_per_second: The samples per second, over all ranks; None if memory did not suffice.
        memory: The largest number of bytes that tensors took on a device of any rank. On CPUs, the largest resident
            memory of a process since it began, so that a smaller batch after a larger one shows that of the larger one.
            None where nothing counts it.
    """

    batch_size: int
    shard_size: int
    fits: bool
    seconds: float | None = None
    samples_per_second: float | None = None
    memory: int | None = None


@dataclass(frozen=True, slots=True)
class BatchSizeFinderResult:
    """The batch sizes that were tried.

    Attributes:
        trials: The trials, in order.
        limited_by: What ended the search: ``"memory"``, or else `max_batch_size` or the length of the dataset.
        suggestion: The largest batch size that fits, less the margin if the limit was searched for.

    ``print(result)`` shows a table.
    """

    trials: tuple[BatchSizeTrial, ...]
    limited_by: Limit
    suggestion: int

    @property
    def largest(self) -> int:
        """The largest batch size that fits."""
        return max(trial.batch_size for trial in self.trials if trial.fits)

    def __str__(self) -> str:
        rows = [f"{'batch size':>10}  {'per shard':>9}  {'s/update':>9}  {'samples/s':>10}  {'memory':>10}"]
        for trial in self.trials:
            row = f"{trial.batch_size:>10}  {trial.shard_size:>9}  "
            memory = "" if trial.memory is None else f"{trial.memory / 2**20:.0f} MiB"
            if trial.seconds is None:
                rows.append(f"{row}out of memory")
            else:
                rows.append(f"{row}{trial.seconds:>9.4f}  {trial.samples_per_second:>10.1f}  {memory:>10}")
        return "\n".join([*rows, f"suggestion: {self.suggestion}, limited by {self.limited_by}"])


def find_batch_size(
    updater: ParallelUpdater,
    *,
    mode: Literal["power", "binsearch"] = "power",
    min_batch_size: int | None = None,
    max_batch_size: int | None = None,
    num_updates: int = 3,
    margin: float = 0.05,
    iterator: str = MAIN,
) -> BatchSizeFinderResult:
    """Train for some updates with batches that grow until memory does not suffice, restore the run, and suggest a size.

    The size doubles from trial to trial until it reaches a limit. Each trial begins with the state of the run, and runs
    whole updates with full batches, so that optimizers have their state. All ranks try the same sizes: memory has to
    suffice on all of them. At the end the updater is as it was before, as after `find_lr`, also after an error; nothing
    is logged, and no extension is called.

    The batch size is part of what a run computes, as the learning rate is, and which size fits depends on the machine.
    Search once, and write the size into your program.

    Memory for activations depends on the number of samples per shard. If the batch size that you want does not fit,
    more shards (`num_shards`) make each of them smaller at the same batch size.

    Args:
        updater: The updater, whose iterator must be a `BatchIterator`. Its batch size does not matter.
        mode: Whether to end after the first size that does not fit (``"power"``), or to continue between it and the
            largest one that fits, by bisection, up to a multiple of the number of shards (``"binsearch"``).
        min_batch_size: The first size, at least 1. By default two samples per shard.
        max_batch_size: The largest size to try; None for the number of samples in the dataset, which is always a limit.
            On CPUs you must pass it, because a system without free memory ends processes instead of raising an error.
        num_updates: The number of updates of each trial, at least 2. The first one is not timed.
        margin: With ``"binsearch"``, the part of the largest size by which the suggestion is smaller if memory was the
            limit, in [0, 1): later batches may need more memory, such as those with longer texts.
        iterator: The name of the iterator, if there are several. The others keep their batch sizes.

    Returns:
        The trials, and the suggestion. Nothing is set: pass the suggestion to the `BatchIterator` that you create.

    Raises:
        KeyError: If there is no iterator of this name.
        MemoryError: If not even the first size fits.
        TypeError: If `updater` is not a `ParallelUpdater`, its iterator not a `BatchIterator`, or a number no integer.
        ValueError: If a number is out of range, if `max_batch_size` is missing on a CPU, or if the updater carries
            values from batch to batch, whose shape depends on the batch size.

    Determinism: The result depends on the memory of the devices. The run does not depend on the search.

    References: the modes are those of Lightning's ``Tuner.scale_batch_size``.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> data = torch.utils.data.TensorDataset(torch.randn(64, 2), torch.randn(64, 1))
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> from lockstep import supervised
        >>> loss_fn = supervised(torch.nn.functional.mse_loss)
        >>> updater = ParallelUpdater(BatchIterator(data, 8), sgd, model, devices=1, num_shards=4, loss_fn=loss_fn)
        >>> result = find_batch_size(updater, max_batch_size=32)
        >>> [(trial.batch_size, trial.shard_size) for trial in result.trials], result.limited_by, result.suggestion
        ([(8, 2), (16, 4), (32, 8)], 'max_batch_size', 32)
    """
    batches = _check(updater, iterator, max_batch_size)
    check_choice("mode", mode, ("power", "binsearch"))
    check_integer("num_updates", num_updates, minimum=2)
    check_number("margin", margin, least=0, below=1)
    num_shards = updater.shards_per_batch
    limit = min(len(batches.dataset), max_batch_size or len(batches.dataset))
    first = min(2 * num_shards, limit) if min_batch_size is None else min_batch_size
    check_integer("min_batch_size", first, minimum=1)
    if first > limit:
        what = "`max_batch_size`" if limit == max_batch_size else "the number of samples in the dataset"
        raise ValueError(f"`min_batch_size` must be at most {what} ({limit}), got {first}.")
    full_batches = temporarily(batches, batch_size=batches.batch_size, last_batch="wrap", repeat=True)
    with restored(updater) as state, full_batches:
        trials = [_tried(updater, batches, state, first, num_updates)]
        if not trials[0].fits:
            raise MemoryError(
                f"`min_batch_size` must fit into memory, got {first}. Pass a smaller one, or more shards "
                f"(`num_shards`, now {num_shards}), which make each shard smaller."
            )
        while trials[-1].fits and trials[-1].batch_size < limit:
            trials.append(_tried(updater, batches, state, min(2 * trials[-1].batch_size, limit), num_updates))
        if trials[-1].fits:
            # Both may be the same number.
            limited_by: Limit = "max_batch_size" if limit == max_batch_size else "dataset"
            return BatchSizeFinderResult(tuple(trials), limited_by, limit)
        fits, too_large = trials[-2].batch_size, trials[-1].batch_size
        while mode == "binsearch" and (step := (too_large - fits) // 2 // num_shards * num_shards):
            middle = _tried(updater, batches, state, fits + step, num_updates)
            trials.append(middle)
            fits, too_large = (fits + step, too_large) if middle.fits else (fits, fits + step)
    suggestion = fits if mode == "power" else max(first, int(fits * (1 - margin)) // num_shards * num_shards)
    return BatchSizeFinderResult(tuple(trials), "memory", suggestion)


def _check(updater: ParallelUpdater, iterator: str, max_batch_size: int | None) -> BatchIterator:
    """Check that the batch size of an updater can be searched, and return its iterator."""
    check_instance("updater", updater, ParallelUpdater, "a ParallelUpdater")
    batches = updater.get_iterator(iterator)
    if not isinstance(batches, BatchIterator):
        raise TypeError(
            f"The iterator {iterator!r} of `updater` must be a BatchIterator, whose batch size can change, got a "
            f"{type(batches).__name__}. For the search, pass BatchIterator(dataset, batch_size) to an updater."
        )
    if max_batch_size is not None:
        check_integer("max_batch_size", max_batch_size, minimum=1)
    elif any(device.type == "cpu" for device in updater.devices):
        raise ValueError(
            "`max_batch_size` must be given on CPUs, got None. A system without free memory ends processes instead of "
            "raising an error, so nothing else would end the search in time."
        )
    if "carried" in updater.live_state():
        raise ValueError(
            "`updater` must not carry values from batch to batch, because their shape depends on the batch size, got "
            "one with `carried`. For the search, leave `carried` out."
        )
    return batches


def _tried(
    updater: ParallelUpdater, batches: BatchIterator, state: Mapping[str, Any], batch_size: int, num_updates: int
) -> BatchSizeTrial:
    """Run updates with batches of one size from the state of the run; every rank calls this."""
    batches.batch_size = batch_size
    # Also discards the batches that the iterator has planned.
    updater.load_state_dict(state)
    trial = BatchSizeTrial(batch_size, -(-batch_size // updater.shards_per_batch), fits=False)
    for device in updater.devices:
        restart_peak_memory(device)
    began, samples = 0.0, 0
    for index in range(num_updates):
        if not _update_fits(updater):
            # Replicas, batches that were copied ahead, and cycles of the error keep memory in use.
            updater.finalize()
            gc.collect()
            for device in updater.devices:
                free_reserved_memory(device)
            return trial
        if index == 0:
            began, samples = time.perf_counter(), batches.samples_passed
    seconds = (time.perf_counter() - began) / (num_updates - 1)
    memory = [each for each in map(peak_memory, updater.devices) if each is not None]
    own = [seconds, max(memory, default=None)]
    times, peaks = zip(*updater.communicator.exchange_json(own), strict=True)
    samples_per_update = (batches.samples_passed - samples) / (num_updates - 1)
    return replace(
        trial,
        fits=True,
        seconds=max(times),
        samples_per_second=samples_per_update / max(times),
        memory=max((each for each in peaks if each is not None), default=None),
    )


def _update_fits(updater: ParallelUpdater) -> bool:
    """Run an update, and return whether memory sufficed on all ranks; every rank calls this.

    Raises:
        Exception: Any other error of the update.
        PeerError: If another rank raised one.
    """
    error: Exception | None = None
    try:
        updater.update()
        for device in updater.devices:
            # Errors of work that is still queued appear here.
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
    except Exception as raised:  # noqa: BLE001 - raised below, once the other ranks know of it
        error = raised
    # The step of an optimizer may fail on one rank alone, so ranks have to agree after each update.
    statuses = updater.communicator.exchange_json(_status(error))
    failed = [rank for rank, status in enumerate(statuses) if status not in {FITS, MEMORY, PEER}]
    if error is not None and (failed or MEMORY not in statuses):
        raise error
    if failed:
        raise PeerError(f"Rank {failed[0]} raised {statuses[failed[0]]}", rank=failed[0])
    return MEMORY not in statuses


def _status(error: Exception | None) -> str:
    if error is None:
        return FITS
    if is_memory_error(error):
        return MEMORY
    return PEER if isinstance(error, PeerError) else f"{type(error).__name__}: {error}"
