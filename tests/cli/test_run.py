"""`lockstep run`: scripts on several processes by torchrun's agent, and torchrun itself."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.communicators.failures.exits import end_with_agent
from lockstep.launch.agent import Run
from tests.support import zygote
from tests.support.processes import descendants
from tests.support.waiting import await_true

RUN = [sys.executable, "-m", "lockstep", "run"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]

SCRIPT = """
import os, sys, time
import lockstep as ls

communicator = ls.find_communicator()
communicator.barrier()
attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
if "fail-first" in sys.argv and communicator.rank == 1 and attempt == 0:
    raise ArithmeticError("the first attempt")
if "exit" in sys.argv and communicator.rank == 1:
    sys.exit(5)
if "wait" in sys.argv:
    open(sys.argv[2] + f"/{communicator.rank}", "w").close()
    time.sleep(300)
communicator.barrier()
if "modules" in sys.argv:
    agent = [name for name in sys.modules if name.startswith(("torch.distributed.run", "torch.distributed.elastic"))]
    print(f"modules of the agent: {len(agent)}")
print(f"<{communicator.rank} of {communicator.size}, attempt {attempt}, {sys.argv[1:]}>", flush=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def finished(
    command: Sequence[object], environment: dict[str, str] | None = None, *, forked: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run an agent or a script in forks, or in processes that are started anew."""
    command, variables = [str(part) for part in command], os.environ | (environment or {})
    if forked:
        return zygote.run(command, env=variables)
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=variables)


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    return sorted(re.findall("<[^>]*>", done.stdout))  # two ranks may write into one line


@pytest.mark.parametrize(
    "launcher", [[*RUN, "-n", "2"], pytest.param([*TORCHRUN, "--nproc-per-node", "2"], marks=pytest.mark.slow)]
)
def test_a_script_runs_on_two_processes(launcher: list[str], script: Path) -> None:
    done = finished([*launcher, script, "--option", "modules"], forked=False)
    assert done.returncode == 0, done.stderr
    assert lines(done) == [f"<{rank} of 2, attempt 0, ['--option', 'modules']>" for rank in range(2)]
    assert done.stdout.count("modules of the agent: 0") == 2  # they are for the process that starts the ranks


def test_the_exit_code_and_the_traceback_are_those_of_the_rank_that_failed(script: Path) -> None:
    done = finished([*RUN, "-n", "2", script, "fail-first"])
    assert done.returncode == 1
    assert done.stderr.count('raise ArithmeticError("the first attempt")') == 1
    assert "lockstep run: rank 1 exited with code 1" in done.stderr
    assert finished([*RUN, "-n", "2", script, "exit"]).returncode == 5


@pytest.mark.parametrize(
    ("way", "rank", "code"),
    [
        pytest.param("fail-first", 1, 1, marks=pytest.mark.slow),
        pytest.param("fail-first", 0, 1, marks=pytest.mark.slow),
        ("exit", 1, 5),
    ],
)
def test_the_rank_that_failed_is_named_also_where_it_takes_long_to_end(
    way: str, rank: int, code: int, tmp_path: Path
) -> None:
    script = tmp_path / "slow.py"
    late = f"import atexit, time, os\nif os.environ['RANK'] == '{rank}':\n    atexit.register(time.sleep, 3)\n"
    script.write_text(late + SCRIPT.replace("rank == 1", f"rank == {rank}"))
    done = finished([*RUN, "-n", "2", script, way])
    assert done.returncode == code
    assert f"lockstep run: rank {rank} exited with code {code};" in done.stderr


def test_four_workers_restart(script: Path) -> None:
    done = finished([*RUN, "-n", "4", "--max-restarts", "1", script, "fail-first"])
    assert done.returncode == 0, done.stderr
    assert lines(done) == [f"<{rank} of 4, attempt 1, ['fail-first']>" for rank in range(4)]


@pytest.mark.slow
def test_one_bare_torchrun_restarts_too(script: Path) -> None:
    done = finished([*TORCHRUN, "--nproc-per-node", "4", "--max-restarts", "1", script, "fail-first"])
    assert done.returncode == 0, done.stderr
    assert lines(done) == [f"<{rank} of 4, attempt 1, ['fail-first']>" for rank in range(4)]


def test_several_bare_torchruns_say_what_their_restart_lacks(script: Path) -> None:
    # Told apart from one agent by the number of groups, which the second line of the script claims to be 2.
    script.write_text(f"import os\nos.environ['GROUP_WORLD_SIZE'] = '2'\n{SCRIPT}")
    done = finished([*TORCHRUN, "--nproc-per-node", "2", "--max-restarts", "1", script, "fail-first"])
    assert done.returncode != 0
    assert "has been started before with the same rendezvous store" in done.stderr
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in done.stderr


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (signal.SIGTERM, signal.SIGHUP)),
    ],
)
def test_a_signal_leaves_nothing_behind(number: signal.Signals, script: Path, tmp_path: Path) -> None:
    folder = tmp_path / "began"
    folder.mkdir()
    with zygote.Popen([*RUN, "-n", "2", script, "wait", folder], stderr=subprocess.PIPE) as agent:
        await_true(lambda: len(list(folder.iterdir())) == 2, 240)
        ranks = descendants(agent.pid)
        assert len(ranks) >= 2
        agent.send_signal(number)
        assert agent.wait(timeout=240) == 128 + number
    await_true(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks), 240)


def test_a_killed_agent_leaves_no_rank_behind(script: Path, tmp_path: Path) -> None:
    folder = tmp_path / "began"
    folder.mkdir()
    with zygote.Popen([*RUN, "-n", "2", script, "wait", folder]) as agent:
        await_true(lambda: len(list(folder.iterdir())) == 2, 240)
        ranks = descendants(agent.pid)
        assert len(ranks) == 2
        os.kill(ranks[0], signal.SIGSTOP)  # not even one that is stopped
        agent.kill()
    await_true(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks), 240)


def test_a_script_that_comes_after_its_agents_end_says_so(script: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    done = finished([sys.executable, script], {"LOCKSTEP_AGENT": str(gone.pid)})
    assert done.returncode == 1
    assert "The agent of `lockstep run` that started this process" in done.stderr


def test_an_agent_must_be_a_process_number() -> None:
    with pytest.raises(ValueError, match="LOCKSTEP_AGENT must be a process ID, got 'me'"):
        end_with_agent({"LOCKSTEP_AGENT": "me"})


TRAINING = """
import os, signal, sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import lockstep as ls

kept, fatal, way = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 3))
samples = TensorDataset(torch.arange(80.0).view(20, 4) / 80, torch.arange(20) % 3)
updater = ls.ParallelUpdater(
    ls.BatchIterator(samples, batch_size=6, seed=3),
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    model,
    devices=["cpu"],
    num_shards=3,
    loss_fn=lambda model, x, y: functional.cross_entropy(model(x), y),
)
rank, attempt = int(os.environ.get("RANK", 0)), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
if kept.exists():
    updater.load_state_dict(torch.load(kept, weights_only=True))
while updater.iteration < 7:
    updater.update()
    if rank == 1 and attempt == 0 and updater.iteration == fatal:
        (kept.parent / "injected").touch()
        if way == "raise":
            raise ArithmeticError("the first attempt")
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        torch.save(updater.state_dict(), f"{kept}.new")
        os.replace(f"{kept}.new", kept)
if rank == 0:
    print(f"<{attempt} {ls.digest(updater.state_dict())}>")
"""


@pytest.mark.parametrize(
    "way",
    ["SIGKILL", pytest.param("raise", marks=pytest.mark.slow)],
)
def test_a_restarted_run_ends_with_the_bits_of_an_undisturbed_one(way: str, tmp_path: Path) -> None:
    script = tmp_path / "training.py"
    script.write_text(TRAINING)
    alone = finished([sys.executable, script, tmp_path / "alone", 0, way])
    restarted = finished([*RUN, "-n", "3", "--max-restarts", "1", script, tmp_path / "kept", 4, way])
    assert restarted.returncode == 0, restarted.stderr
    assert (tmp_path / "injected").exists()
    assert lines(alone) == ["<0 " + lines(restarted)[0].removeprefix("<1 ")], alone.stderr


STOPPED = """
import os, signal
import lockstep as ls

communicator = ls.find_communicator()
communicator.barrier()
if communicator.rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
communicator.barrier()
"""


@pytest.mark.slow
def test_a_stopped_rank_is_named_and_ended(tmp_path: Path) -> None:
    script = tmp_path / "stopped.py"
    script.write_text(STOPPED)
    with zygote.Popen([*RUN, "-n", "2", "--timeout", "9", script], stderr=subprocess.PIPE, text=True) as agent:
        await_true(lambda: len(descendants(agent.pid)) == 2, 240)
        ranks = descendants(agent.pid)
        _, errors = agent.communicate(timeout=600)
    assert agent.returncode == 1
    assert "PeerError: Rank 1 has been silent for 3 s" in errors
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


ENDS_SLOWLY = """
import os, signal, sys, time
from pathlib import Path

ready, late = Path(sys.argv[1], "ready"), Path(sys.argv[1], "late")

def end(*_):
    time.sleep(25)
    late.touch()

if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, end)
    ready.touch()
    time.sleep(300)
while not ready.exists():
    time.sleep(0.01)
sys.exit(5)
"""


def test_the_others_have_the_shutdown_timeout_when_a_rank_has_failed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ENDS_SLOWLY)
    assert finished([*RUN, "-n", "2", "--shutdown-timeout", "1", script, tmp_path]).returncode == 5
    assert (tmp_path / "ready").exists()
    # torch itself would have let it end after these 25 s.
    assert not (tmp_path / "late").exists()


def test_what_the_agent_is_told() -> None:
    settings = Run("train.py", ["-x"], num_processes="3", nnodes="2", rdzv="node0:29400", max_restarts=1)
    variables = {"OMP_NUM_THREADS": "4"}
    settings.prepare(variables)
    assert variables["OMP_NUM_THREADS"] == "4", "the user's own word stands"
    assert variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert variables["LOCKSTEP_TIMEOUT"] == "60"
    assert "GLOO_SOCKET_IFNAME" not in variables, "the loopback would not reach the other machine"
    assert settings.command_line()[-2:] == ["train.py", "-x"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-n", "0", "train.py"], "`-n` must be at least 1, got 0."),
        (["--nproc-per-node", "-2", "train.py"], "`-n` must be at least 1, got -2."),
        (["--nproc_per_node=-2", "train.py"], "`-n` must be at least 1, got -2."),
        (["-n", "2"], "are required: script\n"),
        (
            ["-n", "0", "train.py", "--nnodes=2", "-n"],
            "run: --nnodes=2 is passed to the script; options of lockstep run",
        ),
        (["--nnodes", "2", "train.py"], "`--rdzv` must be host:port"),
        (["--max-restarts", "-1", "train.py"], "`max_restarts` must be at least 0, got -1"),
        (["--timeout", "0", "train.py"], "`timeout` must be more than 0 seconds, got 0"),
    ],
)
def test_options_out_of_range(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", *options])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
