"""Show where the time of a run went, as bars that need no script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from lockstep.html_report.markup import Markup, element, folded, joined, table
from lockstep.html_report.run import Interval, RunData

WIDTH: Final = 1000
"""The width of a bar in the units of its picture, which is stretched to the page."""
HEIGHT: Final = 18
IDLE: Final = "waiting"
DEVICE_PHASES: Final = ("forward", "backward", IDLE)
MS: Final = 1000


def times_section(runs: Sequence[RunData]) -> Markup:
    """Return bars and a table of the mean time per update, by phase for each rank and each device."""
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


def _per_update(phases: Sequence[Mapping[str, float]], intervals: Sequence[Interval]) -> dict[str, float]:
    """Return the mean seconds per update that was measured."""
    count = sum(each.measured for each in intervals)
    names = dict.fromkeys(name for each in phases for name in each)
    return {name: sum(each.get(name, 0.0) for each in phases) / count for name in names}


def _bars(rows: Sequence[tuple[str, dict[str, float]]], caption: str) -> Markup:
    """Return a legend, a bar per row on one scale, and the same numbers as a table."""
    names = list(dict.fromkeys(name for _, phases in rows for name in phases))
    longest = max(sum(phases.values()) for _, phases in rows) or 1.0
    legend = joined(
        *(element("li", element("span", "", class_=f"swatch f{_colour(names, name)}"), name) for name in names)
    )
    figures = joined(*(_bar(label, phases, names, longest) for label, phases in rows))
    cells: list[list[object]] = [
        [label, *(f"{each * MS:.3f}" for each in [*(phases.get(name, 0.0) for name in names), sum(phases.values())])]
        for label, phases in rows
    ]
    header = ["", *(f"{name}, ms" for name in names), "sum, ms"]
    numbers = table(header, cells, caption=caption, numbers=frozenset(range(1, len(header))))
    return joined(element("ul", legend, class_="legend"), figures, folded("As a table", numbers))


def _bar(label: str, phases: Mapping[str, float], names: Sequence[str], longest: float) -> Markup:
    total = sum(phases.values())
    pieces: list[Markup] = []
    start = 0.0
    for name in names:
        width = phases.get(name, 0.0) / longest * WIDTH
        if width > 0:
            share = f"{name}: {phases[name] * MS:.3f} ms, {phases[name] / total:.1%}"
            # A gap of 2 separates neighbours without a line.
            shape = {"x": f"{start:.2f}", "y": 0, "width": f"{max(width - 2, 0.5):.2f}", "height": HEIGHT}
            mark = element("rect", **shape, class_=f"f{_colour(names, name)}")
            pieces.append(element("g", element("title", share), mark))
        start += width
    shares = ", ".join(f"{name} {phases.get(name, 0.0) / (total or 1):.0%}" for name in names)
    picture = element(
        "svg",
        *pieces,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"{label}: {shares}",
    )
    head = element("figcaption", label, element("span", f"{total * MS:.2f} ms per update", class_="quiet"))
    return element("figure", head, picture, element("p", shares, class_="quiet"), class_="bar")


def _colour(names: Sequence[str], name: str) -> int:
    """Return the number of the colour of a phase; waiting is no work and has the quiet one."""
    return 0 if name in {IDLE, "between updates"} else names.index(name) + 1
