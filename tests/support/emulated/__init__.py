"""An emulated accelerator, which shows logic without a GPU: memory, copies, streams and waits.

`device.cpp` says what it emulates. It says nothing of CUDA's rounding, of its allocator, of asynchronous errors or of
speed. A process that loads it cannot unload it, and it has to be loaded before the first backward, which starts one
thread per device. So tests call functions in processes of their own, by `tests.support.emulated.pool`.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch

NAME = "emulated"
NUM_DEVICES = 4
SOURCE = Path(__file__).with_name("device.cpp")
PROJECT = Path(__file__).resolve().parents[3]
FLAGS = ["-O0", "-std=c++20", "-fPIC", "-shared", "-w"]
TORCH = Path(torch.__file__).parent


@dataclass(frozen=True)
class Event:
    """A wait of the host, or a race.

    Attributes:
        what: The kind of wait, such as "item", or a sentence about the race.
        place: The innermost line of Python outside of torch, as "src/lockstep/tree.py:12 total".
    """

    what: str
    place: str


@dataclass
class Record:
    """What the devices have observed inside `observed`."""

    waits: list[Event] = field(default_factory=list)
    races: list[Event] = field(default_factory=list)

    def waits_by_file(self) -> Counter[str]:
        """Count the waits per file of Python and kind, such as "src/lockstep/data/collate.py: copy to the device"."""
        return Counter(f"{wait.place.partition(':')[0]}: {wait.what}" for wait in self.waits)


_records: list[Record] = []


def compiler() -> str | None:
    """Return the path of a C++ compiler, or None."""
    names = [os.environ.get("CXX", ""), "g++", "c++", "clang++"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def build() -> Path:
    """Compile the accelerator, unless this source was compiled for this torch before."""
    found = compiler()
    assert found is not None, "there is no C++ compiler"
    key = [SOURCE.read_text(), torch.__version__, torch.version.git_version, sysconfig.get_platform(), *FLAGS]
    name = hashlib.sha256("\n".join(map(str, key)).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"lockstep-tests-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"emulated-{name}.so"
    with (folder / "lock").open("w") as lock:
        # The processes that share the tests come here at the same time; one of them compiles.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            part = folder / f"{name}.part"  # until it is whole, should this process be killed
            link = [f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{TORCH / 'lib'}"]
            command = [found, *FLAGS, f"-I{TORCH / 'include'}", str(SOURCE), "-o", str(part), *link]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"the emulated accelerator does not compile:\n{done.stderr[-4000:]}"
            part.replace(library)
    return library


def load() -> None:
    """Register the devices "emulated:0" to "emulated:3" in this process, once."""
    if hasattr(torch, NAME):
        return
    torch.utils.rename_privateuse1_backend(NAME)
    library = ctypes.CDLL(str(build()))
    library.emulated_register(_report_wait, _report_race)
    torch._register_device_module(NAME, _device_module(library))


@contextmanager
def observed() -> Iterator[Record]:
    """Return a record of what happens meanwhile, apart from what is still under way at its beginning."""
    record = Record()
    for index in range(NUM_DEVICES if hasattr(torch, NAME) else 0):
        torch.accelerator.synchronize(index)
    _records.append(record)
    try:
        yield record
    finally:
        _records.remove(record)


def _place() -> str:
    """Return the innermost place of the project in the calling thread's stack, or else of any code outside of torch."""
    frame: FrameType | None = sys._getframe(2)
    fallback = "autograd"
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PROJECT) and path.parent != SOURCE.parent:
            return f"{path.relative_to(PROJECT)}:{frame.f_lineno} {frame.f_code.co_name}"
        if fallback == "autograd" and not path.is_relative_to(TORCH) and path.parent != SOURCE.parent:
            fallback = f"{path}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return fallback


@ctypes.CFUNCTYPE(None, ctypes.c_char_p)
def _report_wait(what: bytes) -> None:
    event = Event(what.decode(), _place())
    for record in _records:
        record.waits.append(event)


@ctypes.CFUNCTYPE(None, ctypes.c_char_p)
def _report_race(what: bytes) -> None:
    event = Event(what.decode(), _place())
    for record in _records:
        record.races.append(event)


def _device_module(library: ctypes.CDLL) -> ModuleType:
    """Return what torch and its users find as `torch.emulated`, with the names of `torch.cuda`."""
    module = ModuleType(f"torch.{NAME}")
    library.emulated_hand_out_defaults(1)
    generators = tuple(torch.Generator(torch.device(NAME, index)) for index in range(NUM_DEVICES))
    library.emulated_hand_out_defaults(0)

    class device:  # noqa: N801 - as in torch.cuda
        def __init__(self, which: Any) -> None:
            self.index = _index(which)

        def __enter__(self) -> None:
            self.before = torch.accelerator.current_device_index()
            torch.accelerator.set_device_index(self.index)

        def __exit__(self, *error: object) -> None:
            torch.accelerator.set_device_index(self.before)

    def stream(which: torch.Stream | None) -> Any:
        return contextmanager(_no_stream)() if which is None else which

    functions: dict[str, Any] = {
        "device": device,
        "Stream": torch.Stream,
        "Event": torch.Event,
        "stream": stream,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_initialized": True,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: NUM_DEVICES,
        "current_device": torch.accelerator.current_device_index,
        "set_device": lambda which: torch.accelerator.set_device_index(_index(which)),
        "current_stream": lambda which=None: torch.accelerator.current_stream(_index(which)),
        "default_stream": lambda which=None: torch.Stream(stream_id=0, device_index=_index(which), device_type=20),
        "set_stream": torch.accelerator.set_stream,
        "synchronize": lambda which=None: torch.accelerator.synchronize(_index(which)),
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "default_generators": generators,
        "manual_seed_all": lambda seed: [each.manual_seed(seed) for each in generators],
        "manual_seed": lambda seed: generators[_index(None)].manual_seed(seed),  # noqa: PLW0108 - of the current device
        "get_rng_state": lambda which=None: generators[_index(which)].get_state(),
        "set_rng_state": lambda state, which=None: generators[_index(which)].set_state(state),
    }
    for name, value in functions.items():
        setattr(module, name, value)
    return module


def _no_stream() -> Iterator[None]:
    yield


def _index(which: Any) -> int:
    if isinstance(which, int):
        return which
    found = None if which is None else torch.device(which).index
    return torch.accelerator.current_device_index() if found is None else found
