"""Set what makes the kernels of torch choose the same code on every processor, and check that it is in force.

ATen, MKL, its vector functions and oneDNN look at the processor, and in part at its caches, to choose kernels. Each of
the variables below takes one of these choices away:

* ``ATEN_CPU_CAPABILITY``: torch's own vector kernels.
* ``MKL_CBWR``: MKL's products, factorizations and Fourier transforms. Of its modes only COMPATIBLE is one code path
  for the processors of all vendors.
* ``MKL_VML_DEBUG_CPU_TYPE``: MKL's vector functions, which even in this mode use the approximate reciprocals and
  square roots of the processor, whose bits vendors choose.
* ``ONEDNN_MAX_CPU_ISA``: oneDNN.

oneDNN's convolutions are switched off, because they are cut by the size of the first cache, and so is NNPACK.

References: Intel, "Developer Guide for oneMKL", 2024, section "Obtaining Numerically Reproducible Results"; the oneDNN
documentation, "CPU Dispatcher Control".
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any, Final

import torch

from lockstep.errors import PortableKernelsError

PORTABLE_ENV: Final = "LOCKSTEP_PORTABLE"
"""The variable that asks for portable kernels; "1" in the processes of a run that has them."""

VARIABLES: Final = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_CBWR": "COMPATIBLE",
    "MKL_VML_DEBUG_CPU_TYPE": "1",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}
"""The variables that portable kernels need, with their values."""

CPU_INFO: Final = Path("/proc/cpuinfo")
NEEDED: Final = ("avx2", "fma")
"""The features that a processor must have, as Linux names them."""
CBWR_COMPATIBLE: Final = 3
"""MKL's number for the mode COMPATIBLE."""
VML_EXACT: Final = 1
"""The number of the processor type whose vector functions use no approximate instruction."""
CURE: Final = (
    "Call lockstep.use_portable_kernels() at the beginning of the program, before the first operation of torch, or "
    "start it by `lockstep run --portable`, or with the variables "
    + " ".join(f"{name}={value}" for name, value in VARIABLES.items())
    + f" {PORTABLE_ENV}=1."
)


def machine_problem(cpuinfo: str | None = None) -> str:
    """Return why this machine or this build of torch can have no portable kernels; empty if it can.

    Args:
        cpuinfo: What Linux says about the processor; by default that of this machine.
    """
    if platform.machine() not in {"x86_64", "AMD64"} or platform.libc_ver()[0] != "glibc":
        return f"Portable kernels need an x86-64 processor and glibc, got {platform.machine()} {platform.system()}."
    backends: Any = torch.backends  # torch does not declare all of these
    text = CPU_INFO.read_text(encoding="utf-8") if cpuinfo is None else cpuinfo
    listed = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    missing = [name for name in NEEDED if listed is not None and name not in listed[1].split()]
    if missing:
        return f"Portable kernels need a processor with AVX2 and FMA; this one lacks {' and '.join(missing)}."
    if not all(each.is_available() for each in (backends.mkl, backends.mkldnn)):
        return f"Portable kernels need a build of torch with MKL and oneDNN, which {torch.__version__} is not."
    return ""


def check_variables(variables: Mapping[str, str]) -> None:
    """Check that no variable has another value than portable kernels need.

    Args:
        variables: The environment variables.

    Raises:
        PortableKernelsError: If one has.
    """
    for name, value in VARIABLES.items():
        if variables.get(name, value).lower() != value.lower():
            raise PortableKernelsError(
                f"`{name}` must be {value} for portable kernels, got {variables[name]}. Unset it, or set it to {value}."
            )


def ask_for_portable_kernels(variables: MutableMapping[str, str]) -> None:
    """Set the variables with which new processes choose portable kernels before anything else can.

    Args:
        variables: The environment variables of the processes. Changed in place.

    Raises:
        ValueError: If one has another value.
    """
    try:
        check_variables(variables)
    except PortableKernelsError as error:
        raise ValueError(str(error)) from error
    variables.update(VARIABLES | {PORTABLE_ENV: "1"})


def apply_settings(variables: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables and switches of portable kernels.

    Args:
        variables: The environment variables. Changed in place, and left as they were after an error.

    Raises:
        PortableKernelsError: If torch has chosen other kernels already.
    """
    before = {name: variables.get(name) for name in VARIABLES}
    variables.update(VARIABLES)
    found = _too_late()
    if found:
        for name, value in before.items():
            if value is None:
                del variables[name]
            else:
                variables[name] = value
        raise PortableKernelsError(f"Portable kernels must be chosen before other kernels are: {found}. {CURE}")
    # An intra-op thread more or less changes sums, and processors have different numbers of cores.
    torch.set_num_threads(1)
    backends: Any = torch.backends  # torch does not declare all of these
    backends.mkldnn.enabled = False
    backends.nnpack.set_flags(False)


def _too_late() -> str:
    """Return which library has chosen its kernels without the variables; empty if none has."""
    # A choice is made by the first call, so each of these makes it with the variables if it was not made before.
    capability = torch.backends.cpu.get_cpu_capability()
    if capability != "AVX2":
        return f"torch uses those of {capability}"
    library: Any = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    try:
        mode, vector_type = library.mkl_serv_cbwr_set, library.mkl_vml_serv_cpu_detect
    except AttributeError:
        return "the MKL of this build of torch has no function to ask for its mode"
    if mode(CBWR_COMPATIBLE) != 0 and library.mkl_serv_cbwr_get(1) != CBWR_COMPATIBLE:
        return "MKL uses those of this processor"
    if vector_type() != VML_EXACT:
        return "MKL uses vector functions of this processor"
    return ""
