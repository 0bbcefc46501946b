"""Choose portable kernels for this process."""

from __future__ import annotations

import os
from typing import Final

import torch

from lockstep.errors import PortableKernelsError
from lockstep.portable.settings import PORTABLE_ENV, apply_settings, check_variables, machine_problem

LIBRARIES: Final[list[torch.library.Library]] = []
"""What has registered the portable kernels of this process, if it has them. There is no way back, because MKL chooses
once."""


def is_portable() -> bool:
    """Return whether this process has portable kernels."""
    return bool(LIBRARIES)


def use_portable_kernels() -> None:
    """Compute on CPUs with kernels that give the same bits on every x86-64 processor with AVX2 and FMA.

    Without them, the determinism guarantee holds for one type of processor. With them it holds for one build of torch
    with MKL and one version of glibc. Call this function at the beginning of the program, before the first operation of
    torch, on every rank; or start the program by ``lockstep run --portable`` or with the environment variable
    ``LOCKSTEP_PORTABLE=1``, for which importing lockstep calls it. A further call has no effect.

    The settings belong to the process, apply to all of torch, and cannot be taken back. They are environment
    variables, which new processes inherit; ``torch.backends.mkldnn.enabled = False``; NNPACK off; and one intra-op
    thread outside of updates as well. float32 products and convolutions, and what else differs between processors,
    are computed in another way, by functions that are registered with torch's dispatcher.

    Then a few hundred results of kernels are compared with digests that ship with lockstep.

    Raises:
        PortableKernelsError: If this machine or build of torch can have no portable kernels, if torch has chosen other
            kernels before, if a variable has another value, if lockstep has no digests for this version of torch, or
            if a kernel gives other bits than the digest says. No kernel is replaced then.

    Determinism: bits differ from those of other kernels, and are the same wherever this function returns, as far as
    the digests tell. ``docs/reproducibility.md`` says what they do not.
    """
    if is_portable():
        return
    problem = machine_problem()
    if problem:
        raise PortableKernelsError(problem)
    check_variables(os.environ)
    # Imported here, because most processes use none of it.
    from lockstep.portable.golden import check_kernels, recorded_digests  # noqa: PLC0415
    from lockstep.portable.overrides import install  # noqa: PLC0415

    digests = recorded_digests()
    apply_settings()
    library = install()
    try:
        check_kernels(digests)
    except BaseException:
        library._destroy()  # type: ignore[no-untyped-call]  # noqa: SLF001 - torch has no other way
        raise
    LIBRARIES.append(library)
    os.environ[PORTABLE_ENV] = "1"


def use_portable_kernels_if_asked() -> None:
    """Choose portable kernels if the environment variable ``LOCKSTEP_PORTABLE`` asks for them.

    Raises:
        ValueError: If the variable is neither "0" nor "1".
        PortableKernelsError: As `use_portable_kernels` does.
    """
    asked = os.environ.get(PORTABLE_ENV, "0")
    if asked not in {"", "0", "1"}:
        raise ValueError(f"`{PORTABLE_ENV}` must be 0 or 1, got {asked}.")
    if asked == "1":
        use_portable_kernels()
