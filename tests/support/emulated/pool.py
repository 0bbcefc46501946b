"""Tests that run on the emulated devices, in processes that have them."""

from __future__ import annotations

import functools
import gc
import importlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch

from tests.support import emulated
from tests.support.rank_pool import RankPool
from tests.support.waiting import LONG

Test = TypeVar("Test", bound=Callable[..., None])

POOL = RankPool(first="from tests.support import emulated; emulated.load()")
"""Processes apart from those of other tests, which stay without an accelerator."""


def on_emulated_devices(test: Test) -> Test:
    """Run a test in a process that has the emulated devices; skip it where they cannot be compiled."""

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        build_or_skip()
        POOL.call(_run, [(test.__module__, test.__qualname__, arguments)])

    return run  # type: ignore[return-value]


def build_or_skip() -> None:
    """Compile the emulated devices; skip the test where that is not possible."""
    if emulated.compiler() is None:
        pytest.skip("the emulated accelerator needs a C++ compiler, and there is none")
    emulated.build()


def _run(module: str, name: str, arguments: dict[str, Any]) -> None:
    assert hasattr(torch, emulated.NAME)
    test: Any = getattr(importlib.import_module(module), name)
    with pytest.MonkeyPatch.context() as patch:
        # Seconds after which a loader kills a worker. Those that are forked with emulated devices do not end alone.
        patch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
        test.__wrapped__(**arguments)
        gc.collect()  # an updater, group or loader in a cycle is no leak
    for thread in threading.enumerate():
        if thread.name.startswith("lockstep-"):
            thread.join(LONG)  # told to end already
