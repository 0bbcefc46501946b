"""The public face: which names there are, and that to import them changes nothing."""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

import lockstep as ls

PUBLIC = [
    "BatchIterator",
    "BatchLoss",
    "BatchSizeFinderResult",
    "Carried",
    "Communicator",
    "CorrectedMomentumSGD",
    "DataParallel",
    "DeterminismWarning",
    "DisagreementError",
    "DynamicLossScale",
    "EndOfDataError",
    "Extension",
    "FaultError",
    "IterableBatches",
    "LRFinderResult",
    "LocalCommunicator",
    "LockstepError",
    "Loss",
    "LossScale",
    "LossScaler",
    "MasterWeights",
    "ModelSummary",
    "MomentumSGD",
    "Monitor",
    "NonFiniteError",
    "NonFiniteWarning",
    "OnDevice",
    "OrderError",
    "ParallelUpdater",
    "PartError",
    "PeerError",
    "PeerInterrupt",
    "PortableKernelsError",
    "ProcessCommunicator",
    "RampLossScale",
    "RandomStreamWarning",
    "ReplayWarning",
    "ReplicaError",
    "ReplicaGroup",
    "ReplicaInterrupt",
    "Samples",
    "SideFileError",
    "SideFileWarning",
    "SignalExit",
    "SnapshotError",
    "SnapshotWarning",
    "StandardUpdater",
    "StateError",
    "StaticLossScale",
    "Trainer",
    "UpdateResult",
    "Updater",
    "WorkerError",
    "collate",
    "data",
    "digest",
    "extensions",
    "find_batch_size",
    "find_communicator",
    "find_lr",
    "launch",
    "metrics",
    "optim",
    "predict",
    "report",
    "seed_everything",
    "snapshots",
    "summarize_model",
    "supervised",
    "token_mean",
    "triggers",
    "use_deterministic_kernels",
    "use_portable_kernels",
]
"""To take a name away breaks those who use it; to add one is a promise. Both are decided here."""


IMPORT = """
import json, sys
import torch
import os, signal, threading

def state():
    keys = [torch.DispatchKey.CPU, torch.DispatchKey.BackendSelect, torch.DispatchKey.Autograd]
    registered = [sorted(torch._C._dispatch_get_registrations_for_dispatch_key(key.name)) for key in keys]
    return [
        torch.get_num_threads(), torch.get_num_interop_threads(), torch.get_default_dtype(),
        torch.get_rng_state().tolist(), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled(),
        torch.random.default_generator is torch.default_generator, torch.get_float32_matmul_precision(),
        torch.manual_seed, torch.random.manual_seed, torch.seed, torch.get_default_device(),
        signal.getsignal(signal.SIGINT), threading.active_count(), dict(os.environ), registered,
        sys.excepthook, threading.excepthook,
    ]

before, modules = state(), set(sys.modules)
import lockstep
found = {
    "changed": [index for index, (a, b) in enumerate(zip(before, state())) if a != b],
    "modules": sorted(set(sys.modules) - modules),
    "names": sorted(name for name in vars(lockstep) if name[0] != "_"),
}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def imported() -> dict[str, Any]:
    """Import torch and then lockstep in a new process, and return what the second import changed and loaded."""
    command = [sys.executable, "-c", IMPORT]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_public_names(imported: dict[str, Any]) -> None:
    parts = {
        "arguments",
        "communicators",
        "elsewhere",
        "errors",
        "nest",
        "plan",
        "portable",
        "precision",
        "prediction",
        "program",
        "replicas",
        "side_files",
        "state",
        "stopping",
        "streams",
        "strides",
    }
    parts |= {"trainer", "tree", "tuning", "updaters"}  # modules that Python binds because something imported them
    assert [name for name in imported["names"] if name not in parts] == PUBLIC


def test_every_public_name_says_what_it_is() -> None:
    undocumented = [name for name in PUBLIC if not vars(ls)[name].__doc__]
    assert undocumented == []


def test_to_import_it_changes_nothing_and_loads_nothing_heavy(imported: dict[str, Any]) -> None:
    assert imported["changed"] == []
    loaded = set(imported["modules"])
    heavy = {"matplotlib", "tqdm", "sklearn", "pandas", "scipy", "PIL", "tensorboard", "IPython", "ignite"}
    assert heavy.isdisjoint(name.partition(".")[0] for name in loaded)
    assert "lockstep.compat" not in loaded
    assert "torch.distributed.rpc" not in loaded
    assert "lockstep.trainer" in loaded


AGENT = ("torch.distributed.run", "torch.distributed.launcher", "torch.distributed.elastic", "torch.numa.binding")
"""About 50 modules by which `lockstep run` and torchrun start the ranks, and which the ranks do not need."""


def test_to_import_it_loads_little_beside_its_own_modules(imported: dict[str, Any]) -> None:
    # A count, because times depend on the machine: whether it may cache what it compiled, and what else runs there.
    others = [
        name for name in imported["modules"] if name.partition(".")[0] not in ("lockstep", *sys.stdlib_module_names)
    ]
    assert {name.partition(".")[0] for name in others} <= {"torch", "safetensors", "_remote_module_non_scriptable"}
    assert not [name for name in others if name.startswith(AGENT)]
    # 3 of safetensors, and 10 around torch.distributed.nn, which torch imports with the first optimizer anyway.
    assert len(others) < 20


def test_no_module_takes_the_place_of_a_public_function() -> None:
    """A module becomes an attribute of its package when it is imported first."""
    for module in pkgutil.walk_packages(ls.__path__, "lockstep."):
        if module.name != "lockstep.__main__":
            importlib.import_module(module.name)
    modules = {name for name, value in vars(ls).items() if isinstance(value, ModuleType)}
    assert modules & set(PUBLIC) == {"data", "extensions", "metrics", "optim", "snapshots", "triggers"}
