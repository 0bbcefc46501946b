"""`Clock` adds up the time of phases, from what code that enters them sets."""

from __future__ import annotations

import threading

import torch

from lockstep.communicators import Watch
from lockstep.updaters.compute.clock import Clock

CPU = torch.device("cpu")


def test_the_watch_behind_it_learns_of_every_phase() -> None:
    watch = Watch()
    clock = Clock(watch, [CPU])
    clock.phase = "optimizer"
    assert (watch.phase, clock.phase) == ("optimizer", "optimizer")
    assert clock.stop(clock.start()).seconds["optimizer"] == 0  # it had no user then


def test_each_phase_gets_the_time_until_the_next() -> None:
    clock = Clock(Watch(), [CPU, CPU])
    start = clock.start()
    clock.phase = "data loading"

    def compute(place: int) -> None:
        clock.phase = "forward"
        if place == 1:
            clock.phase = "backward"

    run = clock.timed(compute)
    thread = threading.Thread(target=run, args=(1,))
    run(0)
    thread.start()
    thread.join()
    clock.phase = "optimizer"
    times = clock.stop(start)
    assert [device["backward"] > 0 for device in times.device_seconds] == [False, True]
    assert all(seconds > 0 for seconds in times.busy_seconds)
    assert all(times.seconds[phase] > 0 for phase in ("data", "compute", "optimizer"))
    assert times.seconds["compute"] >= times.busy_seconds[0]
    assert times.seconds["reduce"] == 0
    again = clock.start()
    assert clock.stop(again).device_seconds == clock.zero.device_seconds


def test_each_user_is_told_the_time_since_it_began() -> None:
    clock = Clock(Watch(), [CPU])
    first = clock.start()
    clock.phase = "reduce"
    second = clock.start()
    clock.phase = "optimizer"
    times = clock.stop(first)
    clock.phase = "data loading"
    later = clock.stop(second)
    assert times.seconds["reduce"] > later.seconds["reduce"] > 0
    assert 0 < times.seconds["optimizer"] < later.seconds["optimizer"]
    assert times.plus(later).seconds["reduce"] == times.seconds["reduce"] + later.seconds["reduce"]


def test_other_threads_do_not_change_the_phase_of_the_first() -> None:
    clock = Clock(Watch(), [CPU])
    start = clock.start()

    def elsewhere() -> None:
        clock.phase = "optimizer"

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    times = clock.stop(start)
    assert times.seconds["optimizer"] == 0
    assert times.seconds["between updates"] > 0


def test_nothing_is_measured_without_users() -> None:
    clock = Clock(Watch(), [CPU])

    def compute(_: int) -> None:
        """Do nothing."""

    assert clock.timed(compute) is compute
    clock.stop(clock.start())
    assert clock.timed(compute) is compute
