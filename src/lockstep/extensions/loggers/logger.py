"""The interface of loggers, and what all of them have in common."""

from __future__ import annotations

import hashlib
import json
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from lockstep.arguments import check_bool
from lockstep.digest import digest
from lockstep.errors import SideFileWarning, warn
from lockstep.extensions.unobserved import Unobserved, check_names
from lockstep.metrics import IntervalMeans
from lockstep.program import PROGRAM, describe_program
from lockstep.side_files import report_unwritten
from lockstep.state import check_keys
from lockstep.trainer import READER, Extension, Trainer
from lockstep.triggers import TriggerSpec
from lockstep.updaters import Updater

EPOCH: Final = "epoch"
"""The name of the value that every entry contains, the number of epochs including the fraction of the current one."""

Row: TypeAlias = tuple[int, dict[str, float]]
"""An update, and the values of its entry by name."""


class Logger(Extension):
    """The base class of extensions that write observed values over updates, the step of every curve.

    When the trigger fires, the mean of each value since the last entry is written, see `LogReport`. A value that was
    not observed in the last update, such as that of an evaluation, is written at the update at which it was. The rest
    of an interval is written when the run ends without an error.

    The configuration of the run is written once: your hyperparameters, the recipe (`Updater.recipe_fields`) and its
    SHA-256, and the program that runs. At the end follows the digest of each model.

    A run that is resumed continues the curves. Updates that it repeats are not written again, because they are equal
    by the determinism guarantee. Where that does not hold, after a resume with fields that `accept` names or with other
    kernels, the entries after the snapshot are replaced. A run that starts anew starts a new log. With several
    processes, rank 0 writes.

    An `OSError` while something is written, such as that of a full disk, is a `SideFileWarning`, and the entry is
    written with a later one. So is a log that lacks entries that were there when the state was saved.

    A subclass defines `open`, `configure`, `write`, `summarize` and `close`, which are called on rank 0 only.

    Args:
        keys: The names to log; by default all.
        trigger: The trigger that ends an interval.
        hyperparameters: Numbers, strings and other values for the configuration, by name.
        last: The names of values of which the last one of an interval is written instead of the mean.
        sums: The names of values of which the sum over an interval is written instead of the mean. Here and in `last`,
            a name also stands for every name that ends with ``"/"`` and that name.
        required: Whether an entry that cannot be written ends the run by a `SideFileError`.

    Raises:
        SideFileError: At the start of a run, if a file is damaged or no regular file.

    Determinism: the values are equal on all placements. Nothing that a logger does changes the run.
    """

    # After the extensions that observe, and before those that save.
    priority = READER - 1

    def __init__(
        self,
        *,
        keys: Sequence[str] | None = None,
        trigger: TriggerSpec = (1, "epoch"),
        hyperparameters: Mapping[str, Any] | None = None,
        last: Sequence[str] = ("lr",),
        sums: Sequence[str] = ("skipped",),
        required: bool = False,
    ) -> None:
        self.keys = check_names("keys", keys)
        self._unobserved = Unobserved(f"`keys` of {type(self).__name__}", self.keys)
        self.trigger = trigger
        self.hyperparameters = dict(hyperparameters or {})
        self._means = IntervalMeans(last=check_names("last", last) or (), sums=check_names("sums", sums) or ())
        check_bool("required", required)
        self.required = required
        self._observed_at: dict[str, tuple[int, float]] = {}
        # The entries of the last interval, which rank 0 may not have written if it was lost, and any before them that
        # could not be written.
        self._rows: list[Row] = []
        self._last_written = 0
        self._is_open = False

    @abstractmethod
    def open(self, trainer: Trainer, *, keep: float) -> int:
        """Open the log for a run that starts or resumes.

        Args:
            trainer: The trainer, before its next update.
            keep: The last update whose entry is kept, if there is a log: 0 to start a new one, infinity to keep all.

        Returns:
            The last update that is in the log; 0 if there is none.
        """

    @abstractmethod
    def configure(self, config: Mapping[str, Any]) -> None:
        """Write the configuration of the run.

        Args:
            config: ``"hyperparameters"``, ``"recipe"`` and ``"program"``, JSON values by name, and
                ``"recipe_digest"``.
        """

    @abstractmethod
    def write(self, update: int, values: Mapping[str, float]) -> None:
        """Write the entry of an update; it is called with ascending updates.

        Args:
            update: The number of the update.
            values: The values by name, among them ``"epoch"``.
        """

    @abstractmethod
    def summarize(self, summary: Mapping[str, Any]) -> None:
        """Write the result of a run that has ended without an error.

        Args:
            summary: ``"update"``, the number of updates, and ``"digest"``, the digest of each model by name.
        """

    @abstractmethod
    def close(self, *, failed: bool) -> None:
        """Write what is still in memory, and close the log.

        Args:
            failed: Whether the run ends with an error.
        """

    def flush(self) -> None:
        """Write what is still in memory; does nothing by default."""

    def begin(self, trainer: Trainer) -> None:
        """Open the log, and write the configuration if it is new."""
        if not trainer.is_main:
            return
        kept = last_kept(trainer)
        saved, self._last_written = self._last_written, self.open(trainer, keep=kept)
        if kept == math.inf and self._last_written < saved:
            warn(
                f"The log of {type(self).__name__} must have the entries up to update {saved}, but it ends at "
                f"{self._last_written}: it was removed or is damaged. It lacks what is not logged again.",
                SideFileWarning,
            )
        self._is_open = True
        if not self._last_written or math.isfinite(kept):
            self._attempt(self.configure, _configuration(trainer, self.hyperparameters))
        if not kept:
            self._rows.clear()
        self._write_rows()

    def collect(self, trainer: Trainer) -> None:
        """Add the observation of one update to the means; nothing is read from the device."""
        self._means.update(trainer.observation, self.keys)
        at = (trainer.updater.iteration, trainer.updater.epoch_detail)
        self._observed_at.update(dict.fromkeys(trainer.observation, at))

    def __call__(self, trainer: Trainer) -> None:
        """End the interval, and write its entries."""
        self._unobserved.check(trainer, trainer.observation)
        # Before anything is written: if this ends the run and you continue it, the entry is written then.
        trainer.updater.last_skipped()
        self._end_interval()
        self._means.clear()
        self._observed_at.clear()

    def finalize(self, trainer: Trainer) -> None:
        """Write the rest of the interval and the summary, unless the run ended with an error, and close the log."""
        if not self._is_open:
            return
        self._unobserved.check(trainer, trainer.observation, at_end=True)
        try:
            # After an error, the interval may still continue.
            if trainer.error is None:
                self._end_interval()
                models = trainer.updater.get_all_models()
                digests = {name: digest(model) for name, model in models.items()}
                self._attempt(self.summarize, {"update": trainer.updater.iteration, "digest": digests})
        finally:
            self._is_open = False
            self._attempt(self.close, failed=trainer.error is not None)

    def state_dict(self) -> dict[str, object]:
        """Return the means of the current interval and the last entries; what was written before is flushed."""
        # A run that resumes from this state does not repeat the updates before it: they must survive a kill.
        if self._is_open:
            self._attempt(self.flush)
        observed_at = {name: list(at) for name, at in self._observed_at.items()}
        rows = [[update, dict(values)] for update, values in self._rows]
        means, written = self._means.state_dict(), self._last_written
        return {"means": means, "observed_at": observed_at, "rows": rows, "written": written}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state, also one of an earlier version, which has no entries and not the last update written."""
        state = {"rows": [], "written": 0, **state}
        check_keys(state, ("means", "observed_at", "rows", "written"), of=type(self).__name__)
        rows = [(int(update), dict(values)) for update, values in state["rows"]]
        observed_at = {name: (int(update), float(epoch)) for name, (update, epoch) in state["observed_at"].items()}
        written = int(state["written"])
        self._means.load_state_dict(state["means"])
        self._observed_at, self._rows, self._last_written = observed_at, rows, written

    def _end_interval(self) -> None:
        """Write the means, each at the update at which its value was last observed."""
        entries: dict[tuple[int, float], dict[str, float]] = {}
        for name, value in self._means.compute().items():
            entries.setdefault(self._observed_at[name], {})[name] = value
        unwritten = [row for row in self._rows if self._is_open and row[0] > self._last_written]
        rows = sorted(entries.items(), key=lambda entry: entry[0])
        self._rows = [*unwritten, *((update, {EPOCH: epoch, **values}) for (update, epoch), values in rows)]
        if self._is_open:
            self._write_rows()

    def _write_rows(self) -> None:
        """Write the entries up to one that cannot be written."""
        for update, values in self._rows:
            # Up to there the log was written before the run was resumed, with equal values.
            if update > self._last_written:
                if not self._attempt(self.write, update, values):
                    return
                self._last_written = update

    def _attempt(self, call: Callable[..., None], *args: Any, **options: Any) -> bool:
        """Write something, and return whether it could be written."""
        try:
            call(*args, **options)
        except OSError as error:
            report_unwritten(f"The log of {type(self).__name__}", error, required=self.required)
            return False
        return True


def last_kept(trainer: Trainer) -> float:
    """Return the last update of an earlier log in the folder that belongs to this run; infinity if all do, 0 if none.

    Args:
        trainer: The trainer, before its next update.
    """
    resumption, update = trainer.resumption, trainer.updater.iteration
    if update == 0:
        return 0
    # A run that continues in the process that began it has written all of the log by itself.
    if resumption is None or resumption.update != update:
        return math.inf
    if not resumption.same_run:
        return 0
    return math.inf if resumption.same_kernels and not resumption.accepted else update


def _configuration(trainer: Trainer, hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a run as JSON values."""
    given = {
        name: value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in hyperparameters.items()
    }
    return {"hyperparameters": given, **recipe_of(trainer.updater), PROGRAM: describe_program()}


def recipe_of(updater: Updater) -> dict[str, Any]:
    """Return the recipe of a run (`Updater.recipe_fields`) under ``"recipe"``, and its SHA-256 beside it.

    Args:
        updater: The updater of the run.
    """
    recipe = updater.recipe_fields()
    text = json.dumps(recipe, sort_keys=True, separators=(",", ":"))
    return {"recipe": recipe, "recipe_digest": hashlib.sha256(text.encode()).hexdigest()}
