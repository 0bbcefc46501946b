"""The tables of a page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, Final

from lockstep.html_report.log import Series
from lockstep.html_report.markup import Markup, element, joined, table
from lockstep.html_report.run import RecordedInterval, RunData, Session
from lockstep.snapshots import Found

SHOWN_DIGEST: Final = 16
"""The number of hexadecimal digits of a digest that a table shows; the rest is its title."""
LISTED_DIGESTS: Final = 400
"""The number of updates whose digests are listed; those of more are in the log of digests."""
ABSENT: Final = "—"


def number(value: float) -> str:
    """Return a number with up to 6 significant digits.

    >>> number(0.123456789), number(1257.0), number(1e-7), number(float("nan"))
    ('0.123457', '1257', '1e-07', 'nan')
    """
    return f"{value:.6g}"


def digest_cell(digest: str) -> Markup:
    """Return a digest, shortened, with all of it as its title."""
    return element("code", digest[:SHOWN_DIGEST], title=digest)


def _listed(
    runs: Sequence[RunData],
    header: list[str],
    rows: Sequence[tuple[RunData, list[object]]],
    *,
    caption: str,
    numbers: Sequence[int] = (),
) -> Markup:
    """Return a table whose rows belong to one run each, which the second column names if there are several.

    Without rows, it is empty markup.
    """
    if not rows:
        return Markup()
    named = [[run.name] if len(runs) > 1 else [] for run, _ in rows]
    cells = [[first, *name, *others] for name, (_, (first, *others)) in zip(named, rows, strict=True)]
    columns = ["run"] if len(runs) > 1 else []
    aligned = frozenset(column + len(columns) for column in numbers)
    return table([header[0], *columns, *header[1:]], cells, caption=caption, numbers=aligned)


def values_table(runs: Sequence[RunData]) -> Markup:
    """Return the first, smallest, largest and last value of each name."""
    rows = [
        (run, [name, *_summary(series)])
        for run in runs
        if run.log is not None
        for name, series in run.log.series.items()
    ]
    rows.sort(key=lambda row: str(row[1][0]))
    header = ["value", "first", "smallest", "largest", "last", "not finite"]
    return _listed(runs, header, rows, caption="Logged values", numbers=range(1, len(header)))


def _summary(series: Series) -> list[object]:
    values = series.values
    finite = [value for value in values if value - value == 0]
    extremes = [number(min(finite)), number(max(finite))] if finite else [ABSENT, ABSENT]
    return [number(values[0]), *extremes, number(values[-1]), f"{len(values) - len(finite)}"]


def fields_table(runs: Sequence[RunData], found: Sequence[Mapping[str, Any]], *, caption: str) -> Markup:
    """Return fields by name, one column per run; rows that differ are marked.

    Args:
        runs: The runs.
        found: The fields of each run; empty if they are unknown.
        caption: What the fields are.
    """
    names = list(dict.fromkeys(name for fields in found for name in fields))
    rows: list[list[object]] = []
    for name in names:
        texts = [_text(fields[name]) if name in fields else ABSENT for fields in found]
        rows.append([name, *(element("mark", text) if len(set(texts)) > 1 and all(found) else text for text in texts)])
    return table(["field", *_columns(runs, "value")], rows, caption=caption)


def _columns(runs: Sequence[RunData], alone: str) -> list[str]:
    """Return the headings of one column per run."""
    return [run.name for run in runs] if len(runs) > 1 else [alone]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def digests_table(runs: Sequence[RunData]) -> Markup:
    """Return the digests of the training state, one column per run."""
    updates = sorted({update for run in runs for update in run.digests})
    rows: list[list[object]] = []
    for update in updates[-LISTED_DIGESTS:]:
        found = [run.digests.get(update, "") for run in runs]
        row: list[object] = [f"{update}", *(digest_cell(digest) if digest else ABSENT for digest in found)]
        if len(runs) > 1:
            compared = "equal" if len(set(found)) == 1 else element("mark", "different")
            row.append(compared if all(found) else ABSENT)
        rows.append(row)
    if not rows:
        return Markup()
    note = element("p", f"The last {len(rows)} of {len(updates)} updates are listed.")
    header = ["update", *_columns(runs, "digest"), *(["comparison"] if len(runs) > 1 else [])]
    return joined(
        table(header, rows, caption="Digests of the training state"), note if len(rows) < len(updates) else ""
    )


def snapshots_table(runs: Sequence[RunData]) -> Markup:
    """Return the snapshots of all runs."""
    header = ["update", "epoch", "MB", "written (UTC)", "digest", "why"]
    rows = [(run, _snapshot_row(found)) for run in runs for found in run.snapshots]
    return _listed(runs, header, rows, caption="Snapshots", numbers=(1, 2))


def _snapshot_row(found: Found) -> list[object]:
    if found.manifest is None:
        return [found.path.name, *[ABSENT] * 4, element("mark", f"damaged: {found.error}")]
    manifest = found.manifest
    written = datetime.fromtimestamp(found.path.stat().st_mtime, tz=timezone.utc)
    return [
        found.path.name,
        _text(manifest.progress.get("epoch")),
        f"{manifest.bytes / 1e6:.1f}",
        f"{written:%Y-%m-%d %H:%M:%S}",
        digest_cell(manifest.training),
        ", ".join([*manifest.reasons, *(f"{name} = {number(each)}" for name, each in manifest.metrics.items())]),
    ]


def sessions_table(runs: Sequence[RunData]) -> Markup:
    """Return where and when each run was started or resumed, and how it ended."""
    header = ["started (UTC)", "updates", "devices", "versions", "resumed from", "end"]
    rows = [(run, _session_row(session)) for run in runs for session in run.sessions]
    return _listed(runs, header, rows, caption="Starts and resumes")


def _session_row(session: Session) -> list[object]:
    end = session.end
    devices = "; ".join(f"{host}: {', '.join(names)}" for host, names in session.ranks)
    return [
        session.time,
        f"{session.update} to {end.get('update', '?')}",
        f"{devices} ({len(session.ranks)} ranks)" if len(session.ranks) > 1 else devices,
        session.versions,
        session.resumed_from or ABSENT,
        "ended" if "digests" in end else end.get("error", "killed, or has not ended"),
    ]


IDLE: Final = "waiting"
MS: Final = 1000


def times_section(runs: Sequence[RunData]) -> Markup:
    """Return tables with bars of the mean time per update, by phase for each rank and each device."""
    ranks: list[tuple[str, dict[str, float]]] = []
    devices: list[tuple[str, dict[str, float]]] = []
    for run in runs:
        prefix = f"{run.name}, " if len(runs) > 1 else ""
        # Ranks and devices may change when a run resumes. Those of the last session are shown.
        session = next((each for each in reversed(run.sessions) if each.intervals), None)
        if session is None:
            continue
        intervals = [each for each in session.intervals if each.measured]
        num_ranks = min((len(each.seconds) for each in intervals), default=0)
        for rank in range(num_ranks):
            label = f"{prefix}rank {rank}"
            ranks.append((label, _per_update([each.seconds[rank] for each in intervals], intervals)))
            names = dict(enumerate(session.ranks[rank][1])) if rank < len(session.ranks) else {}
            for index in range(min(len(each.devices[rank]) for each in intervals)):
                phases = _per_update([each.devices[rank][index] for each in intervals], intervals)
                idle = max(0.0, ranks[-1][1].get("compute", 0.0) - sum(phases.values()))
                devices.append((f"{label}, device {index}: {names.get(index, '?')}", {**phases, IDLE: idle}))
    if not ranks:
        return Markup()
    return joined(
        element("h3", "Phases of an update"),
        _bars(ranks, "Mean time per update by phase"),
        element("h3", "Devices while they compute"),
        _bars(devices, "Mean time per update by device"),
    )


def _per_update(phases: Sequence[Mapping[str, float]], intervals: Sequence[RecordedInterval]) -> dict[str, float]:
    """Return the mean seconds per update that was measured."""
    count = sum(each.measured for each in intervals)
    names = dict.fromkeys(name for each in phases for name in each)
    return {name: sum(each.get(name, 0.0) for each in phases) / count for name in names}


def _bars(rows: Sequence[tuple[str, dict[str, float]]], caption: str) -> Markup:
    """Return a table with a bar and a number for each phase of each row, all on one scale."""
    names = list(dict.fromkeys(name for _, phases in rows for name in phases))
    longest = max((seconds for _, phases in rows for seconds in phases.values()), default=0.0) or 1.0
    cells: list[list[object]] = [
        [
            label,
            *(_bar(phases.get(name, 0.0), sum(phases.values()), longest) for name in names),
            f"{sum(phases.values()) * MS:.3f}",
        ]
        for label, phases in rows
    ]
    header = ["", *(f"{name}, ms" for name in names), "sum, ms"]
    return table(header, cells, caption=caption, numbers=frozenset(range(1, len(header))))


def _bar(seconds: float, total: float, longest: float) -> Markup:
    """Return a time in milliseconds, with a bar and its share in the total as the title of that."""
    share = f"{seconds / (total or 1):.1%}"
    return joined(f"{seconds * MS:.3f} ", element("meter", share, value=f"{seconds / longest:.4f}", title=share))
