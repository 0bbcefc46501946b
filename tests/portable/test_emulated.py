"""Runs with portable kernels have the same bits on emulated processors of several vendors as on this one.

The emulator is that of the variable LOCKSTEP_QEMU, or `qemu-x86_64` of the search path, of version 10 or newer: version
7.2 gathers wrongly. It emulates no AVX-512, and tells torch of other caches and vendors.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from functools import cache

import pytest
import torch

from lockstep.portable import PORTABLE_ENV, VARIABLES, machine_problem
from lockstep.portable.golden import file_of
from tests.support import zygote

PROCESSORS = ["Haswell", "EPYC-Genoa", "YongFeng", "max"]
OLDEST = 10
PROGRAM = ["-m", "tests.support.programs.portable"]
PLAIN = {name: value for name, value in os.environ.items() if name not in {*VARIABLES, PORTABLE_ENV}}
TIMEOUT = 1500


@cache
def emulator() -> str:
    """Return the path of the emulator, or why there is none."""
    found = os.environ.get("LOCKSTEP_QEMU") or shutil.which("qemu-x86_64")
    if found is None:
        return "there is no qemu-x86_64 in the search path, and LOCKSTEP_QEMU is not set"
    said = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    version = re.search(r"version (\d+)", said)
    if version is None or int(version[1]) < OLDEST:
        return f"{found} is older than version {OLDEST}, or not qemu"
    return found


pytestmark = [
    pytest.mark.skipif(
        bool(machine_problem()) or not file_of(torch.__version__).is_file(),
        reason=machine_problem() or f"no digests for torch {torch.__version__}",
    ),
    pytest.mark.skipif(" " in emulator(), reason=emulator()),
]


def emulated(processor: str, arguments: Sequence[str], **variables: str) -> subprocess.Popen[str]:
    """Start the program on an emulated processor."""
    command = [emulator(), "-cpu", processor, sys.executable, *PROGRAM, *arguments]
    return subprocess.Popen(
        command, env={**PLAIN, **variables}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def results_of(process: subprocess.Popen[str]) -> dict[str, object]:
    """Wait for the end of a program, and read what it printed."""
    with process:
        try:
            said, errors = process.communicate(timeout=TIMEOUT)
        finally:
            process.kill()
    assert process.returncode == 0, errors
    found: dict[str, object] = json.loads(said)
    return found


def native(arguments: Sequence[str]) -> dict[str, object]:
    done = zygote.run([sys.executable, *PROGRAM, *arguments], env=PLAIN)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


@pytest.mark.timeout(2 * TIMEOUT)
def test_the_cases_are_equal_on_haswell() -> None:
    """The start of the program compares them; `machine_problem` and the checks of settings pass there as well."""
    assert results_of(emulated("Haswell", ["cases"])) == native(["cases"])


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT)
@pytest.mark.parametrize("processor", PROCESSORS)
def test_whole_runs_are_equal(processor: str) -> None:
    arguments = ["sgd", "adamw", "lars"]
    assert results_of(emulated(processor, arguments)) == native(arguments)


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT)
@pytest.mark.parametrize("processor", PROCESSORS)
def test_larger_cases_are_equal(processor: str) -> None:
    assert results_of(emulated(processor, ["larger"])) == native(["larger"])


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT)
def test_a_native_rank_trains_with_an_emulated_one() -> None:
    alone = native(["sgd"])["digests"]
    assert isinstance(alone, dict)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "LOCKSTEP_TIMEOUT": "900",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    other = emulated("Haswell", ["rank", "sgd"], RANK="1", LOCAL_RANK="1", **run)
    first = subprocess.Popen(
        [sys.executable, *PROGRAM, "rank", "sgd"],
        env={**PLAIN, **run, "RANK": "0", "LOCAL_RANK": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        found = [results_of(first)]
    finally:
        # It has printed its results before the first rank ended, and may hang in the emulator.
        other.kill()
        said, errors = other.communicate()
    assert said, errors
    expected = {name.split()[0]: digests[0] for name, digests in alone.items()}
    assert [*found, json.loads(said)] == [expected, expected]
