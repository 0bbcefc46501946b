"""Handlers, metrics and loggers of the real Ignite, attached to a trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep as ls
from lockstep.extensions import Evaluator, IgniteBridge, LogReport
from lockstep.trainer import Trainer
from lockstep.triggers import TriggerSpec
from tests.support.runs import Placement, cross_entropy, finalized, updater_for
from tests.support.workloads import MLP, TRANSFORMER

pytest.importorskip("ignite")

from ignite.engine import Events
from ignite.handlers import (
    Checkpoint,
    DiskSaver,
    EarlyStopping,
    EMAHandler,
    LRScheduler,
    ProgressBar,
    TensorboardLogger,
    TerminateOnNan,
    Timer,
    global_step_from_engine,
)
from ignite.metrics import Average, RunningAverage

EVENTS = (
    Events.STARTED,
    Events.EPOCH_STARTED,
    Events.ITERATION_STARTED,
    Events.ITERATION_COMPLETED,
    Events.EPOCH_COMPLETED,
    Events.TERMINATE,
    Events.COMPLETED,
    Events.EXCEPTION_RAISED,
)


def trainer_of(bridge: IgniteBridge, out: Path, until: TriggerSpec = (2, "epoch"), **options: Any) -> Trainer:
    """An epoch has three updates, of 9, 9 and 5 samples."""
    return Trainer(updater_for(MLP, num_shards=2, **options), until, out, extensions=[bridge])


def recorded(bridge: IgniteBridge) -> list[str]:
    """Return a list to which every event is written, with the epoch and the iteration that handlers see."""
    seen: list[str] = []
    for event in EVENTS:

        def note(engine: Any, *_: object, name: str = event.name) -> None:
            seen.append(f"{name} {engine.state.epoch} {engine.state.iteration}")

        bridge.engine.add_event_handler(event, note)
    return seen


EPOCH = [
    "EPOCH_STARTED {e} {s}",
    *[f"ITERATION_{what} {{e}} {{s{n}}}" for n in (1, 2, 3) for what in ("STARTED", "COMPLETED")],
    "EPOCH_COMPLETED {e} {s3}",
]


def epoch(number: int) -> list[str]:
    start = 3 * (number - 1)
    names = {"e": number, "s": start, **{f"s{n}": start + n for n in (1, 2, 3)}}
    return [line.format(**names) for line in EPOCH]


def test_events_come_in_the_order_of_ignite(tmp_path: Path) -> None:
    bridge = IgniteBridge()
    seen = recorded(bridge)
    trainer_of(bridge, tmp_path).run()
    assert seen == ["STARTED 0 0", *epoch(1), *epoch(2), "COMPLETED 2 6"]
    from ignite.engine import Engine  # noqa: PLC0415 - only for the comparison

    ours, seen = seen, []
    engine = Engine(lambda _engine, _batch: None)
    for event in EVENTS:
        engine.add_event_handler(
            event, lambda e, name=event.name: seen.append(f"{name} {e.state.epoch} {e.state.iteration}")
        )
    engine.run([0, 1, 2], max_epochs=2)
    assert ours == seen


def test_filters_and_the_state(tmp_path: Path) -> None:
    bridge = IgniteBridge()
    seen: list[Any] = []

    @bridge.engine.on(Events.ITERATION_COMPLETED(every=2))
    def note(engine: Any) -> None:
        state = engine.state
        seen.append((state.iteration, state.epoch_length, state.max_epochs, state.max_iters, sorted(state.output)))

    trainer = trainer_of(bridge, tmp_path, (4, "iteration"))
    losses: list[float] = []
    trainer.extend(lambda trainer: losses.append(float(trainer.observation["main/loss"])))
    trainer.run()
    assert seen == [(2, 3, None, 4, ["loss", "skipped"]), (4, 3, None, 4, ["loss", "skipped"])]
    assert bridge.engine.state.output["loss"] == losses[-1]
    assert bridge.engine.state.metrics["main/loss"] == losses[-1]


def test_an_epoch_of_unknown_length_is_known_when_it_has_ended(tmp_path: Path) -> None:
    bridge = IgniteBridge()
    seen: list[int | None] = []
    bridge.engine.add_event_handler(Events.EPOCH_STARTED, lambda engine: seen.append(engine.state.epoch_length))
    trainer_of(bridge, tmp_path, (6, "epoch"), accumulate=3).run()
    assert seen == [None, 1, 1, 1, 1, 1]


def test_a_resumed_run_goes_on_where_it_stood(tmp_path: Path) -> None:
    first = trainer_of(IgniteBridge(), tmp_path, (4, "iteration"))
    first.run()
    bridge = IgniteBridge()
    seen = recorded(bridge)
    resumed = trainer_of(bridge, tmp_path)
    resumed.load_state_dict(first.state_dict())
    resumed.run()
    assert seen == ["STARTED 1 4", "EPOCH_STARTED 2 4", *epoch(2)[3:], "COMPLETED 2 6"]


def test_an_error_is_announced_and_the_run_can_go_on(tmp_path: Path) -> None:
    bridge = IgniteBridge()
    trainer = trainer_of(bridge, tmp_path)
    fails = [True]

    def fail(_: Trainer) -> None:
        if fails and trainer.updater.iteration == 2:
            fails.clear()
            raise RuntimeError("boom")

    trainer.extend(fail, priority=1)
    seen = recorded(bridge)
    with pytest.raises(RuntimeError, match="boom"):
        trainer.run()
    assert seen[-2:] == ["ITERATION_COMPLETED 1 2", "EXCEPTION_RAISED 1 2"]
    trainer.run()
    assert seen[-1] == "COMPLETED 2 6"
    assert [line for line in seen if line.startswith("ITERATION_COMPLETED")] == [
        f"ITERATION_COMPLETED {1 + (n - 1) // 3} {n}" for n in range(1, 7)
    ]


@pytest.mark.parametrize("skip", [False, True])
def test_terminate_ends_the_run_and_another_call_continues_it(tmp_path: Path, skip: bool) -> None:
    bridge = IgniteBridge()
    seen = recorded(bridge)

    @bridge.engine.on(Events.ITERATION_COMPLETED(once=2))
    def stop(engine: Any) -> None:
        engine.terminate(skip_completed=skip)

    trainer = trainer_of(bridge, tmp_path)
    trainer.run()
    assert trainer.updater.iteration == 2
    assert seen[-2:] == (["ITERATION_COMPLETED 1 2", "TERMINATE 1 2"] if skip else ["TERMINATE 1 2", "COMPLETED 1 2"])
    trainer.run()
    assert trainer.updater.iteration == 6


@pytest.mark.parametrize("name", ["terminate_epoch", "interrupt"])
def test_what_a_trainer_does_not_do_is_refused(tmp_path: Path, name: str) -> None:
    bridge = IgniteBridge()
    bridge.engine.interrupt_resume_enabled = True
    bridge.engine.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: getattr(engine, name)())
    with pytest.raises(ls.OrderError, match=r"`engine.terminate_epoch` and `engine.interrupt` must not be called"):
        trainer_of(bridge, tmp_path).run()
    with pytest.raises(ls.OrderError, match=r"`engine.run` must not be called"):
        IgniteBridge().engine.run([0])
    with pytest.raises(ValueError, match="`epoch_length` must be at least 1, got 0"):
        IgniteBridge(epoch_length=0)


def test_early_stopping_and_termination_on_nan(tmp_path: Path) -> None:
    bridge = IgniteBridge()
    handler = EarlyStopping(2, lambda engine: -engine.state.metrics["validation/main/loss"], bridge.engine)
    bridge.engine.add_event_handler(Events.EPOCH_COMPLETED, handler)
    trainer = trainer_of(bridge, tmp_path, (9, "epoch"))
    validation = ls.BatchIterator(MLP.data(9), 9, repeat=False)
    trainer.extend(Evaluator(validation, loss_fn=cross_entropy))
    trainer.extend(
        lambda trainer: trainer.observe("validation/main/loss", float(trainer.updater.epoch)),
        priority=299,
        trigger=(1, "epoch"),
    )
    trainer.run()
    assert trainer.updater.epoch == 3  # the first epoch was the best, and two were worse
    bridge = IgniteBridge(output=lambda _: float("nan"))
    bridge.engine.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
    trainer = trainer_of(bridge, tmp_path)
    trainer.run()
    assert trainer.updater.iteration == 1


def test_metrics_are_computed_and_logged(tmp_path: Path) -> None:
    bridge = IgniteBridge()
    Average(output_transform=lambda output: output["loss"]).attach(bridge.engine, "mean_loss")
    RunningAverage(output_transform=lambda output: output["loss"], alpha=0.5).attach(bridge.engine, "running")
    trainer = trainer_of(bridge, tmp_path)
    report = LogReport(trigger=(1, "iteration"))
    trainer.extend(report)
    trainer.run()
    log = report.log
    for end in (3, 6):
        losses = [entry["main/loss"] for entry in log[end - 3 : end]]
        assert log[end - 1]["mean_loss"] == pytest.approx(sum(losses) / 3)
    running = log[0]["main/loss"]
    for entry in log[1:]:
        running = 0.5 * running + 0.5 * entry["main/loss"]
        assert entry["running"] == pytest.approx(running)
    assert [("mean_loss" in entry) for entry in log] == [False, False, True, False, False, True]


def test_the_progress_bar_of_ignite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The bar of Ignite would start a thread that outlives it.
    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)
    bridge = IgniteBridge()
    ProgressBar(persist=True).attach(bridge.engine, output_transform=lambda output: {"loss": output["loss"]})
    trainer = trainer_of(bridge, tmp_path)
    trainer.run()
    shown = capsys.readouterr().err
    assert "Epoch [1/2]" in shown
    assert "Epoch [2/2]: [3/3] 100%" in shown
    assert f"loss={float(trainer.observation['main/loss']):.3g}"[:9] in shown


def test_checkpoints_of_ignite_hold_the_state_of_the_run(tmp_path: Path) -> None:
    bridge = IgniteBridge()
    trainer = trainer_of(bridge, tmp_path)
    parts = {
        "model": trainer.updater.get_all_models()["main"],
        "optimizer": trainer.updater.get_optimizer("main"),
        "trainer": bridge.engine,
    }
    folder = tmp_path / "checkpoints"
    handler = Checkpoint(
        parts, DiskSaver(str(folder)), n_saved=2, global_step_transform=global_step_from_engine(bridge.engine)
    )
    bridge.engine.add_event_handler(Events.EPOCH_COMPLETED, handler)
    trainer.run()
    assert {path.name for path in folder.iterdir()} == {"checkpoint_1.pt", "checkpoint_2.pt"}
    saved = torch.load(folder / "checkpoint_2.pt", weights_only=True)
    assert saved["trainer"] == {"epoch_length": 3, "iteration": 6, "max_epochs": 2}
    assert ls.digest(saved["model"]) == ls.digest(parts["model"].state_dict())


def average_of(out: Path, placement: Placement, stop: int | None = None) -> str:
    """Train with the average of Ignite, with a resume in the middle if `stop` is given; return its digest."""

    def build(until: int) -> tuple[Trainer, EMAHandler]:
        updater = updater_for(TRANSFORMER, placement, num_shards=3)
        handler = EMAHandler(updater.get_all_models()["main"], momentum=0.1)
        bridge = IgniteBridge(saved={"average": handler.ema_model})
        handler.attach(bridge.engine, event=Events.ITERATION_COMPLETED(every=2))
        return Trainer(updater, (until, "iteration"), out, extensions=[bridge]), handler

    trainer, handler = build(stop or 7)
    trainer.run()
    if stop is not None:
        state = trainer.state_dict()
        trainer, handler = build(7)
        trainer.load_state_dict(state)
        trainer.run()
    return ls.digest(handler.ema_model)


def test_the_average_of_ignite_has_the_same_bits_on_any_devices_and_after_a_resume(tmp_path: Path) -> None:
    expected = average_of(tmp_path, Placement(1))
    assert {average_of(tmp_path, Placement(2)), average_of(tmp_path, Placement(1), stop=3)} == {expected}
    updater = updater_for(TRANSFORMER, num_shards=3)
    assert ls.digest(updater.get_all_models()["main"]) != expected


def test_a_scheduler_of_ignite_sets_the_rate_before_the_update(tmp_path: Path) -> None:
    """Ignite steps schedulers when an iteration starts: the first update uses the first rate."""

    def build() -> tuple[ls.ParallelUpdater, torch.optim.lr_scheduler.LRScheduler]:
        updater = updater_for(MLP, num_shards=2)
        return updater, torch.optim.lr_scheduler.StepLR(updater.get_optimizer("main"), 1, gamma=0.5)

    updater, scheduler = build()
    bridge = IgniteBridge()
    bridge.engine.add_event_handler(Events.ITERATION_STARTED, LRScheduler(scheduler))
    rates: list[float] = []
    trainer = Trainer(updater, (3, "iteration"), tmp_path, extensions=[bridge])
    trainer.extend(lambda trainer: rates.append(trainer.updater.get_optimizer("main").param_groups[0]["lr"]))
    trainer.run()
    assert rates == [0.05, 0.025, 0.0125]
    with finalized(updater_for(MLP, num_shards=2)) as plain:
        for rate in rates:
            plain.get_optimizer("main").param_groups[0]["lr"] = rate
            plain.update()
        assert ls.digest(plain.get_all_models()["main"]) == ls.digest(updater.get_all_models()["main"])


def test_the_tensorboard_logger_of_ignite(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: PLC0415 - as above

    bridge = IgniteBridge()
    logger = TensorboardLogger(log_dir=str(tmp_path / "tb"))
    trainer = trainer_of(bridge, tmp_path)
    logger.attach_output_handler(
        bridge.engine,
        Events.ITERATION_COMPLETED,
        tag="training",
        output_transform=lambda output: {"loss": output["loss"]},
    )
    logger.attach_opt_params_handler(bridge.engine, Events.ITERATION_STARTED, trainer.updater.get_optimizer("main"))
    losses: list[float] = []
    trainer.extend(lambda trainer: losses.append(float(trainer.observation["main/loss"])))
    trainer.run()
    logger.close()
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    curve = events.Scalars("training/loss")
    assert [point.step for point in curve] == [1, 2, 3, 4, 5, 6]
    assert [point.value for point in curve] == pytest.approx(losses)
    assert len(events.Scalars("lr/group_0")) == 6


def test_a_timer_of_ignite(tmp_path: Path) -> None:
    bridge = IgniteBridge()
    timer = Timer(average=True)
    timer.attach(
        bridge.engine, Events.STARTED, Events.ITERATION_STARTED, Events.ITERATION_COMPLETED, Events.ITERATION_COMPLETED
    )
    trainer_of(bridge, tmp_path).run()
    assert timer.step_count == 6
