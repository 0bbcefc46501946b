"""The names of folders and files.

out/snapshots/00001200/model.safetensors    parameters and persistent buffers (model-NAME.safetensors for several)
                       state.safetensors    every other tensor
                       snapshot.json        the manifest, written last
                       about.json           host, clock and placement; never read back
"""

from __future__ import annotations

import re
from typing import Final

FOLDER: Final = "snapshots"
MANIFEST: Final = "snapshot.json"
STATE: Final = "state.safetensors"
ABOUT: Final = "about.json"
LOCK: Final = ".lock"
TEMPORARY: Final = ".tmp-"
DAMAGED: Final = "damaged-"

_MODEL_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,99}")
_UPDATE: Final = re.compile(r"[0-9]{8,20}")


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
