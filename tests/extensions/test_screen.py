"""What appears on the screen: the table and the bar, and how they get along."""

from __future__ import annotations

import io
import os
import re
import sys
import threading
from pathlib import Path
from subprocess import PIPE

import pytest

from lockstep.errors import StateError
from lockstep.extensions import LogReport, PrintReport, ProgressBar
from lockstep.metrics import Mean
from lockstep.trainer import Trainer
from lockstep.triggers import TriggerSpec
from tests.support import zygote
from tests.support.plain_updaters import CountingUpdater


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def train(out: Path, *extensions: object, until: TriggerSpec = (2, "epoch")) -> Trainer:
    losses = [Mean(1.0 / number, 1) for number in range(1, 9)]
    trainer = Trainer(CountingUpdater(2, losses), until, out)
    for extension in extensions:
        trainer.extend(extension)
    trainer.run()
    return trainer


def cells(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_the_table_has_a_line_for_each_entry_in_whatever_order_hung_in(tmp_path: Path) -> None:
    out = io.StringIO()
    with pytest.warns(UserWarning, match="`entries` of PrintReport must name observed values, got 'absent'"):
        train(tmp_path, PrintReport(["epoch", "main/loss", "absent"], out), LogReport())
    assert cells(out.getvalue()) == [["epoch", "main/loss", "absent"], ["1", "0.75"], ["2", "0.291667"]]


def test_the_lines_come_while_the_run_goes_on(tmp_path: Path) -> None:
    out, seen = io.StringIO(), []
    train(tmp_path, LogReport(), PrintReport(None, out), lambda _: seen.append(out.getvalue().count("\n")))
    assert seen == [0, 0, 2, 2]  # it runs before the table, which comes last of the readers


PIPED = """
import sys
from lockstep.extensions import LogReport, PrintReport
from lockstep.trainer import Trainer
from tests.support import zygote
from tests.support.plain_updaters import CountingUpdater

def stop(trainer):
    sys.stderr.write("stopped\\n")
    sys.stdin.readline()

trainer = Trainer(CountingUpdater(2, [1.0] * 4), (2, "epoch"), sys.argv[1])
trainer.extend(LogReport())
trainer.extend(PrintReport(["epoch", "iteration"]))
trainer.extend(stop, trigger=(1, "epoch"), priority=-1)
trainer.run()
"""


def test_lines_and_log_can_be_read_through_a_pipe_while_the_run_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PIPED, str(tmp_path)]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUNBUFFERED": ""}
    seen, logged = "", []
    with zygote.Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, bufsize=0, env=variables) as run:
        assert run.stdin is not None
        assert run.stdout is not None
        assert run.stderr is not None
        os.set_blocking(run.stdout.fileno(), False)
        for _ in range(2):
            said = run.stderr.readline()
            assert said == b"stopped\n", said + run.stderr.read()
            seen += (run.stdout.read() or b"").decode()
            logged.append((cells(seen)[-1:], len((tmp_path / "log.jsonl").read_text().splitlines())))
            run.stdin.write(b"\n")
        assert run.wait() == 0
    assert logged == [([["1", "2"]], 1), ([["2", "4"]], 2)]


def test_columns_are_found_and_a_new_one_brings_a_new_heading(tmp_path: Path) -> None:
    out = io.StringIO()

    def late(trainer: Trainer) -> None:
        if trainer.updater.iteration > 2:
            trainer.observe("a/rather/long/name", 3)

    trainer = Trainer(CountingUpdater(2, [1.0] * 4), (2, "epoch"), tmp_path, extensions=[LogReport()])
    trainer.extend(PrintReport(out=out))
    trainer.extend(late, priority=300)
    trainer.run()
    table = cells(out.getvalue())
    assert table[0] == ["epoch", "iteration", "main/loss", "elapsed_time"]
    assert table[1][:3] == ["1", "2", "1"]
    assert table[2] == ["epoch", "iteration", "main/loss", "a/rather/long/name", "elapsed_time"]
    assert table[3][:4] == ["2", "4", "1", "3"]
    heading, line = out.getvalue().splitlines()[2:]
    assert heading.index("a/rather") == line.index("3", line.index("1"))  # columns stand below their names


def test_standard_output_is_taken_when_there_is_something_to_print(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, LogReport(), PrintReport(["epoch"]))
    assert cells(capsys.readouterr().out) == [["epoch"], ["1"], ["2"]]


def test_a_resumed_run_prints_each_entry_once(tmp_path: Path) -> None:
    def build(until: int, out: io.StringIO) -> Trainer:
        extensions = [LogReport(), PrintReport(["iteration"], out)]
        return Trainer(CountingUpdater(2), (until, "iteration"), tmp_path, extensions=extensions)

    before, after = io.StringIO(), io.StringIO()
    first, resumed = build(4, before), build(8, after)
    first.run()
    resumed.load_state_dict(first.state_dict())
    resumed.run()
    assert cells(before.getvalue()) == [["iteration"], ["2"], ["4"]]
    assert cells(after.getvalue()) == [["iteration"], ["6"], ["8"]]


@pytest.mark.parametrize("name", ["LogReport", "PrintReport"])
def test_a_table_without_a_log_is_refused_before_training(tmp_path: Path, name: str) -> None:
    trainer = Trainer(CountingUpdater(), out=tmp_path, extensions=[PrintReport(log_report=name)])
    with pytest.raises(TypeError, match=rf"`log_report` must name a LogReport .* got '{name}'. Call"):
        trainer.run()
    assert trainer.updater.iteration == 0


def test_a_table_state_that_does_not_fit_is_refused() -> None:
    with pytest.raises(StateError, match="PrintReport must hold 'printed'; missing: 'printed'"):
        PrintReport().load_state_dict({})


def frames(out: io.StringIO) -> list[str]:
    return [frame.strip() for frame in re.split(r"[\r\n]", out.getvalue()) if frame.strip()]


def test_the_bar_shows_epoch_iteration_and_speed_and_is_closed(tmp_path: Path) -> None:
    out, threads = Terminal(), set(threading.enumerate())
    train(tmp_path, ProgressBar(out=out))
    assert re.search(
        r"^100%\|.*\| epoch 2.00, iteration 4, main/loss 0.25, [\d.]+ updates/s \[\d\d:\d\d<00:00\]$", frames(out)[-1]
    )
    assert out.getvalue().endswith("\n")
    # Neither a thread of the run nor the monitor of tqdm, which another library may have started before.
    assert set(threading.enumerate()) <= threads


def test_a_run_without_a_bound_has_a_line_without_a_bar(tmp_path: Path) -> None:
    out = Terminal()
    train(tmp_path, ProgressBar(out=out), until=lambda trainer: trainer.updater.iteration == 3)
    assert re.fullmatch(r"epoch 1.50, iteration 3, main/loss 0.3333, [\d.]+ updates/s \[\d\d:\d\d\]", frames(out)[-1])


def test_a_resumed_bar_begins_where_the_run_stands(tmp_path: Path) -> None:
    first = train(tmp_path, ProgressBar(show=False), until=(2, "iteration"))
    out = Terminal()
    resumed = Trainer(CountingUpdater(2), (4, "iteration"), tmp_path, extensions=[ProgressBar(out=out)])
    resumed.load_state_dict(first.state_dict())
    resumed.run()
    assert frames(out)[0].startswith("50%|")


def test_an_uneven_epoch_does_not_lead_beyond_the_end_of_the_bar(tmp_path: Path) -> None:
    out = Terminal()
    trainer = Trainer(CountingUpdater(2.3), (1, "epoch"), tmp_path, extensions=[ProgressBar(out=out)])
    trainer.run()
    assert trainer.updater.epoch_detail > 1
    assert re.fullmatch(r"100%\|.*\| epoch 1.30, iteration 3, .* \[\d\d:\d\d<00:00\]", frames(out)[-1])


@pytest.mark.parametrize(
    ("show", "terminal", "bar", "text"),
    [(None, False, 0, 1), (None, True, 1, 1), (True, False, 1, 1), (False, True, 0, 0), (False, False, 0, 0)],
)
def test_where_the_bar_is_shown(tmp_path: Path, show: bool | None, terminal: bool, bar: int, text: int) -> None:
    out = Terminal() if terminal else io.StringIO()
    train(tmp_path, ProgressBar(show=show, out=out))
    assert ("%|" in out.getvalue(), bool(out.getvalue())) == (bool(bar), bool(text))


def test_a_file_gets_plain_lines_and_one_at_the_end(tmp_path: Path) -> None:
    often, seldom, unbounded = io.StringIO(), io.StringIO(), io.StringIO()
    train(tmp_path, ProgressBar(out=often, line_interval=0), ProgressBar(out=seldom))
    last = often.getvalue().splitlines()[-1]
    assert len(often.getvalue().splitlines()) == 4  # one per update, and no other at the end
    assert re.fullmatch(r"100% epoch 2.00, iteration 4, main/loss 0.25, [\d.]+ updates/s \[\d\d:\d\d<00:00\]", last)
    assert often.getvalue().startswith("25% epoch 0.50, iteration 1, main/loss 1, ")
    assert len(seldom.getvalue().splitlines()) == 1
    assert "\r" not in often.getvalue() + seldom.getvalue()
    train(tmp_path, ProgressBar(out=unbounded), until=lambda trainer: trainer.updater.iteration == 3)
    assert re.fullmatch(r"epoch 1.50, iteration 3, main/loss 0.333\d*, .* \[\d\d:\d\d\]\n", unbounded.getvalue())


def test_values_that_are_chosen_are_shown_with_the_last_one_observed(tmp_path: Path) -> None:
    out = io.StringIO()

    def observe(trainer: Trainer) -> None:
        trainer.observe("validation/main/accuracy", trainer.updater.iteration / 8)

    trainer = Trainer(CountingUpdater(2), (3, "iteration"), tmp_path)
    trainer.extend(observe, trigger=(2, "iteration"), priority=300)
    trainer.extend(ProgressBar(out=out, values=["validation/main/accuracy", "absent"], line_interval=0))
    with pytest.warns(UserWarning, match="`values` of ProgressBar must name observed values, got 'absent'"):
        trainer.run()
    first, *_, last = out.getvalue().splitlines()
    assert "iteration 1, 0" not in first
    assert "accuracy" not in first
    assert "iteration 3, validation/main/accuracy 0.25, " in last
    with pytest.raises(ValueError, match="`line_interval` must be at least 0, got -1"):
        ProgressBar(line_interval=-1)


def test_the_bar_is_closed_when_the_run_fails(tmp_path: Path) -> None:
    out = Terminal()
    trainer = Trainer(CountingUpdater(fail_at=2), out=tmp_path, extensions=[ProgressBar(out=out)])
    with pytest.raises(RuntimeError, match="boom"):
        trainer.run()
    assert "iteration 2," in frames(out)[-1]
    assert out.getvalue().endswith("\n")


def test_lines_of_the_table_are_not_written_into_the_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    train(tmp_path, ProgressBar(), LogReport(), PrintReport(["epoch", "main/loss"]))
    # What a terminal shows of each line: the text behind its last carriage return.
    shown = [line.rsplit("\r", 1)[-1].split() for line in screen.getvalue().split("\n") if line.strip()]
    assert shown[:3] == [["epoch", "main/loss"], ["1", "0.75"], ["2", "0.291667"]]
    assert shown[3][0].startswith("100%|")
