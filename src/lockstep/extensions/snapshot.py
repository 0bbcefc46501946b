"""Write snapshots, from which a killed run resumes with the same bits."""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final

from lockstep import snapshots
from lockstep.arguments import Mode, check_integer, check_mode
from lockstep.communicators import AgentDeadline
from lockstep.elsewhere import SNAPSHOT, names_ours
from lockstep.errors import (
    DeterminismWarning,
    DisagreementError,
    OrderError,
    PeerError,
    SignalExit,
    SnapshotError,
    SnapshotWarning,
    WorkerError,
    warn,
)
from lockstep.extensions.step_scheduler import warn_of_unsaved_schedulers
from lockstep.metrics import as_mean, read_means
from lockstep.program import PROGRAM, describe_program
from lockstep.stopping import STOP
from lockstep.trainer import Extension, Trainer
from lockstep.triggers import TriggerSpec
from lockstep.updaters import Updater

LAST: Final = -1_000_000
"""A priority below that of any other extension, so that none is still to come when the state is saved."""


@names_ours(SNAPSHOT)
@dataclass(eq=False, repr=False)
class Snapshot(Extension):
    """Writes the state of the run to ``snapshots`` in the trainer's folder, and at the end of the run once more.

    `Trainer.run` resumes from it: ``trainer.run(resume="auto")``. Training waits only while the state is copied, and a
    thread writes it. An error of the disk is a warning, and the next snapshot is tried as usual.

    While the run has this extension, SIGTERM, SIGINT (Ctrl-C) and SIGUSR1 on any rank end it after the current update:
    the state is written, and `run` raises a `SignalExit`, with which Python ends with exit code 143, 130 or 138. In an
    interactive session, Ctrl-C is a `KeyboardInterrupt`, which does not end the session. A second SIGINT ends the
    process at once. If another rank is lost, a rank that survives writes the state of the last
    finished update before `run` raises the `PeerError`.

    The run also logs digests of its state, in ``digests.jsonl``. Updates that are repeated after a restart are compared
    with it, and a difference causes a `DeterminismWarning`.

    Args:
        keep: The number of newest snapshots to keep, at least 1. While one is written, there is one more.
        best: The name of an observed value, such as ``"validation/main/accuracy"``, by which the best snapshot is kept
            as well. The value must be observed at the update of a snapshot, or that snapshot cannot be the best.
        mode: Whether the largest (``"max"``) or the smallest (``"min"``) value is the best. ``"auto"`` means ``"max"``
            for a name that contains ``accuracy``, otherwise ``"min"``, as for `EarlyStopping`; for a name that contains
            neither ``accuracy`` nor ``loss``, a warning says so.
        per_machine: Whether one process writes on each machine, for folders that machines do not share. By default rank
            0 writes.
        required: Whether three failed attempts in a row end the run.
        trigger: The trigger of the snapshots.
        digest_every: The number of updates between two digests in the log, at least 1; every snapshot has one too. None
            for those of snapshots only.

    Raises:
        TypeError: If a number is not an integer.
        ValueError: If an argument is out of range.

    Determinism: the tensor files of an update are equal, byte for byte, wherever the run was computed.
    """

    priority = LAST
    saves_run = True
    acts_together = True

    keep: int = 3
    best: str | None = None
    mode: Mode = "auto"
    per_machine: bool = False
    required: bool = False
    _: KW_ONLY
    trigger: TriggerSpec = (1, "epoch")
    digest_every: int | None = 1000

    def __post_init__(self) -> None:
        if self.best and self.mode == "auto" and not any(each in self.best for each in ("accuracy", "loss")):
            warn(
                f'`mode` is "auto", by which the smallest {self.best!r} is the best one, because the name contains '
                'neither "accuracy" nor "loss". Pass mode="min" or mode="max".'
            )
        self.mode = check_mode(self.mode, self.best or "")
        self._retention = snapshots.Retention(keep=self.keep, best=self.best, mode=self.mode)
        if self.digest_every is not None:
            check_integer("digest_every", self.digest_every, minimum=1)
        self._writer: snapshots.SnapshotWriter | snapshots.Digester | None = None
        self._agreement: snapshots.Agreement | None = None
        self._collector: snapshots.Collector | None = None
        self._log: snapshots.DigestLog | None = None
        self._run_id = ""
        self._best_metrics: Mapping[str, float] | None = None
        self._is_stoppable = False
        self._deadline: AgentDeadline | None = None
        self._is_missing_reported = False

    def initialize(self, trainer: Trainer) -> None:
        """Find out which ranks write, and open the folder.

        Raises:
            OrderError: If the folder holds snapshots of a run that this one does not continue.
        """
        warn_of_unsaved_schedulers(trainer)
        self._run_id = _run_id(trainer, self._run_id)
        try:
            self._open(trainer)
            handles_signals = STOP.install(alone=trainer.updater.communicator.size == 1)
            self._is_stoppable = True
            self._deadline = AgentDeadline(os.environ) if handles_signals else None
        except BaseException:
            # `finalize` is not called after an error.
            self._release()
            raise

    def _open(self, trainer: Trainer) -> None:
        """Open the folder for writing."""
        source = trainer.resumption
        self._agreement = snapshots.Agreement(trainer.updater.communicator, self._mark_verified)
        self._collector = snapshots.Collector(
            trainer.updater, run_id=self._run_id, parent=None if source is None else source.source
        )
        if not self._is_writer(trainer):
            self._writer = snapshots.Digester(self._run_id)
            return
        found = snapshots.list(trainer.out)
        _check_folder(trainer, found, self._run_id)
        manifests = [each.manifest for each in found if each.manifest is not None]
        self._best_metrics = None
        for each in manifests:
            self._is_best(each.metrics)
        self._writer = snapshots.SnapshotWriter(
            out=trainer.out,
            run_id=self._run_id,
            keep=self.keep,
            best=self.best,
            mode=self.mode,
            required=self.required,
            about=_about(trainer),
        )
        # While no other run can write to it.
        self._log = self._open_log(trainer, manifests, self._collector)

    def collect(self, trainer: Trainer) -> None:
        """Log the digests of what was written meanwhile, and one of this update if it is due."""
        self._log_written()
        if not self.digest_every or trainer.updater.iteration % self.digest_every:
            return
        if self._log is not None and self._collector is not None:
            self._log_record(snapshots.record_of(self._collector.collect()))
        elif trainer.updater.shares_state:
            # The rank with the log needs the part of every rank.
            trainer.updater.live_state()

    def __call__(self, trainer: Trainer) -> None:
        """Copy the state, and write it in the background."""
        self._save(trainer, "interval")

    def before_update(self, trainer: Trainer) -> None:  # noqa: ARG002 - the interface
        """Compare the digests of snapshots with those of the other ranks, as far as they have been computed.

        Raises:
            DisagreementError: On every rank, if a rank has other bits.
        """
        self._compare()

    def wait(self) -> None:
        """Wait until every snapshot is durable, or has failed."""
        if self._writer is not None:
            self._writer.wait()

    def finalize(self, trainer: Trainer) -> None:
        """Write the last state unless an error of the run prevents it, and wait until every snapshot is durable.

        Raises:
            SignalExit: If a signal arrived after the last update.
        """
        try:
            self._write_last(trainer)
            lost = self._end(trainer)
            # A rank without a writer is the only one left that has the state if the writer is the rank that is lost.
            if isinstance(lost, PeerError) and self._collector is not None and self._log is None:
                _write_emergency(trainer, self._collector, _reason_of(lost, trainer.updater))
        finally:
            received = self._release()
        # Not before the handlers are restored: a signal that arrived in between would be lost.
        if trainer.error is None and received:
            raise SignalExit(received)

    def _release(self) -> int:
        """Close the folder, and restore how signals are handled. Return the signal that has arrived; 0 for none."""
        received = 0
        try:
            if self._writer is not None:
                self._writer.close()
        finally:
            self._writer = self._log = self._collector = self._agreement = None
            if self._is_stoppable:
                self._is_stoppable = False
                received = STOP.uninstall()
            if self._deadline is not None:
                self._deadline.close()
                self._deadline = None
        return received

    def _write_last(self, trainer: Trainer) -> None:
        """Write the last state if the way in which the run has ended allows it."""
        writer, reason = self._writer, _reason_of(trainer.error, trainer.updater)
        if writer is None:
            return
        writer.wait()
        self._log_written()
        if isinstance(trainer.error, PeerError) and self._log is None:
            return
        if reason is None and isinstance(trainer.error, PeerError | WorkerError):
            _warn_of_lost_state(trainer, writer.newest_update)
        # The last one may have failed, or have been dropped because two others were being written.
        if reason is not None and _any_rank(trainer.updater, writer.newest_update != trainer.updater.iteration):
            self._save(trainer, reason, must=True)
            writer.wait()
            self._log_written()
        if self._log is not None:
            self._log.close()

    def _end(self, trainer: Trainer) -> BaseException | None:
        """Compare the last digests over ranks, and return the error that has ended the run or this comparison.

        Raises:
            DisagreementError: On every rank, if a rank has other bits.
        """
        try:
            if trainer.error is None:
                self._compare(now=True)
            elif isinstance(trainer.error, SignalExit):
                self._compare(now=True)
                # No rank may end while another one still writes: a launcher takes the first process that ends for a
                # failure, and ends the others.
                trainer.updater.communicator.exchange(b"")
        except PeerError as error:
            # A run that has reached its end has lost nothing; the process that is lost has its own error.
            return None if trainer.error is None else error
        except DisagreementError:
            self._set_aside(trainer)
            raise
        if isinstance(trainer.error, DisagreementError) and trainer.error.update is not None:
            self._set_aside(trainer)
        return trainer.error

    def _compare(self, *, now: bool = False) -> None:
        self._log_written()
        if self._agreement is not None:
            self._agreement.compare(now=now)

    def _mark_verified(self, record: snapshots.Record, ranks: int) -> None:
        """Record that all ranks have the bits of a snapshot."""
        if isinstance(self._writer, snapshots.SnapshotWriter):
            self._writer.mark_verified(record.update, record.digest, ranks)

    def _set_aside(self, trainer: Trainer) -> None:
        """Rename the snapshots that may have what the ranks disagree about, so that no run resumes from them."""
        if isinstance(self._writer, snapshots.SnapshotWriter):
            source = trainer.resumption
            since = source.update if source is not None and source.same_run else -1
            renamed = ", ".join(path.name for path in self._writer.set_unverified_aside(since))
            if renamed:
                message = f"Ranks disagree, so that the snapshots since the last verified one are renamed: {renamed}."
                warn(message, SnapshotWarning)

    def _save(self, trainer: Trainer, reason: str, *, must: bool = False) -> None:
        if self._writer is None or self._agreement is None or self._collector is None:
            return
        self._agreement.open(trainer.updater.iteration)
        if self._log is None:
            self._writer.save(self._collector.collect(), must=must)
            return
        # A run that is stopped in the middle of an iteration has not observed the value yet.
        metrics = {} if trainer.error is not None and self.best not in trainer.observation else self._metrics(trainer)
        reasons = [reason]
        if self._is_best(metrics):
            reasons.append(f"best: {self.best} = {metrics[str(self.best)]:.6g}")
        content = self._collector.collect(surroundings=trainer.surroundings(), metrics=metrics)
        self._writer.save(content, reasons=reasons, must=must or len(reasons) > 1)

    def _is_best(self, metrics: Mapping[str, float]) -> bool:
        """Return whether a snapshot is the best so far, and remember its value."""
        is_best = self._retention.is_better(metrics, self._best_metrics)
        if is_best:
            self._best_metrics = metrics
        return is_best

    def _metrics(self, trainer: Trainer) -> dict[str, float]:
        """Return the value by which snapshots are compared, if it was observed in this iteration."""
        if self.best is None:
            return {}
        if self.best not in trainer.observation:
            if not self._is_missing_reported:
                self._is_missing_reported = True
                observed = ", ".join(map(repr, sorted(trainer.observation))) or "nothing"
                warn(
                    f"`best` must be observed at a snapshot for it to be the best one, got {self.best!r}; at update "
                    f"{trainer.updater.iteration} there is {observed}."
                )
            return {}
        total, weight = read_means({self.best: as_mean(trainer.observation[self.best])})[self.best]
        value = total / weight if weight else math.nan
        return {} if math.isnan(value) else {self.best: value}

    def _log_written(self) -> None:
        """Log the digests of the snapshots that have become durable, and keep them to compare them over ranks."""
        if self._writer is not None and self._agreement is not None:
            for record in self._writer.take_records():
                self._log_record(record)
                self._agreement.add(record)

    def _log_record(self, record: snapshots.Record) -> None:
        """Log the digests of an update, and warn if it had others before."""
        repeated = None if self._log is None else self._log.record(record)
        if repeated is not None:
            warn(repeated, DeterminismWarning)

    def _is_writer(self, trainer: Trainer) -> bool:
        """Return whether this rank writes. Every rank must call this."""
        communicator = trainer.updater.communicator
        leaders = snapshots.first_rank_in_folder(communicator, trainer.out)
        elsewhere = [rank for rank, leader in enumerate(leaders) if leader != 0]
        if elsewhere and not self.per_machine and trainer.is_main:
            warn(
                f"Ranks {', '.join(map(str, elsewhere))} do not share the folder {trainer.out} with rank 0, whose "
                "machine alone has the snapshots. To have them on every machine, pass `per_machine=True`."
            )
        return leaders[communicator.rank] == communicator.rank if self.per_machine else trainer.is_main

    def _open_log(
        self, trainer: Trainer, manifests: list[snapshots.Manifest], collector: snapshots.Collector
    ) -> snapshots.DigestLog:
        """Open the log of digests, with what is known of updates that will be repeated."""
        source = trainer.resumption
        fields, kernels = collector.conditions()
        # Without the tensors of models, which lazy modules do not have at the start; the log names them anyway.
        recipe = {name: value for name, value in fields.items() if ".model." not in f".{name}"}
        conditions = hashlib.sha256(json.dumps([recipe, kernels], sort_keys=True).encode()).hexdigest()
        # A run that was interrupted in this process continues its log, too.
        resumed_at = trainer.updater.iteration or None
        log = snapshots.DigestLog(trainer.out, conditions=conditions, resumed_at=resumed_at, required=self.required)
        if source is not None and source.same_kernels and not source.accepted:
            log.expect(map(snapshots.record_of, manifests))
        return log


def _warn_of_lost_state(trainer: Trainer, newest: int | None) -> None:
    """Warn that the state of the last update is lost with a rank that held a part of it."""
    done = trainer.updater.iteration
    if newest == done:
        return
    kept = "from the beginning" if newest is None else f"from its newest snapshot, that of update {newest}"
    warn(
        f"No snapshot of update {done} is written, because a part of the optimizer's state was on a rank that is lost. "
        f"The run goes on {kept}, and repeats {done - (newest or 0)} updates. To keep the whole state on every rank, "
        "pass `shard_optimizer=False`.",
        SnapshotWarning,
    )


def _run_id(trainer: Trainer, current: str) -> str:
    """Return the name of the run: that of the run it continues in the same folder, or a new one, equal on all ranks."""
    source = trainer.resumption
    if source is not None and source.same_run:
        current = source.run_id
    # Rank 0 decides, because the other ranks may see other folders.
    return str(trainer.updater.communicator.exchange_json(current or secrets.token_hex(8))[0])


def _check_folder(trainer: Trainer, found: list[snapshots.Found], run_id: str) -> None:
    """Check that no snapshot in the folder is of another run, or of a later update with another recipe."""
    others = [each for each in found if each.manifest is not None and each.manifest.run_id != run_id]
    if others:
        raise OrderError(
            f"`out` must not hold snapshots of a run that this one does not continue, got {others[-1].path}. Continue "
            "that run by `run(resume='auto')`, or use another folder."
        )
    source = trainer.resumption
    later = [each for each in found if each.update > trainer.updater.iteration]
    if later and source is not None and (source.accepted or not source.same_kernels):
        raise OrderError(
            f"`out` must not hold later snapshots of the run if it continues under other conditions, got "
            f"{later[-1].path}. Use another folder."
        )


def _about(trainer: Trainer) -> dict[str, Any]:
    """Describe where and by which program a snapshot is written."""
    devices = [str(device) for device in trainer.updater.devices]
    return {PROGRAM: describe_program(), "devices": devices, "processes": trainer.updater.communicator.size}


def _reason_of(error: BaseException | None, updater: Updater) -> str | None:
    """Return why a snapshot is written at the end of a run.

    Args:
        error: The exception that ends the run, if there is one.
        updater: The updater of the run.

    Returns:
        The reason for the manifest; None if the state may be in the middle of something, or partly on a rank that is
        lost, so that it is not written.
    """
    if error is None:
        return "end of the run"
    if isinstance(error, SignalExit):
        return f"signal {error.name}"
    # The exchange that failed comes before anything changes, and so does a wait for data, so that the state is that of
    # the last finished update.
    if updater.shares_state or not isinstance(error, PeerError | WorkerError):
        return None
    return f"emergency snapshot of rank {updater.communicator.rank}"


def _any_rank(updater: Updater, holds: bool) -> bool:
    """Return whether something holds on any rank, where all of them must then collect the state together.

    Args:
        updater: The updater of the run.
        holds: Whether it holds on this rank.
    """
    return any(updater.communicator.exchange_json(holds)) if updater.shares_state else holds


def _write_emergency(trainer: Trainer, collector: snapshots.Collector, reason: str | None) -> None:
    """Write the state of the last finished update on a rank that writes no other snapshots."""
    if trainer.updater.iteration == 0 or reason is None:
        return
    # Also after no update of its own: the machine that had the snapshot and sent it may be the one that is lost.
    try:
        content = collector.collect(surroundings=trainer.surroundings())
        snapshots.write_beside(trainer.out, content, reasons=[reason], about=_about(trainer))
    except (OSError, SnapshotError) as failure:
        # The loss of the rank stays the error that ends this process.
        message = f"The emergency snapshot of update {trainer.updater.iteration} could not be written: {failure}"
        warn(message, SnapshotWarning)
