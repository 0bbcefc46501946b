"""The page of a run has everything that the run has left, escapes all of it, and loads nothing."""

from __future__ import annotations

import html.parser
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli import main
from lockstep.html_report import read_run, render
from lockstep.html_report.charts import choose_charts
from tests.support.recorded import recorded_run

SECTIONS = [
    "Curves",
    "Loss scale and retries",
    "Time",
    "Throughput",
    "Digests",
    "Snapshots",
    "Recipe",
    "Kernel class",
    "Starts and resumes",
]
NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"


class Reader(html.parser.HTMLParser):
    """Reads a page: its elements with attributes, and the text of each kind of element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag != "meta":
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self._open[-1] if self._open else "", []).append(data)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    folder = tmp_path_factory.mktemp("runs")
    names = ("first", "same", "other")
    for name, options in zip(names, ({}, {"devices": ["cpu"]}, {"lr": 0.125}), strict=True):
        recorded_run(folder / name, **options)  # type: ignore[arg-type]
    return folder / "first", folder / "same", folder / "other"


def page(*paths: Path) -> Reader:
    return Reader(render(*map(read_run, paths)))


def data_of(reader: Reader) -> dict[str, Any]:
    return dict(json.loads(reader.texts["script"][0]))


def test_all_sections_of_a_run(runs: tuple[Path, ...]) -> None:
    reader = page(runs[0])
    assert reader.texts["h2"] == SECTIONS
    (run,) = data_of(reader)["runs"]
    assert run["series"]["main/loss"]["x"] == [1, 2, 3, 4, 5, 6]
    assert run["series"]["retries"] == {"x": [2, 4, 6], "y": [0.0, 0.0, 0.0]}
    assert run["positions"]["epoch"][0] == [1, 2, 3, 4, 5, 6]
    assert "Throughout: main/skipped: 0; loss scale: 1; retries: 0." in reader.texts["p"]
    assert "rank 0, device 1: cpu" in reader.texts["th"]
    assert {"optimizer.lr", "num_shards", "processor", "00000006"} <= set(reader.texts["th"])


def test_charts_share_the_last_part_of_names(runs: tuple[Path, ...]) -> None:
    charts = choose_charts([read_run(runs[0])])
    assert charts.curves == [("loss", ["main/loss"]), ("lr", ["lr"])]
    assert [title for title, _ in charts.throughput] == [
        "throughput/updates",
        "throughput/samples",
        "throughput/memory/cpu",
        "load",
    ]
    assert charts.throughput[-1][1] == [
        f"throughput/load/device{index}" for index in range(len(charts.throughput[-1][1]))
    ]
    assert charts.bins is None


def test_equal_runs_are_said_to_be_equal(runs: tuple[Path, ...]) -> None:
    reader = page(runs[0], runs[1])
    assert data_of(reader)["first"] is None
    assert reader.texts["strong"] == ["Equal: all 6 updates that both runs have logged, 1 to 6."]
    assert {"The values that both logs have are equal.", "The recipe is the same."} <= set(reader.texts["p"])
    assert "mark" not in reader.texts


def test_the_first_update_that_differs_is_marked(runs: tuple[Path, ...]) -> None:
    reader = page(runs[0], runs[2])
    assert data_of(reader)["first"] == 1
    assert reader.texts["strong"][0].startswith("Different: update 1 is the first to differ, of 6 updates")
    assert "The recipe differs in optimizer.lr." in reader.texts["p"]
    assert "The logs first differ in the entry of update 1: lr." in reader.texts["p"]
    assert reader.texts["mark"].count("different") == 6
    assert {"0.25", "0.125"} <= set(reader.texts["mark"])


def test_what_was_not_recorded_is_named_with_its_extension(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"iteration": 1, "loss": 2.0}\n{"iteration": 2}\n{"iter')
    reader = page(tmp_path)
    assert reader.texts["h2"] == ["Curves", "Not on this page"]
    listed = {line.partition(":")[0]: line for line in reader.texts["li"]}
    assert set(SECTIONS) - {"Curves"} <= set(listed)
    assert "lockstep.extensions.RunRecord" in listed["Time"]
    assert "1 lines of the log are no entries" in listed[tmp_path.name]


def write_nasty(out: Path) -> None:
    """Write the files of a run in which every text and number is a trap."""
    values = {NASTY: 1.0, f"{NASTY}/loss": "nan", "loss": "-inf", "accuracy": math.pi}
    entry = {"iteration": 1, "epoch_detail": "nan", "elapsed_time": "inf", **values}
    rank = {"host": NASTY, "devices": [NASTY]}
    about = {"lockstep": NASTY, "torch": NASTY, "python": NASTY, "time": NASTY, "update": 0, "resumed_from": NASTY}
    conditions = {"recipe": {NASTY: NASTY, "n": {"x": [NASTY]}}, "kernel_class": {NASTY: NASTY}}
    times = {"seconds": {NASTY: 1.0}, "devices": [{NASTY: 0.5}]}
    counts = {"update": 1, "loss_scale": 1.0, "retries": 0, "applied": 1, "measured": 1}
    lines: list[Any] = [
        {"session": {**about, **conditions, "ranks": [rank]}},
        {"interval": {**counts, "ranks": [times]}},
        {"interval": {**counts, "ranks": NASTY}},
        {"end": {"error": NASTY, "update": NASTY}},
        {"session": NASTY},
        [NASTY],
    ]
    (out / "log.jsonl").write_text(json.dumps(entry) + "\n")
    (out / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    record = {"update": 1, "digest": NASTY, "tensors": NASTY[:8]}
    (out / "digests.jsonl").write_text(
        f"{json.dumps({'conditions': NASTY, 'tensors': [NASTY]})}\n{json.dumps(record)}\n"
    )
    (out / "snapshots" / "00000001").mkdir(parents=True)
    (out / "snapshots" / "00000001" / "manifest.json").write_text(NASTY)


def test_everything_in_the_files_is_harmless(tmp_path: Path) -> None:
    write_nasty(tmp_path)
    text = render(read_run(tmp_path), read_run(tmp_path))
    reader = Reader(text)
    tags = [tag for tag, _ in reader.elements]
    assert tags.count("script") == 2
    assert "img" not in tags
    assert not [name for _, attributes in reader.elements for name in attributes if name.startswith("on")]
    assert text.count("</script>") == 2
    # As text it is all there.
    assert any(NASTY in each for each in reader.texts["th"])
    assert NASTY in data_of(reader)["runs"][0]["series"]
    assert data_of(reader)["runs"][0]["series"]["loss"]["y"] == ["-inf"]


def test_nothing_is_loaded_and_no_other_script_runs(runs: tuple[Path, ...]) -> None:
    reader = page(*runs[:2])
    assert not [each for each in reader.elements if {"src", "href", "style"} & each[1].keys()]
    policy = next(each["content"] for tag, each in reader.elements if tag == "meta" and "http-equiv" in each)
    assert re.fullmatch(r"default-src 'none'; script-src 'sha256-[^' ]+'; style-src 'sha256-[^' ]+'", str(policy))
    assert not re.search(
        r"url\((?!#)|@import|https?:(?!//www\.w3\.org/2000/svg)",
        "".join(reader.texts["style"] + reader.texts["script"]),
    )


def test_logs_of_many_entries_are_thinned_out_and_the_page_says_so(tmp_path: Path) -> None:
    lines = (json.dumps({"iteration": i, "a/loss": math.sin(i), "lr": i == 7000}) for i in range(1, 20_001))
    (tmp_path / "log.jsonl").write_text("\n".join(lines))
    run = read_run(tmp_path)
    charts = choose_charts([run])
    assert charts.bins == 2000
    assert len(charts.runs[0]["series"]["a/loss"]["x"]) <= 4004
    assert 7000 in charts.runs[0]["series"]["lr"]["x"]
    assert "of each of 2000 equal sections of the updates" in render(run)


def test_intervals_that_a_resumed_run_repeats_are_drawn_once(tmp_path: Path) -> None:
    recorded_run(tmp_path, updates=4, trigger=(1, "update"))
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    again = json.loads(lines[0])
    again["session"]["update"] = 2
    (tmp_path / "run.jsonl").write_text("\n".join([*lines, json.dumps(again), lines[3], lines[4]]))
    run = read_run(tmp_path)
    assert [each.update for each in run.final_intervals] == [1, 2, 3, 4]
    assert sum(len(session.intervals) for session in run.sessions) == 6
    assert "killed, or has not ended" in Reader(render(run)).texts["td"]


def test_the_command_writes_the_page(
    runs: tuple[Path, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(runs[0]), "-o", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'page.html'}\n"
    assert Reader((tmp_path / "page.html").read_text()).texts["title"][0] == "first - lockstep report"
    assert main(["report", str(runs[0]), "--compare", str(runs[2])]) == 0
    assert Reader((runs[0] / "report.html").read_text()).texts["h1"] == ["first and other"]


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 1
    assert "has no log.jsonl and no snapshots.\n" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "none"), "-o", str(tmp_path / "page.html")]) == 1
    assert "There is no such folder." in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
