"""What a snapshot holds, and the names of its folder and files.

out/snapshots/00001200/model.safetensors    parameters and persistent buffers (model-NAME.safetensors for several)
                       state.safetensors    every other tensor
                       snapshot.json        the manifest, written last
                       about.json           host, clock, placement and program; in no digest
                       verified.json        that all ranks had the same bits, once they have compared them
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

FOLDER: Final = "snapshots"
MANIFEST: Final = "snapshot.json"
STATE: Final = "state.safetensors"
ABOUT: Final = "about.json"
VERIFIED: Final = "verified.json"
LOCK: Final = ".lock"
TEMPORARY: Final = ".tmp-"
DAMAGED: Final = "damaged-"
UNVERIFIED: Final = "unverified-"

_MODEL_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,99}")
_UPDATE: Final = re.compile(r"[0-9]{8,20}")


class Parent(NamedTuple):
    """The snapshot from which a run was resumed.

    Attributes:
        run_id: The run that wrote it.
        update: The update after which it was written.
    """

    run_id: str
    update: int


@dataclass(frozen=True, kw_only=True)
class Content:
    """The state of a run after an update, as it goes into a snapshot.

    Plain values are None, booleans, integers, numbers and text. A tree consists of plain values, tensors, lists,
    tuples, dicts (with plain values as keys) and Counters, as the `state_dict` of torch's optimizers and schedulers
    does.

    Attributes:
        progress: How far the run is, as a tree without tensors. The key ``"update"`` is required and holds the number
            of updates so far; it names the folder of the snapshot.
        run_id: The name of the run, which stays the same when it is resumed.
        parent: The snapshot from which the run was resumed, or None.
        recipe: The settings that define what the run computes, by name, as a tree without tensors.
        kernel_class: What the bits of the kernels depend on, by name, as a tree without tensors.
        models: The parameters and persistent buffers of each model, by the name of the model and by their bare names.
            Tensors may be tied: the same memory under several names.
        state: A tree of everything else that the determinism guarantee covers. A tensor that is the same memory as one
            of a model is stored once.
        surroundings: A tree of what belongs to the run but not to its result, such as triggers and logs in progress.
        metrics: Numbers that describe the snapshot, by name, from which the best one is chosen.
    """

    progress: Mapping[str, Any]
    run_id: str
    parent: Parent | None = None
    recipe: Mapping[str, Any] = field(default_factory=dict)
    kernel_class: Mapping[str, Any] = field(default_factory=dict)
    models: Mapping[str, Mapping[str, Any]]
    state: Any = None
    surroundings: Any = None
    metrics: Mapping[str, float] = field(default_factory=dict)


def without_sources(state: Any, recipe: Mapping[str, Any]) -> Any:
    """Return a state without the own states of data loaders, which no digest covers.

    A loader's position is in the state of its `IterableBatches` as well. Its own state may also hold numbers that it
    draws anew after a restart, such as the seed of the workers of torchdata's loader, which would differ although no
    batch does. In the state of any other iterator, the key ``"source"`` is like every other key.

    Args:
        state: The state of an updater, or what stands for it. It is not changed.
        recipe: The recipe of the run, which has a field ``batches_of`` for each `IterableBatches` and no other one.

    >>> state = {"iterators": {"main": {"position": 2, "source": {"seed": 7}}, "other": {"source": 5}}}
    >>> without_sources(state, {"iterator": "IterableBatches", "batches_of": None, "other.iterator": "Mixed"})
    {'iterators': {'main': {'position': 2, 'source': None}, 'other': {'source': 5}}}
    """
    # What is read may be anything.
    iterators = state.get("iterators") if isinstance(state, dict) else None
    if not isinstance(iterators, dict):
        return state
    loaders = {name for name in iterators if ("batches_of" if name == "main" else f"{name}.batches_of") in recipe}
    kept = {
        name: {**each, "source": None} if name in loaders and isinstance(each, dict) and "source" in each else each
        for name, each in iterators.items()
    }
    return {**state, "iterators": kept}


def training_of(content: Content) -> dict[str, Any]:
    """Return the part of a content that the determinism guarantee covers, as `Snapshot.digest` covers it."""
    state = without_sources(content.state, content.recipe)
    return {"progress": content.progress, "models": content.models, "state": state}


def folder_name(update: int) -> str:
    """Return the name of the folder of a snapshot.

    >>> folder_name(1200)
    '00001200'
    """
    return f"{update:08d}"


def update_of(name: str) -> int | None:
    """Return the update that a folder's name stands for, or None if it is not the name of a snapshot.

    >>> update_of("00001200"), update_of("damaged-00001200"), update_of("000000001200")
    (1200, None, None)
    """
    return int(name) if _UPDATE.fullmatch(name) and folder_name(int(name)) == name else None


def model_file(name: str) -> str:
    """Return the name of the file of a model.

    Raises:
        ValueError: If the name of the model cannot be part of the name of a file.

    >>> model_file("main"), model_file("generator")
    ('model.safetensors', 'model-generator.safetensors')
    """
    if not _MODEL_NAME.fullmatch(name):
        raise ValueError(f"Names of models must consist of letters, digits, `_`, `-` and `.`, got {name!r}.")
    return "model.safetensors" if name == "main" else f"model-{name}.safetensors"
