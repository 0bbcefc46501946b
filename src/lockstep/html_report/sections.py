"""The tables of a page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, Final

from lockstep.html_report.log import Series
from lockstep.html_report.markup import Markup, element, joined, table
from lockstep.html_report.run import RunData

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


def values_table(runs: Sequence[RunData]) -> Markup:
    """Return the first, smallest, largest and last value of each name."""
    rows: list[list[object]] = []
    for run in runs:
        for name, series in (run.log.series if run.log is not None else {}).items():
            rows.append([name, *([run.name] if len(runs) > 1 else []), *_summary(series)])
    rows.sort(key=lambda row: str(row[0]))
    run_column = ["run"] if len(runs) > 1 else []
    header = ["value", *run_column, "first", "smallest", "largest", "last", "not finite"]
    first_number = 1 + len(run_column)
    return table(header, rows, caption="Logged values", numbers=frozenset(range(first_number, len(header))))


def _summary(series: Series) -> list[object]:
    finite = [value for value in series.values if value - value == 0]
    extremes = [number(min(finite)), number(max(finite))] if finite else [ABSENT, ABSENT]
    return [
        number(series.values[0]),
        *extremes,
        number(series.values[-1]),
        str(len(series.values) - len(finite)),
    ]


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
        differs = len(set(texts)) > 1 and all(found)
        rows.append([name, *([element("mark", text) if differs else text for text in texts])])
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
        cells = [digest_cell(digest) if digest else ABSENT for digest in found]
        same = []
        if len(runs) > 1:
            both = all(found)
            equal = len(set(found)) == 1
            same = [("equal" if equal else element("mark", "different")) if both else ABSENT]
        rows.append([f"{update}", *cells, *same])
    left_out = len(updates) - len(rows)
    note = element("p", f"The last {len(rows)} of {len(updates)} updates are listed.") if left_out else ""
    header = ["update", *_columns(runs, "digest"), *(["comparison"] if len(runs) > 1 else [])]
    return joined(table(header, rows, caption="Digests of the training state"), note)


def snapshots_table(runs: Sequence[RunData]) -> Markup:
    """Return the snapshots of all runs."""
    rows: list[list[object]] = []
    for run in runs:
        for found in run.snapshots:
            first = [found.path.name, *([run.name] if len(runs) > 1 else [])]
            if found.manifest is None:
                rows.append([*first, ABSENT, ABSENT, ABSENT, ABSENT, element("mark", f"damaged: {found.error}")])
                continue
            manifest = found.manifest
            size = manifest.bytes
            written = datetime.fromtimestamp(found.path.stat().st_mtime, tz=timezone.utc)
            values = [f"{name} = {number(value)}" for name, value in manifest.metrics.items()]
            rows.append(
                [
                    *first,
                    _text(manifest.progress.get("epoch")),
                    f"{size / 1e6:.1f}",
                    f"{written:%Y-%m-%d %H:%M:%S}",
                    digest_cell(manifest.training),
                    ", ".join([*manifest.reasons, *values]),
                ]
            )
    run_column = ["run"] if len(runs) > 1 else []
    header = ["update", *run_column, "epoch", "MB", "written (UTC)", "digest", "why"]
    return table(header, rows, caption="Snapshots", numbers=frozenset({len(run_column) + 1, len(run_column) + 2}))


def sessions_table(runs: Sequence[RunData]) -> Markup:
    """Return where and when each run was started or resumed, and how it ended."""
    rows: list[list[object]] = []
    for run in runs:
        for session in run.sessions:
            end = session.end
            how = "ended" if "digests" in end else end.get("error", "killed, or has not ended")
            devices = "; ".join(f"{host}: {', '.join(names)}" for host, names in session.ranks)
            rows.append(
                [
                    session.time,
                    *([run.name] if len(runs) > 1 else []),
                    f"{session.update} to {end.get('update', '?')}",
                    f"{devices} ({len(session.ranks)} ranks)" if len(session.ranks) > 1 else devices,
                    session.versions,
                    session.resumed_from or ABSENT,
                    how,
                ]
            )
    header = ["started (UTC)", *(["run"] if len(runs) > 1 else []), "updates"]
    header += ["devices", "versions", "resumed from", "end"]
    return table(header, rows, caption="Starts and resumes")
