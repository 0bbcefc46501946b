"""Coordinate the ranks: in each attempt they exchange one control message with their results or their error.

A rank whose own code raises still sends its message for that attempt, with the error. The other ranks then raise at the
same point, where the training state has not changed yet, instead of waiting for the failed rank.

Ranks that were given other batches find out before they step: they exchange a checksum of each batch in every update,
and the descriptions only if something differs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final
from zlib import crc32

from lockstep.communicators import Communicator, first_difference, traceback_text
from lockstep.data import fingerprint
from lockstep.errors import DisagreementError, OrderError, PeerError, PeerInterrupt, SignalExit
from lockstep.replicas import fork_error
from lockstep.stopping import STOP
from lockstep.updaters.attempt.attempt import Described
from lockstep.updaters.attempt.context import UpdateSigint
from lockstep.updaters.ranks.consistency import RankConsistency
from lockstep.updaters.ranks.rank_sum import RankSum

Position = Mapping[str, Any]
"""What ranks must agree on in an exchange, by the names that errors use."""

NO_CONTEXT: Final[AbstractContextManager[None]] = nullcontext()

GATHERS: Final = "gathers state"
"""The key of a message of a rank that is about to gather state."""


class Coordinator:
    """Where the updater communicates with other ranks; as it is for a process that is the whole run."""

    def __init__(self) -> None:
        self._process = os.getpid()

    def start_update(self) -> None:
        """Prepare for an update, or for one half of an update.

        Raises:
            OrderError: If this process was forked from the one that built the updater.
        """
        if self._process != os.getpid():
            raise fork_error("ParallelUpdater")

    def state_loaded(self) -> None:
        """Record that the state was replaced, so that ranks compare it again."""

    def reporting_errors(self) -> AbstractContextManager[None]:
        """Return a context manager that reports an exception raised inside it to the other ranks."""
        return NO_CONTEXT

    def agree(
        self,
        position: Position,  # noqa: ARG002 - no rank to compare with
        batches: Sequence[Described],  # noqa: ARG002 - see above
        interrupts: UpdateSigint,
    ) -> None:
        """Check that no rank has failed or was interrupted so far; from here on all ranks hold interrupts.

        Args:
            position: What must be the same on all ranks.
            batches: The descriptions of this rank's batches, which must be the same as well.
            interrupts: The interrupts of this rank.

        Raises:
            PeerError: If a rank failed.
            DisagreementError: If a rank is at another position.
            PeerInterrupt: If a rank was interrupted.
        """
        self.hold_interrupts(interrupts)

    def hold_interrupts(self, interrupts: UpdateSigint) -> None:
        """Hold all interrupts until the update ends, because all ranks complete it after they have agreed to.

        Args:
            interrupts: The interrupts of this rank.
        """
        interrupts.check()
        interrupts.hold()


class RankCoordinator(Coordinator):
    """The coordinator of one of several processes.

    Args:
        communicator: The communicator of the run.
        consistency: Compares what must be equal on all ranks.
        rank_sum: Exchanges the messages, because other transfers between ranks have to end with each of them.
    """

    def __init__(self, communicator: Communicator, consistency: RankConsistency, rank_sum: RankSum) -> None:
        super().__init__()
        self._communicator = communicator
        self._consistency = consistency
        self._sum = rank_sum
        self._failed = False

    def start_update(self) -> None:
        """Forget how the last update ended; before the first update, compare the ranks.

        Raises:
            DisagreementError: If the ranks differ.
            OrderError: If this process was forked from the one that built the updater.
        """
        # Before any message, because a forked process would write into the connections of the other one.
        super().start_update()
        self._failed = False
        self._consistency.check_start()

    def state_loaded(self) -> None:
        """Compare the ranks again before the next update."""
        self._consistency.state_loaded()

    @contextmanager
    def reporting_errors(self) -> Iterator[None]:
        """Report an exception to the other ranks, unless it came from an exchange and they have it already."""
        try:
            yield
        # KeyboardInterrupt and SystemExit included: any exception that leaves a rank without a message would leave the
        # others waiting for it.
        except BaseException as error:
            if not self._failed:
                self._report_error(error)
            raise

    def exchange_reports(
        self, position: Position, batches: Sequence[Described], report: Mapping[str, Any], *, repeat: bool = False
    ) -> list[Mapping[str, Any]] | None:
        """Send a report to every rank, and receive the reports of all.

        The ranks act together on these reports until each calls `end_exchange`.

        Args:
            position: What must be the same on all ranks.
            batches: The descriptions of this rank's batches, which must be the same as well.
            report: The report of this rank; anything that JSON can represent.
            repeat: Whether this rank has to compute its share again.

        Returns:
            The reports of all ranks in order; None if a rank has to compute its share again, in which case all do.

        Raises:
            PeerError: If a rank failed.
            DisagreementError: If a rank is at another position or has another state.
            PeerInterrupt: If a rank was interrupted.
        """
        position = {**position, BATCHES: [each.checksum for each in batches]}
        own = {"position": position, "repeat": repeat, "report": report, "state": self._consistency.state_digest()}
        if STOP.received:
            own["stop"] = STOP.received
        # From here on an error either is raised on the other ranks as well or cannot be sent to them. A second message
        # would pair up with one of another meaning.
        self._failed = True
        messages = self._sum.exchange(own)
        digests, reports = [], []
        # All messages are checked for errors before any position is compared: a rank that failed has no position to
        # compare.
        for rank, each in enumerate(messages):
            # The end of the data on one rank is a disagreement and not a failure: the other ranks have batches left.
            if each.get("ended"):
                _raise_ended(rank)
            raise_error(rank, each)
            if GATHERS in each:
                raise _gathers_alone(rank)
        _check_positions([each["position"] for each in messages], batches, self._communicator)
        for each in messages:
            repeat |= each["repeat"]
            digests.append(each["state"])
            # All ranks read the same messages, so that all of them stop after the same update.
            if "stop" in each:
                STOP.agreed = STOP.agreed or each["stop"]
            reports.append(each["report"])
        # After the positions: digests of different parts of the state cannot be compared.
        self._consistency.check_digests(digests)
        return None if self._sum.must_repeat or repeat else reports

    def end_exchange(self) -> None:
        """End an exchange: an error that is raised from here on must be reported to the other ranks."""
        self._failed = False

    def agree(self, position: Position, batches: Sequence[Described], interrupts: UpdateSigint) -> None:
        """Exchange messages without a report; see `Coordinator.agree`."""
        interrupts.check()
        self.exchange_reports(position, batches, {})
        self._sum.reset_prediction()
        self.end_exchange()
        interrupts.hold()

    def start_gather(self) -> None:
        """Check that every rank is about to gather state.

        Raises:
            OrderError: If a rank does something else.
            PeerError: If a rank failed.
        """
        messages = self._sum.exchange({GATHERS: True})
        self._sum.reset_prediction()
        for rank, each in enumerate(messages):
            raise_error(rank, each)
        for each in messages:
            if GATHERS not in each:
                raise _gathers_alone(self._communicator.rank)

    def hold_interrupts(self, interrupts: UpdateSigint) -> None:
        """Hold all interrupts: the other ranks would not learn of one that is delivered now."""
        interrupts.hold()

    def _report_error(self, error: BaseException) -> None:
        """Send this rank's error in place of the message that the other ranks are waiting for."""
        self._failed = True
        ended = isinstance(error, StopIteration)
        messages = self._sum.exchange({**describe_error(error, phase=self._communicator.watch.phase), "ended": ended})
        # Where the iterators of all ranks end in the same update, every rank keeps its own StopIteration.
        if ended and not all(each.get("ended") for each in messages):
            _raise_ended(self._communicator.rank)


def _gathers_alone(rank: int) -> OrderError:
    return OrderError(
        "`state_dict` must be called on every rank where an optimizer is shared out over them, because no rank has its "
        f"whole state, got a call on rank {rank} while others train. Call it on all ranks, and write the file on one, "
        "or pass `shard_optimizer=False`."
    )


def _raise_ended(rank: int) -> None:
    raise DisagreementError(
        f"The batches of rank {rank} must end when those of the other ranks do, but end earlier. {CURE}",
        rank=rank,
        subject="batches",
    )


def _check_positions(positions: Sequence[Position], batches: Sequence[Described], communicator: Communicator) -> None:
    """Check that all ranks are at the position of rank 0.

    Args:
        positions: The position of each rank, in order of ranks.
        batches: The descriptions of this rank's batches.
        communicator: The communicator by which the ranks exchange these if their checksums differ.

    Raises:
        DisagreementError: If a rank is at another position.
    """
    found = first_difference(positions)
    if found is None:
        return
    # Every rank has the same positions, so all of them exchange their descriptions, or none does.
    if found.names[0] in {"batch sizes", BATCHES}:
        raise find_other_batches(positions, found.names[0], communicator.exchange_json(batches))
    remedy = "Run the same code with the same batches on every rank."
    raise found.error(what="position", remedy=remedy, update=positions[0].get("update"))


def describe_error(error: BaseException, *, phase: str) -> dict[str, Any]:
    """Describe an error as a message that `raise_error` reads.

    Args:
        error: The error.
        phase: What this rank was doing.
    """
    return {
        "error": f"{type(error).__name__}: {error}",
        "traceback": traceback_text(error),
        "phase": phase,
        "interrupt": isinstance(error, KeyboardInterrupt),
        "stop": error.number if isinstance(error, SignalExit) else 0,
    }


def raise_error(rank: int, message: Mapping[str, Any]) -> None:
    """Raise the error that a rank describes in its message, if it does.

    Args:
        rank: The rank that sent the message.
        message: The message.

    Raises:
        SignalExit: If a signal on that rank ends the run.
        PeerInterrupt: If that rank was interrupted.
        PeerError: If it failed in another way.
    """
    if "error" not in message:
        return
    if message["stop"]:
        raise SignalExit(message["stop"])
    if message["interrupt"]:
        raise PeerInterrupt(f"Rank {rank} was interrupted.", rank=rank)
    raise PeerError(
        f"Rank {rank} raised {message['error']}\nIts own traceback:\n{message['traceback'].rstrip()}",
        rank=rank,
        phase=message["phase"],
        traceback=message["traceback"],
    )


BATCHES: Final = "batches"
"""The name under which ranks compare what they were given; its value is a list of the checksums of `Described`."""

CONTENTS_EVERY: Final = 16
"""The number of updates from one look at samples in memory to the next; indices are compared in every update."""

CURE: Final = (
    "Every rank must be given the same batches, because lockstep cuts each of them over the ranks itself: remove a "
    "DistributedSampler and every other split of the data by rank, and use seeds that do not depend on the rank. A "
    "DataLoader that shuffles also needs the same torch.manual_seed on every rank, and a dataset that draws from "
    "random or NumPy the same seeds of these. A loss function must not change batches in place that are used again."
)


def describe_batch(batch: Any, name: str, update: int) -> Described:
    """Describe a batch for the other ranks.

    Args:
        batch: The batch.
        name: The name of its iterator; empty for a batch given to `compute_gradients`.
        update: The number of updates that are done, which is the same on every rank.
    """
    found = fingerprint(batch, contents=update % CONTENTS_EVERY == 0)
    return Described(crc32(name.encode(), found.checksum), name, found)


def find_other_batches(
    positions: Sequence[Mapping[str, Any]], name: str, described: Sequence[Sequence[Any]]
) -> DisagreementError:
    """Return the error for ranks that have other batches than rank 0.

    Args:
        positions: Those of all ranks; at least one differs from the first in `name`.
        name: The name of what differs, ``"batch sizes"`` or `BATCHES`.
        described: For each rank a list of `Described`, as JSON values.
    """
    update = positions[0].get("update")
    others = [rank for rank, each in enumerate(positions) if each.get(name) != positions[0].get(name)]
    listed = f"rank {others[0]}" if len(others) == 1 else f"ranks {', '.join(map(str, others))}"
    what = _difference(described[others[0]], described[0])
    return DisagreementError(
        f"The batches of {listed} must be those of rank 0, but in the update after {update} others, {what}. {CURE}",
        rank=others[0],
        subject=name,
        update=update,
    )


def _difference(mine: Sequence[Any], theirs: Sequence[Any]) -> str:
    """Describe the first batch that differs."""
    for number, (one, other) in enumerate(zip(mine, theirs, strict=False)):
        if one == other:
            continue
        (_, source, (_, about, indices)), (_, _, (_, about_first, indices_first)) = one, other
        which = "the batch given to `compute_gradients`"
        if source:
            before, count = ([each[1] for each in part].count(source) for part in (mine[:number], mine))
            which = f"the batch of iterator {source!r}" if count == 1 else f"batch {before} of iterator {source!r}"
        if about != about_first:
            return f"{which} is {about} and not {about_first}"
        if indices is not None and indices == indices_first:
            return f"{which} has the same indices, but the samples of its dataset differ ({about} on both)"
        return f"{which} has other samples ({about} on both)"
    return f"there are {len(mine)} batches and not {len(theirs)}"
