"""`PhaseTimer` adds up the time of phases, from what code that enters them sets."""

from __future__ import annotations

import threading

import torch

from lockstep.communicators import Watch
from lockstep.updaters import PhaseTimer

CPU = torch.device("cpu")


def test_the_watch_behind_it_learns_of_every_phase() -> None:
    watch = Watch()
    timer = PhaseTimer(watch, [CPU])
    timer.phase = "optimizer"
    assert (watch.phase, timer.phase) == ("optimizer", "optimizer")
    assert set(timer.seconds.values()) == {0.0}  # it has not started


def test_each_phase_gets_the_time_until_the_next() -> None:
    timer = PhaseTimer(Watch(), [CPU, CPU])
    timer.start()
    timer.phase = "data loading"

    def compute(place: int) -> None:
        timer.phase = "forward"
        if place == 1:
            timer.phase = "backward"

    run = timer.timed(compute)
    thread = threading.Thread(target=run, args=(1,))
    run(0)
    thread.start()
    thread.join()
    timer.phase = "optimizer"
    assert [device["backward"] > 0 for device in timer.device_seconds] == [False, True]
    assert all(device["forward"] > 0 for device in timer.device_seconds)
    assert timer.seconds["data"] > 0
    assert timer.seconds["compute"] >= sum(timer.device_seconds[0].values())
    assert timer.seconds["reduce"] == timer.seconds["optimizer"] == 0
    timer.stop()
    assert timer.seconds["optimizer"] > 0
    timer.clear()
    assert set(timer.seconds.values()) == {0.0}


def test_other_threads_do_not_change_the_phase_of_the_first() -> None:
    timer = PhaseTimer(Watch(), [CPU])
    timer.start()

    def elsewhere() -> None:
        timer.phase = "optimizer"

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    timer.stop()
    assert timer.seconds["optimizer"] == 0
    assert timer.seconds["between updates"] > 0


def test_nothing_is_measured_while_it_is_stopped() -> None:
    timer = PhaseTimer(Watch(), [CPU])

    def compute(_: int) -> None:
        """Do nothing."""

    assert timer.timed(compute) is compute
