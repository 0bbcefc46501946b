"""Choose kernels of CUDA devices that give the same bits in every run, and warn where they are not chosen."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Final, Literal

import torch

from lockstep.errors import DeterminismWarning, warn

CUBLAS_VARIABLE: Final = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_VALUES: Final = (":4096:8", ":16:8")
"""The workspaces with which cuBLAS gives the same bits in every run, according to its documentation."""


class KernelNotice:
    """Whether this process needs no warning about its kernels, because it was given or their choice was declared."""

    settled = False


NOTICE: Final = KernelNotice()
"""The notice of this process. There is only one, because torch's choice of kernels belongs to the process."""


def use_deterministic_kernels(mode: bool | Literal["warn"] = True) -> AbstractContextManager[object]:
    """Choose whether operations run on kernels that give the same bits in every run.

    On CPUs most kernels do; ``Tensor.put_`` and ``torch.linalg.lstsq`` with its default driver do not. On CUDA devices
    the determinism guarantee holds for deterministic kernels only. This function calls
    `torch.use_deterministic_algorithms`, turns off `torch.backends.cudnn.benchmark`, by which cuDNN would choose
    kernels by the clock, and sets the environment variable ``CUBLAS_WORKSPACE_CONFIG`` to ``:4096:8`` if it is not set.
    Call it before anything runs on a GPU: cuBLAS and torch read the variable once.

    The settings belong to the process and apply to all of torch. Set them on every rank. Call the function on its own,
    or in a ``with`` statement, at whose end the settings are those from before, as with `torch.set_grad_enabled`.

    Args:
        mode: True for deterministic kernels; operations that have none raise. With ``"warn"`` they run all the same,
            and torch warns of them. False for the fastest kernels, without the warning that lockstep gives otherwise.

    Returns:
        A context manager that restores the settings.

    Raises:
        ValueError: If there is no such mode, or if ``CUBLAS_WORKSPACE_CONFIG`` has a value with which cuBLAS is not
            deterministic. Nothing has changed then.

    Determinism: bits of different modes may differ. Ranks compare their settings when a run starts.

    References: the PyTorch documentation, "Reproducibility"; the cuBLAS documentation, "Results Reproducibility".

    >>> with use_deterministic_kernels():
    ...     torch.are_deterministic_algorithms_enabled()
    True
    >>> torch.are_deterministic_algorithms_enabled()
    False
    """
    if not isinstance(mode, bool) and mode != "warn":
        raise ValueError(f"`mode` must be True, False or 'warn', got {mode!r}.")
    workspace = os.environ.get(CUBLAS_VARIABLE)
    if mode and workspace is not None and workspace not in CUBLAS_VALUES:
        raise ValueError(
            f"`mode` must be False if the environment variable {CUBLAS_VARIABLE} is {workspace!r}, got {mode!r}. Set "
            f"the variable to {CUBLAS_VALUES[0]!r}, or unset it."
        )
    restore = ExitStack()
    restore.callback(
        torch.use_deterministic_algorithms,
        torch.are_deterministic_algorithms_enabled(),
        warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(bool(mode), warn_only=mode == "warn")
    restore.callback(setattr, NOTICE, "settled", NOTICE.settled)
    NOTICE.settled = not mode
    if mode:
        restore.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
        torch.backends.cudnn.benchmark = False
        if workspace is None:
            restore.callback(os.environ.pop, CUBLAS_VARIABLE, None)
            os.environ[CUBLAS_VARIABLE] = CUBLAS_VALUES[0]
    return restore


def missing_settings(variables: Mapping[str, str]) -> list[str]:
    """List what is not set as deterministic kernels of CUDA need it.

    Args:
        variables: The environment variables.
    """
    found = {
        "torch.use_deterministic_algorithms(True)": torch.are_deterministic_algorithms_enabled(),
        f"{CUBLAS_VARIABLE}={CUBLAS_VALUES[0]}": variables.get(CUBLAS_VARIABLE) in CUBLAS_VALUES,
        "torch.backends.cudnn.benchmark = False": not torch.backends.cudnn.benchmark,
    }
    return [name for name, is_set in found.items() if not is_set]


def warn_of_kernels(variables: Mapping[str, str]) -> None:
    """Warn once per process that kernels of CUDA devices may give other bits in every run, unless that was accepted.

    Args:
        variables: The environment variables.
    """
    missing = [] if NOTICE.settled else missing_settings(variables)
    if missing:
        NOTICE.settled = True
        warn(
            f"Kernels of CUDA may give other bits in every run, because these are not set: {', '.join(missing)}. Call "
            "lockstep.use_deterministic_kernels() before anything runs on a GPU, or "
            "lockstep.use_deterministic_kernels(False) if you prefer the fastest kernels.",
            DeterminismWarning,
        )


def cure_of(error: Exception) -> str:
    """Return what to do about an error of a kernel, as a sentence to append to its message; empty for other errors.

    Args:
        error: The error.
    """
    message = str(error)
    if "does not have a deterministic implementation" in message:
        return (
            " In lockstep, use_deterministic_kernels('warn') runs this operation all the same and warns, and "
            "use_deterministic_kernels(False) chooses the fastest kernels for all operations."
        )
    if "it uses CuBLAS" in message:
        return " Or call lockstep.use_deterministic_kernels() before anything runs on a GPU, which sets the variable."
    if "backward through the graph a second time" in message:
        return (
            " In lockstep this is a tensor of another shard, if a forward hook or the loss function keeps outputs in a "
            "dict, list or variable that all devices share: keep them in an attribute of the module, of which each "
            "device has a copy. Or it is one of an earlier batch, if a module keeps it, such as a hidden state: detach "
            "it, begin with a new one in every forward, or pass the states as `carried`."
        )
    if "modified by an inplace operation" in message or "leaf Variable that requires grad is being used" in message:
        return (
            " In lockstep the inputs of a shard are a part of those of the batch. A model whose first operation "
            "changes them in place, such as ReLU(inplace=True) or `x *= 2`, must create a new tensor: `x = x * 2`."
        )
    if isinstance(error, torch.AcceleratorError):
        return (
            " An accelerator reports errors of kernels late, so an earlier shard may have caused it. Start the program "
            "with CUDA_LAUNCH_BLOCKING=1 to find out which."
        )
    return ""
