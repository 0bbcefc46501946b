"""The results of checks: printed, appended to a file one by one, and collected in one table."""

from __future__ import annotations

import json
import os
import platform
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import lockstep as ls


class Report:
    """The results of one call.

    Args:
        call: The name of the call.
        folder: The folder for the results.
        device: The device under test.
        only: Parts of names; other checks are left out. All are made if it is empty.
    """

    def __init__(self, call: str, folder: Path, device: str, only: Sequence[str]) -> None:
        self._folder, self._only = folder, only
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{call}.jsonl"
        self._num_failed = 0
        self._num_made = 0
        self._path.write_text(json.dumps({"call": call, **machine(device)}) + "\n", encoding="utf-8")
        print(", ".join(f"{name} {value}" for name, value in machine(device).items()), flush=True)

    def wants(self, name: str) -> bool:
        """Return whether a check is to be made."""
        return not self._only or any(each in name for each in self._only)

    def check(
        self, name: str, expected: Any, find: Callable[[], Any], holds: Callable[[Any], bool] | None = None
    ) -> None:
        """Make one check, and go on if it fails or raises.

        Args:
            name: What is checked.
            expected: What is expected, as the table shows it.
            find: Returns what was found.
            holds: Whether that is good; by default it is if it equals `expected`.
        """
        if not self.wants(name):
            return
        began = time.perf_counter()
        try:
            found = find()
            good = found == expected if holds is None else holds(found)
        except Exception as error:  # noqa: BLE001 - it is the result
            traceback.print_exc()
            found, good = f"{type(error).__name__}: {error}".partition("\n")[0], False
        self._add(name, str(expected), str(found), "ok" if good else "FAILED", time.perf_counter() - began)
        self._num_failed += not good

    def measure(self, name: str, find: Callable[[], Any]) -> None:
        """Find a figure from which nothing is expected; an error counts as a failure."""
        self.check(name, "", find, holds=lambda _: True)

    def end(self) -> int:
        """Write the table of all calls, and return the exit status."""
        table = self._folder / "table.md"
        table.write_text(as_markdown(sorted(self._folder.glob("*.jsonl"))), encoding="utf-8")
        print(f"{self._num_made} checks, {self._num_failed} failed; the table is in {table}", flush=True)
        return 1 if self._num_failed or not self._num_made else 0

    def _add(self, name: str, expected: str, found: str, outcome: str, seconds: float) -> None:
        row = {"check": name, "expected": expected, "found": found, "outcome": outcome, "seconds": round(seconds, 2)}
        # One by one: what was found stays if the call is ended in the middle.
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self._num_made += 1
        expectation = f" (expected {expected})" if expected else ""
        print(f"{outcome:6} {name}: {found}{expectation}", flush=True)


def machine(device: str) -> dict[str, str]:
    """Describe the machine, the versions and the settings."""
    where = torch.device(device)
    fields = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "device": device,
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "lockstep": ls.__version__,
    }
    if where.type == "cuda":
        properties = torch.cuda.get_device_properties(where)
        fields["GPU"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
        fields["CUDA"] = f"{torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
        fields["deterministic kernels"] = str(torch.are_deterministic_algorithms_enabled())
        fields["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return fields


def _processor() -> str:
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text(encoding="utf-8").splitlines() if cpus.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def as_markdown(paths: Sequence[Path]) -> str:
    """Return one table per call, below a description of the machine."""
    parts = []
    for path in paths:
        head, *rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        lines = [f"## {head.pop('call')}", "", ", ".join(f"{name} {value}" for name, value in head.items()), ""]
        lines += ["| check | expected | found | outcome | seconds |", "|---|---|---|---|--:|"]
        lines += ["| " + " | ".join(str(value).replace("|", "\\|") for value in row.values()) + " |" for row in rows]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)
