"""Compare the results of kernels with the digests that ship with lockstep."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import torch

from lockstep.digest import digest
from lockstep.errors import PortableKernelsError, few
from lockstep.portable.cases import CASES, Case, Numbers

FOLDER: Final = Path(__file__).parent / "digests"
DIGITS: Final = 12
"""The number of hexadecimal digits of a digest that are kept."""
MOST_NAMES: Final = 5
"""The number of kernels that an error names at most."""


def libc_version() -> str:
    """Return the version of the C library, such as "glibc 2.36"."""
    return " ".join(platform.libc_ver())


def file_of(version: str) -> Path:
    """Return the file with the digests of a version of torch.

    >>> file_of("2.13.0+cpu").name
    'torch-2.13.json'
    """
    return FOLDER / f"torch-{'.'.join(version.split('.')[:2])}.json"


def recorded_digests() -> dict[str, str]:
    """Return the digests of the installed version of torch with the C library of this machine, by the name of the case.

    Raises:
        PortableKernelsError: If there are none.
    """
    file = file_of(torch.__version__)
    if not file.is_file():
        have = ", ".join(sorted(each.stem.removeprefix("torch-") for each in FOLDER.glob("torch-*.json")))
        raise PortableKernelsError(
            f"lockstep has no digests of portable kernels for torch {torch.__version__}, only for {have}. Install one "
            "of these, or record digests by `python -m lockstep.portable.record` on processors of two vendors, compare "
            f"them, and save them as {file}."
        )
    read = json.loads(file.read_text(encoding="utf-8"))
    return {**read["common"], **read["C library"].get(libc_version(), {})}


def digests_of(cases: Mapping[str, Case]) -> dict[str, str]:
    """Compute cases, and return the digest of the results of each, by name."""
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        return {name: digest(list(case(Numbers(name))))[:DIGITS] for name, case in cases.items()}


def check_kernels(expected: Mapping[str, str]) -> None:
    """Compare the kernels of this process with recorded digests.

    Args:
        expected: The digests.

    Raises:
        PortableKernelsError: If a kernel gives other bits; it names the first ones.
    """
    found = digests_of({name: case for name, case in CASES.items() if name in expected})
    differing = differing_names(expected, found)
    if differing:
        raise PortableKernelsError(
            f"This machine gives other bits than those recorded for torch {torch.__version__} and {libc_version()}, "
            f"for {len(differing)} of {len(expected)} results of kernels: {few(differing, MOST_NAMES)}. It cannot take "
            "part in runs with portable kernels. Check that torch is a build that PyTorch has published, with MKL."
        )


def differing_names(expected: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """Return the names whose digests differ, in their order.

    >>> differing_names({"a": "1", "b": "2"}, {"a": "1", "b": "3"})
    ['b']
    """
    names: Iterable[str] = {**expected, **found}
    return [name for name in names if expected.get(name) != found.get(name)]
