"""The process that others are forked from by `tests.support.zygote`, and what its forks do first."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import os
import pickle
import runpy
import signal
import socket
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import CodeType

import pytest  # noqa: F401 - which the modules of tests import, whose functions are to run in forks
import torch
import torch._dynamo
import torch.distributed.run
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

import tests.support.rank_pool  # noqa: F401 - a part of what the forks are not to import again
from tests.support import zygote
from tests.support.zygote import received, set_name

CLONE_NEWNET, CLONE_NEWUTS = 0x40000000, 0x04000000
"""The kinds of namespaces of a network and of a host's name for Linux's setns(2) and unshare(2)."""
PATH: list[str] = []
"""Where every process looks for modules; the variable PYTHONPATH and the script's own folder come before."""


def main(descriptor: int, path: Sequence[str]) -> CodeType:
    """Serve; return in each fork the code that it is to run as `__main__`.

    Args:
        descriptor: The number of this end of the connection.
        path: Where this process looked for modules when it started.
    """
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a thread would be missing in the forks"
    PATH[:] = [each for each in path if each not in _python_path()]
    for module in os.environ.get("PRELOADED", "").split():
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # or the first collection of every fork would copy all pages
    return _serve(descriptor)


def _serve(descriptor: int) -> CodeType:
    """Fork a process for each command that comes, until the connection ends; return only in the forks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # May be ignored, as under nohup. A fork ignores what its parent does.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    set_name(zygote.NAME)
    channel = socket.socket(fileno=descriptor)
    while True:
        try:
            header, descriptors, _, _ = socket.recv_fds(channel, 8, 64)
            size = int.from_bytes(header + received(channel, 8 - len(header)), "little")
            command: zygote.Command = pickle.loads(received(channel, size))  # noqa: S301 - from our parent
        except (ConnectionError, EOFError):
            os._exit(0)
        wait, go = os.pipe()
        told, tell = os.pipe()
        # The child of a child that ends at once becomes a child of the process that asked for it.
        between = os.fork()
        if between == 0:
            process = os.fork()
            if process != 0:
                os.write(tell, process.to_bytes(8, "little"))
                os._exit(0)
            os.close(go)
            os.read(wait, 1)  # ends once this process has its parent; who asks for it before would get another
            channel.detach()
            return _become(command, descriptors)
        os.waitpid(between, 0)
        answer = os.read(told, 8)
        for each in (wait, go, told, tell, *descriptors):
            os.close(each)
        channel.sendall(answer)


def _become(command: zygote.Command, descriptors: Sequence[int]) -> CodeType:
    """Become what a new process with this command would be, and return its code."""
    set_name("python")
    if command.new_session:
        os.setsid()
    _place(descriptors, command.targets)
    os.environ.clear()
    os.environ.update(command.variables)
    os.chdir(command.folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for each in command.ignored:
        signal.signal(each, signal.SIG_IGN)
    if zygote.WHOLE_END not in os.environ:
        library = ctypes.CDLL(None)
        library.on_exit(library._exit, None)  # before all that was registered in C and C++
    if zygote.NETWORK in os.environ:
        _enter_network(os.environ[zygote.NETWORK])
    if zygote.HOST in os.environ:
        _set_name_of_host(os.environ[zygote.HOST])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    arguments = list(command.arguments)
    while arguments[0] in {"-u", "-W"}:
        if arguments.pop(0) == "-u":
            sys.stdout.reconfigure(write_through=True)
        else:
            warnings.simplefilter(arguments.pop(0))
    if arguments[0] == "-m" and arguments[1] in zygote.AGENTS and (code := _fork_a_zygote()):
        return code
    return _main_code(arguments)


def _place(descriptors: Sequence[int], targets: Sequence[int]) -> None:
    """Give file descriptors their numbers, and close all others."""
    beyond = max(targets, default=2) + 1
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD, max(beyond, 256)) for each in descriptors]
    os.closerange(3, min(moved))
    for source, target in zip(moved, targets, strict=True):
        os.dup2(source, target, inheritable=True)
    os.closerange(min(moved), max(moved) + 1)


def _enter_network(namespace: str) -> None:
    """Move this process, which has one thread, to a network namespace."""
    with Path("/run/netns", namespace).open(encoding="utf-8") as opened:
        library = ctypes.CDLL(None, use_errno=True)
        if library.setns(opened.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")


def _set_name_of_host(name: str) -> None:
    """Give the machine another name for this process and its children."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUTS) != 0:
        raise OSError(ctypes.get_errno(), "cannot leave the namespace of the host's name")
    socket.sethostname(name)


def _fork_a_zygote() -> CodeType | None:
    """Fork the process that the processes of this one are forked from; return code only in these."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):
            os.dup2(nothing, standard)  # or a reader of what the agent prints would wait for both to end
        return _serve(theirs.detach())
    theirs.close()
    zygote.ZYGOTE.adopt(ours)
    subprocess_handler.Popen = zygote.Popen
    return None


def _python_path() -> list[str]:
    return list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))


def _main_code(arguments: list[str]) -> CodeType:
    """Return what Python would run with some arguments, and prepare `__main__` for it."""
    sys.path[:] = [*_python_path(), *PATH]
    module = vars(sys.modules["__main__"])
    for name in [each for each in module if not each.startswith("__")]:
        del module[name]
    first, *others = arguments
    if first == "-c":
        sys.argv = ["-c", *others[1:]]
        sys.path.insert(0, "")
        return compile(others[0], "<string>", "exec", dont_inherit=True)
    if first == "-m":
        sys.argv = ["-m", *others[1:]]
        sys.path.insert(0, str(Path.cwd()))
        module["runpy"] = runpy
        return compile(f"runpy._run_module_as_main({others[0]!r})", "<string>", "exec", dont_inherit=True)
    sys.argv = [first, *others]
    sys.path.insert(0, str(Path(first).resolve().parent))
    module["__file__"] = first
    return compile(Path(first).read_bytes(), first, "exec", dont_inherit=True)
