"""The event files of a run, read by TensorBoard's own reader."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import SideFileWarning
from lockstep.extensions import TensorBoardLogger
from lockstep.trainer import Trainer
from tests.extensions.loggers.runs import CONFIG, UPDATES, Curves, build, check_curves, stopped_run, whole_run
from tests.support.plain_updaters import CountingUpdater
from tests.support.side_files import mutated

reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
pytestmark = pytest.mark.filterwarnings("default")


def reader(out: Path) -> Any:
    events = reading.EventAccumulator(str(out / "tensorboard"), size_guidance={"histograms": 0})
    return events.Reload()


def curves(out: Path) -> Curves:
    events = reader(out)
    return {name: [(each.step, each.value) for each in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_a_resumed_run_continues_the_curves(tmp_path: Path) -> None:
    whole_run(tmp_path / "whole", TensorBoardLogger())
    stopped_run(tmp_path / "stopped", TensorBoardLogger)
    check_curves(curves(tmp_path / "stopped"), curves(tmp_path / "whole"))
    assert len(list((tmp_path / "stopped/tensorboard").iterdir())) == 2


def test_the_configuration_the_hyperparameters_and_the_digest(tmp_path: Path) -> None:
    trainer = whole_run(tmp_path, TensorBoardLogger(hyperparameters=CONFIG))
    events = reader(tmp_path)
    config = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert all(f'"{name}":' in config for name in trainer.updater.recipe_fields())
    assert "recipe_digest" in config
    assert '"digest":' in events.Tensors("summary/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "_hparams_/session_start_info" in events.summary_metadata


def test_an_event_that_is_not_whole_is_written_again(tmp_path: Path) -> None:
    whole_run(tmp_path / "whole", TensorBoardLogger())
    with pytest.raises(ConnectionError):
        build(tmp_path / "run", TensorBoardLogger(), 13, fail_at=11).run()
    (path,) = (tmp_path / "run/tensorboard").iterdir()
    path.write_bytes(path.read_bytes()[:-4])
    build(tmp_path / "run", TensorBoardLogger(), 13).run(resume="auto")
    check_curves(curves(tmp_path / "run"), curves(tmp_path / "whole"))


def test_with_another_rate_the_entries_after_the_snapshot_are_replaced(tmp_path: Path) -> None:
    whole_run(tmp_path / "whole", TensorBoardLogger())
    stopped_run(tmp_path / "stopped", TensorBoardLogger, lr=0.01)
    found, first = curves(tmp_path / "stopped"), curves(tmp_path / "whole")
    assert [update for update, _ in found["main/loss"]] == UPDATES["main/loss"]
    assert [a == b for a, b in zip(found["main/loss"], first["main/loss"], strict=True)] == [True] * 4 + [False] * 3


def test_a_new_run_in_an_old_folder_hides_the_old_curve(tmp_path: Path) -> None:
    for updates, value in ((4, 1.0), (2, 2.0)):
        logger = TensorBoardLogger(trigger=(1, "iteration"))
        Trainer(CountingUpdater(2, [value] * 4), (updates, "iteration"), tmp_path, extensions=[logger]).run()
    assert curves(tmp_path)["main/loss"] == [(1, 2.0), (2, 2.0)]


def test_the_writer_is_there_for_histograms(tmp_path: Path) -> None:
    logger = TensorBoardLogger()
    trainer = build(tmp_path, logger, 4)

    def draw(trainer: Any) -> None:
        weights = trainer.updater.get_all_models()["main"][0].weight
        logger.writer.add_histogram("weights", weights, trainer.updater.iteration)

    trainer.extend(draw, trigger=(2, "iteration"))
    trainer.run()
    assert [each.step for each in reader(tmp_path).Histograms("weights")] == [2, 4]
    assert logger.writer is None


def check_damage(whole: Path, out: Path, seed: int) -> None:
    """Resume a run with a damaged event file: its curves are as before, or a warning says up to where they are."""
    shutil.copytree(whole, out)
    (path,) = (out / "tensorboard").iterdir()
    path.write_bytes(mutated(path.read_bytes(), seed))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SideFileWarning)
        build(out, TensorBoardLogger(), 13).run(resume="auto")
    told = [str(each.message) for each in caught if each.category is SideFileWarning]
    if any("must have the entries up to update" in each for each in told):
        return
    # The file may end with an entry that is written again, beside the first one where that can be read.
    assert {name: sorted(set(each)) for name, each in curves(out).items()} == curves(whole.with_name("complete"))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damage")
    whole_run(folder / "complete", TensorBoardLogger())
    with pytest.raises(ConnectionError):
        build(folder / "stopped", TensorBoardLogger(), 13, fail_at=11).run()
    return folder / "stopped"


@pytest.mark.parametrize(
    "seeds",
    [range(10), *(pytest.param(range(first, first + 98), marks=pytest.mark.slow) for first in range(10, 500, 98))],
)
def test_a_damaged_event_file_is_named(stopped: Path, tmp_path: Path, seeds: range) -> None:
    for seed in seeds:
        check_damage(stopped, tmp_path / str(seed), seed)
