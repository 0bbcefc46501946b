"""What launchers say in the environment, read back."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from functools import partial

import pytest
import torch.distributed as dist

import lockstep as ls
from lockstep.communicators.environment import RunEnvironment, read_environment, timeout_for
from lockstep.communicators.joining import NO_GPU, _have_own_gpus
from lockstep.launch.agent import Run

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29400",
    "GROUP_WORLD_SIZE": "2",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "70001",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}


def test_the_words_of_torchrun() -> None:
    expected = RunEnvironment(3, 4, 1, 2, "node0", 29400, restarts=1, agents=2, agent_store=True)
    assert read_environment(TORCHRUN) == expected


def test_torchrun_under_srun_has_the_last_word() -> None:
    assert read_environment(SRUN | TORCHRUN) == read_environment(TORCHRUN)


def test_the_words_of_srun() -> None:
    found = read_environment(SRUN)
    assert found == RunEnvironment(5, 8, 1, 1, "gpu07", 12_000 + 7_070_103 % 20_000, agents=2)


def test_steps_of_one_job_meet_at_different_ports() -> None:
    ports = {read_environment(SRUN | {"SLURM_STEP_ID": str(step)}).port for step in range(100)}
    assert len(ports) == 100
    assert all(1024 < port < 32768 for port in ports)


def test_a_users_own_meeting_point_goes_before_slurms() -> None:
    found = read_environment(SRUN | {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "5555"})
    assert (found.address, found.port) == ("10.0.0.7", 5555)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"RANK": "0"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"},  # in the batch script, which no srun has started
        SRUN | {"SLURM_STEP_ID": "4294967290"},  # in an interactive shell
    ],
)
def test_a_process_that_is_alone(variables: dict[str, str]) -> None:
    assert read_environment(variables) is None


def test_a_world_of_one_needs_no_meeting_point() -> None:
    assert read_environment({"RANK": "0", "WORLD_SIZE": "1"}) == RunEnvironment(0, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"MASTER_PORT": ""}, "`MASTER_PORT` must be set in the environment"),
        ({"WORLD_SIZE": "many"}, "`WORLD_SIZE` in the environment must be an integer, got 'many'"),
        ({"RANK": "4"}, r"rank must lie in 0..3, got 4"),
    ],
)
def test_an_environment_that_contradicts_itself(change: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_environment(TORCHRUN | change)


def test_a_lone_process_gets_a_communicator_of_one() -> None:
    assert isinstance(ls.find_communicator(), ls.LocalCommunicator)


@pytest.mark.parametrize(
    ("timeout", "rule"),
    [
        (-1.0, "more than 0 seconds, got -1"),
        (float("nan"), "more than 0 seconds, got nan"),
        (float("inf"), "finite; a day is 86400, got inf"),
    ],
)
def test_a_timeout_out_of_range(timeout: float, rule: str) -> None:
    for start in (ls.find_communicator, partial(ls.launch, print), partial(Run, "train.py")):
        with pytest.raises(ValueError, match=f"`timeout` must be {rule}"):
            start(timeout=timeout)


def test_a_timeout_in_the_environment_that_is_no_number() -> None:
    with pytest.raises(ValueError, match="`LOCKSTEP_TIMEOUT` in the environment must be seconds, got 'soon'"):
        timeout_for(None, {"LOCKSTEP_TIMEOUT": "soon"})
    assert timeout_for(None, {"LOCKSTEP_TIMEOUT": "2.5"}) == 2.5
    assert timeout_for(None, {}) == timeout_for(None, {"LOCKSTEP_TIMEOUT": ""}) == 60.0


@pytest.mark.parametrize(
    ("text", "rule"),
    [("soon", "an integer, got 'soon'"), ("0", "at least 1 second, got 0"), ("-5", "at least 1 second")],
)
def test_a_wrong_shutdown_timeout_in_the_environment(text: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before any process has started; otherwise nothing would end those that have."""
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", text)
    for start in (partial(ls.launch, print), partial(Run, "train.py")):
        with pytest.raises(ValueError, match=f"`TORCH_ELASTIC_SHUTDOWN_TIMEOUT` in the environment must be {rule}"):
            start()
    assert multiprocessing.active_children() == []


def test_what_is_written_for_a_process_is_what_it_reads() -> None:
    assert RunEnvironment(3, 4, 1, 2, "node0", 29400, 1, 2, agent_store=True).variables() == TORCHRUN
    alone = RunEnvironment(1, 2, 1, 2, "127.0.0.1", 4000)
    assert read_environment(alone.variables()) == alone


@pytest.mark.parametrize(
    ("gpus", "own"),
    [("ab", True), ("aa", False), ("aba", False), ("abcd", True), (["a", NO_GPU], False), ([NO_GPU], False)],
)
def test_ranks_that_share_a_gpu_or_have_none_are_found(gpus: Sequence[str], own: bool) -> None:
    store = dist.HashStore()
    for rank, gpu in enumerate(gpus):
        store.set(f"gpu/{rank}", gpu)
    found = {_have_own_gpus(store, RunEnvironment(rank, len(gpus)), gpu) for rank, gpu in enumerate(gpus)}
    assert found == {own}
