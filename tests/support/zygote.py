"""Start Python commands by forks of a process that has imported torch and lockstep already.

Importing both takes a process several seconds, which is most of what a test of short-lived processes takes. `run`
and `Popen` stand for those of `subprocess`, and `spawned_by_forks` serves `multiprocessing` and `lockstep.launch`.

A forked process is a child of the one that asked for it: it can wait for it, is found by it in /proc, and takes
it along when it dies. It has the arguments, variables, folder, file descriptors and session that it was given, ignores
the signals that its parent ignores, runs its code as `__main__`, and ends as any Python does. What it has of its own
accord: modules that were imported before, and the options of the interpreter. A test of imports, of warnings during
them, or of variables that torch reads while it is imported needs a process that is started anew, by `subprocess`.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing.util
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PR_SET_CHILD_SUBREAPER = 36
"""The option of Linux's prctl(2) by which a process becomes the parent of orphans among its descendants."""
AVAILABLE = sys.platform == "linux"
"""Elsewhere a process cannot become the parent of another's child, and each is started anew."""
NAME = "zygote"
"""The name by which /proc tells the process that is forked from its forks."""
NETWORK = "NETWORK_NAMESPACE"
"""The variable with the name of the network namespace in which a process runs, as by `ip netns exec`."""
HOST = "NAME_OF_HOST"
"""The variable with the name that the machine has for a process, as by `unshare --uts` and `hostname`."""
WHOLE_END = "WHOLE_END"
"""The variable with which a process takes down other libraries at its end, as a process that is started anew does.

That takes a quarter of a second, in which it copies the memory that all forks share. Without the variable a process
ends its threads, calls what is registered with `atexit`, and takes down what its program, lockstep and
`torch.distributed` hold, but neither the modules of other libraries nor the static objects of their C++.
"""
AGENTS = {"lockstep", "torch.distributed.run", "tests.support.programs.launched"}
"""Modules whose processes start processes, which are to be theirs; they get a process to fork from as well."""


def ignored_signals() -> list[int]:
    """List the signals that this process ignores beyond those that Python ignores by itself."""
    usual = {signal.SIGPIPE, signal.SIGXFSZ}
    return [each for each in signal.valid_signals() - usual if signal.getsignal(each) is signal.SIG_IGN]


@dataclass(frozen=True)
class Command:
    """What a forked process is to run, and with what.

    Attributes:
        arguments: The arguments of Python: a script, or a module after -m, or code after -c; -u and -W may come before.
        variables: The environment variables.
        folder: The working directory.
        targets: The numbers that the file descriptors get that come with this command.
        new_session: Whether the process begins a session.
        ignored: The signals that the process ignores from its start, as after `nohup`.
    """

    arguments: list[str]
    variables: dict[str, str]
    folder: str
    targets: list[int]
    new_session: bool
    ignored: list[int] = field(default_factory=ignored_signals)


class Zygote:
    """A process that others are forked from, as seen from the process that asks for them."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def start(self, command: Command, descriptors: Sequence[int]) -> int:
        """Fork a process and return its ID. It is a child of this process.

        Args:
            command: What it runs.
            descriptors: The file descriptors of this process that it gets, one per target.
        """
        with self._lock:
            channel = self._channel()
            given = pickle.dumps(command)
            with _adopting_orphans():
                socket.send_fds(channel, [len(given).to_bytes(8, "little")], list(descriptors))
                channel.sendall(given)
                return int.from_bytes(received(channel, 8), "little")

    def adopt(self, channel: socket.socket) -> None:
        """Use the process at the other end of a connection."""
        self._socket = channel

    def close(self) -> None:
        """End the process; the next call of `start` starts another."""
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.wait()
        self._socket = self._process = None

    def _channel(self) -> socket.socket:
        if self._socket is None:
            self._socket, theirs = socket.socketpair()
            code = f"import sys; own, sys.path[:] = sys.path[1:], {sys.path!r}; "
            # Registered before all others, it is called after them.
            code += "import atexit; from tests.support import zygote; atexit.register(zygote.keep_large_modules); "
            code += "from tests.support.zygote_process import main; "
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", f"{code}exec(main({theirs.fileno()}, own))"],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    # Threads of other libraries would be missing in a forked process.
                    env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
                )
            atexit.register(self.close)
        return self._socket


ZYGOTE = Zygote()
"""The process that all tests of this one share."""


class Popen(subprocess.Popen):
    """A `subprocess.Popen` whose command, which is Python's, runs in a forked process."""

    def _execute_child(  # noqa: PLR0917 - as it is called
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell, *others
    ):
        ends, (_, _, _, _, _, new_session, *_) = others[:6], others[6:]
        if not AVAILABLE:
            given = (args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell)
            return super()._execute_child(*given, *others)
        p2cread, _, _, c2pwrite, _, errwrite = ends
        standard = [own if end == -1 else end for own, end in enumerate((p2cread, c2pwrite, errwrite))]
        python, *arguments = map(os.fspath, args)
        assert python == sys.executable, f"only {sys.executable} can be forked, got {python}"
        command = Command(
            arguments,
            dict(os.environ if env is None else env),
            os.path.realpath(cwd or os.getcwd()),  # noqa: PTH109
            [0, 1, 2, *pass_fds],
            new_session,
        )
        self.pid = ZYGOTE.start(command, [*standard, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(*ends)
        return None


def run(
    command: Sequence[Any],
    *,
    timeout: float = 600.0,
    check: bool = False,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a Python command to its end, and return its exit code and what it printed."""
    with Popen(
        [os.fspath(part) if isinstance(part, Path) else str(part) for part in command],
        env=env,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            said, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, said, errors)
    if check:
        done.check_returncode()
    return done


def output_of(
    command: Sequence[Any], folder: Path, *, run: Callable[..., subprocess.CompletedProcess[str]] = run
) -> str:
    """Run a command in a folder, with what this interpreter finds, as if it were installed; return what it printed."""
    source = Path(__file__).resolve().parents[2] / "src"
    done = run(command, cwd=folder, env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (source, *sys.path)))})
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def spawned_by_forks() -> Iterator[None]:
    """Start the processes of multiprocessing's method "spawn" by forks, those of `lockstep.launch` among them."""
    usual = multiprocessing.util.spawnv_passfds

    def start(python: bytes, arguments: Sequence[Any], descriptors: Sequence[int]) -> int:
        if "--multiprocessing-fork" not in arguments:  # a helper that stays, not the process that was asked for
            return usual(python, arguments, descriptors)
        code = arguments[arguments.index("-c") :]
        targets = [0, 1, 2, *sorted(set(map(int, descriptors)))]
        command = Command([*map(str, code)], dict(os.environ), os.getcwd(), targets, new_session=False)  # noqa: PTH109
        return ZYGOTE.start(command, targets)

    multiprocessing.util.spawnv_passfds = start if AVAILABLE else usual
    try:
        yield
    finally:
        multiprocessing.util.spawnv_passfds = usual


@contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Let this process become the parent of a descendant whose own parent ends meanwhile."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def keep_large_modules() -> None:
    """Let the end of a forked process leave modules of other libraries as they are, which are most of what there is."""
    ours = {*sys.stdlib_module_names, "lockstep", "tests", "__main__"}
    for name, module in [] if WHOLE_END in os.environ else list(sys.modules.items()):
        if name.partition(".")[0] not in ours and not name.startswith("torch.distributed"):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))
            del sys.modules[name]


def received(channel: socket.socket, size: int) -> bytes:
    """Receive so many bytes."""
    parts = bytearray()
    while len(parts) < size:
        part = channel.recv(size - len(parts))
        if not part:
            raise ConnectionError("the process that others are forked from has ended")
        parts += part
    return bytes(parts)


def set_name(name: str) -> None:
    """Set the name by which /proc tells this process from others."""
    Path("/proc/self/comm").write_text(name)
