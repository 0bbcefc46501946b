"""Write the report of a run as one HTML page that opens without a network."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from importlib import resources
from string import Template
from typing import Any, Final

from lockstep._version import __version__
from lockstep.html_report.charts import RATE, Charts, choose_charts
from lockstep.html_report.log import first_difference
from lockstep.html_report.markup import Markup, element, folded, joined, script_data
from lockstep.html_report.run import RunData
from lockstep.html_report.sections import (
    digests_table,
    fields_table,
    number,
    sessions_table,
    snapshots_table,
    times_section,
    values_table,
)
from lockstep.snapshots import compare_runs

IN_MINUTES: Final = 120
"""The seconds from which a duration is given in minutes."""
LISTED: Final = 6
"""The number of names that a sentence lists."""
HINT: Final = (
    "Drag to zoom in, double-click to zoom out. With the keyboard: arrow keys move the cursor, + and - zoom, Shift and "
    "the arrow keys move the section, 0 shows all, L switches to a logarithmic axis. All charts show the same section."
)


def render(run: RunData, other: RunData | None = None) -> str:
    """Return the report of a run as HTML.

    Args:
        run: The run.
        other: Another run to compare it with.
    """
    runs = [run] if other is None else [run, other]
    if other is not None and run.name == other.name:
        run, other = runs = [replace(each, name=str(each.path)) for each in runs]
    charts = choose_charts(runs)
    comparison, first = (Markup(), None) if other is None else _comparison(run, other)
    folders = " and ".join(str(run.path) for run in runs)
    header = [_written(f"{folders}, read"), *(_figures(each, runs) for each in runs), comparison]
    title = " and ".join(each.name for each in runs)
    return page(title, header, _sections(runs, charts), {"runs": charts.runs, "first": first})


def render_checks(subject: str, passed: bool, result: str, tables: Sequence[Markup], notes: Sequence[str]) -> str:
    """Return a page about what was checked.

    Args:
        subject: What was checked, such as the command that ran.
        passed: Whether nothing was found.
        result: The result in one sentence.
        tables: What was checked, with the result of each.
        notes: What else is to be said, in paragraphs.
    """
    kind = "equal" if passed else "different"
    banner = element("section", element("p", element("strong", result)), class_=f"banner {kind}", aria_label="Result")
    paragraphs = (element("p", note) for note in notes)
    main = [*tables, element("section", *paragraphs) if notes else Markup()]
    return page(subject, [_written("Run"), banner], main, {"runs": [], "first": None})


def page(title: str, header: Sequence[Markup], main: Sequence[Markup], data: Mapping[str, Any]) -> str:
    """Return a page that opens without a network.

    Args:
        title: Its title.
        header: What follows the title.
        main: Its sections.
        data: What the charts show.
    """
    assets = resources.files("lockstep.html_report").joinpath("assets")
    text, style, script = (assets.joinpath(name).read_text("utf-8") for name in ("page.html", "page.css", "page.js"))
    return Template(text).substitute(
        # What is not named is refused: nothing is loaded, and no script runs but the one of this page.
        policy=f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}",
        title=joined(title),
        style=style,
        header=element("header", element("h1", title), *header),
        main=element("main", *main),
        data=script_data(data),
        script=script,
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _written(what: str) -> Markup:
    now = datetime.now(timezone.utc)
    return element("p", f"{what} on {now:%Y-%m-%d %H:%M} UTC by lockstep {__version__}", class_="quiet")


def _figures(run: RunData, runs: Sequence[RunData]) -> Markup:
    """Return the most important numbers of a run."""
    figures: dict[str, object] = {}
    if run.log is not None and run.log.num_entries:
        figures["updates"] = f"{run.log.times.updates[-1]:.0f}"
        figures["epochs"] = number(run.log.epochs.values[-1])
        figures["time"] = _duration(run.log.times.values[-1])
        for name in [each for each in run.log.series if each.endswith(("loss", "accuracy"))][:4]:
            figures[name] = number(run.log.series[name].values[-1])
    if run.final_intervals:
        figures["retries"] = sum(each.retries for each in run.final_intervals)
        figures["loss scale"] = number(run.final_intervals[-1].loss_scale)
    figures["snapshots"] = len(run.snapshots)
    if run.digests:
        update, digest = list(run.digests.items())[-1]
        figures[f"digest of update {update}"] = element("code", digest[:12], title=digest)
    tiles = joined(*(element("div", element("dt", name), element("dd", value)) for name, value in figures.items()))
    position = runs.index(run) + 1
    label = element("p", element("span", "", class_=f"swatch r{position}"), run.name) if len(runs) > 1 else ""
    return element("section", label, element("dl", tiles, class_="figures"), aria_label=f"Figures of {run.name}")


def _duration(seconds: float) -> str:
    """Return a duration as people say it.

    >>> _duration(28.04), _duration(3725.0), _duration(float("nan"))
    ('28.0 s', '1 h 2 min', 'nan s')
    """
    if not IN_MINUTES <= seconds < math.inf:
        return f"{seconds:.1f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def _comparison(run: RunData, other: RunData) -> tuple[Markup, float | None]:
    """Return what compares two runs, and the first update that is known to differ."""
    found = compare_runs(run.path, other.path)
    logged = None if run.log is None or other.log is None else first_difference(run.log, other.log)
    missing = "The runs have logged no digest of an update in common."
    lines: list[object] = [element("strong", found.result(LISTED) if found.common else missing)]
    if run.log is not None and other.log is not None:
        lines.append(
            "The values that both logs have are equal."
            if logged is None
            else f"The logs first differ in the entry of update {logged[0]:.0f}: {found.listed(logged[1], LISTED)}."
        )
    for what, one, two in (
        ("recipe", run.recipe, other.recipe),
        ("kernel class", run.kernel_class, other.kernel_class),
    ):
        names = [name for name in {**one, **two} if one.get(name) != two.get(name)]
        known = f"differs in {found.listed(names, LISTED)}" if names else "is the same"
        lines.append(f"The {what} {known if one and two else 'is not known of both runs'}.")
    firsts = [each for each in (found.first, None if logged is None else logged[0]) if each is not None]
    kind = "different" if firsts else "equal" if found.common else "unknown"
    banner = element(
        "section", *(element("p", line) for line in lines), class_=f"banner {kind}", aria_label="Comparison"
    )
    return banner, min(firsts, default=None)


def _sections(runs: Sequence[RunData], charts: Charts) -> list[Markup]:
    """Return all sections. The last one names those without content, with what would record it."""
    thinned = (
        f" Logs of many entries are thinned out: of each of {charts.bins} equal sections of the updates, the chart has "
        "the smallest and the largest value. The table has all values."
        if charts.bins
        else ""
    )
    curves = joined(_charts(charts.curves), folded("Values as a table", values_table(runs)))
    # What does not change is in the text.
    scaling = _charts(charts.scaling) if charts.scaling or any(run.final_intervals for run in runs) else None
    constant = f"Throughout: {'; '.join(charts.constant)}." if charts.constant else ""
    rates = FROM_LOG if any(title == RATE for title, _ in charts.throughput) else ""
    recipe = _fields(runs, [each.recipe for each in runs], "Recipe")
    kernels = _fields(runs, [each.kernel_class for each in runs], "Kernel class")
    contents: list[tuple[str, str, Markup | None, str]] = [
        ("Curves", HINT + thinned, curves if charts.curves else None, "LogReport"),
        ("Loss scale and retries", constant, scaling, "RunRecord"),
        ("Time", TIME, times_section(runs) or None, "RunRecord"),
        ("Throughput", rates, _charts(charts.throughput) or None, "Throughput"),
        ("Digests", "", digests_table(runs) or None, "Snapshot"),
        ("Snapshots", "", snapshots_table(runs) or None, "Snapshot"),
        ("Recipe", RECIPE, recipe, "RunRecord or Snapshot"),
        ("Kernel class", KERNELS, kernels, "RunRecord or Snapshot"),
        ("Starts and resumes", "", sessions_table(runs) or None, "RunRecord"),
    ]
    shown = [
        element("section", element("h2", title), element("p", text, class_="quiet") if text else "", content)
        for title, text, content, _ in contents
        if content is not None
    ]
    lines = [
        f"{title}: not recorded. Add lockstep.extensions.{extension} to the trainer."
        for title, _, content, extension in contents
        if content is None
    ]
    lines += [
        f"{run.name}: {run.log.unreadable} lines of the log are no entries and were left out."
        for run in runs
        if run.log is not None and run.log.unreadable
    ]
    if lines:
        items = joined(*(element("li", line) for line in lines))
        shown.append(element("section", element("h2", "Not on this page"), element("ul", items)))
    return shown


TIME: Final = (
    "The mean over the updates that were measured, in the last start or resume of the run. On accelerators, an update "
    "that is measured waits for the device at the end of each phase."
)
RECIPE: Final = "The result depends on these fields. The tensors of the model are at the end."
FROM_LOG: Final = "From the times in the log. Samples or tokens per second need the extension Throughput."
KERNELS: Final = "Equal bits need equal kernels: these properties must be equal on all ranks."


def _charts(charts: Sequence[tuple[str, Sequence[str]]]) -> Markup:
    """Return a place for each chart, which the script fills."""
    if not charts:
        return Markup()
    boxes = (
        element("figure", element("h3", title), class_="chart", data_names=script_data(list(names)))
        for title, names in charts
    )
    note = element("noscript", element("p", "The charts need JavaScript, which is part of this page."))
    return joined(note, element("div", *boxes, class_="charts"))


def _fields(runs: Sequence[RunData], found: Sequence[dict[str, Any]], caption: str) -> Markup | None:
    return folded("All fields", fields_table(runs, found, caption=caption)) if any(found) else None
