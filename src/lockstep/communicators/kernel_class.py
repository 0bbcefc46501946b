"""Say what must be alike wherever shards are computed: builds, processors, switches; and try it out.

Equal kernels on equal numbers give equal bits; other builds, processors or vector widths round differently.
What is listed here decides which kernels run. The self-test computes with a few of them, for what no list can
know, and tells a wrong number of intra-op threads as well.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch.nn import functional

from lockstep.digest import digest

LIBRARIES: Final = (
    "ATEN_",
    "CUBLAS_",
    "DNNL_",
    "KMP_",
    "MKL_",
    "NVIDIA_TF32",
    "OMP_",
    "ONEDNN_",
    "OPENBLAS_",
)
"""Beginnings of the names of variables that choose kernels."""

ABOUT_PLACES: Final = frozenset(
    {
        "KMP_AFFINITY",
        "KMP_BLOCKTIME",
        "KMP_DUPLICATE_LIB_OK",
        "KMP_INIT_AT_FORK",
        "MKL_NUM_THREADS",
        "OMP_NUM_THREADS",
        "OMP_PLACES",
        "OMP_PROC_BIND",
    }
)
"""Variables that may differ without showing in a result: lockstep sets the number of threads itself."""

Fields = dict[str, str]
"""What was found, by the name that an error gives it."""


def kernel_class(devices: Iterable[torch.device], variables: Mapping[str, str] | None = None) -> Fields:
    """List what decides which kernels run.

    Args:
        devices: Of this process.
        variables: The environment; this process's unless given.

    >>> fields = kernel_class([torch.device("cpu")])
    >>> fields["torch"].startswith(torch.__version__)
    True
    """
    variables = os.environ if variables is None else variables
    chosen = {
        f"${name}": value
        for name, value in sorted(variables.items())
        if name.startswith(LIBRARIES) and name not in ABOUT_PLACES
    }
    kinds = sorted({device.type for device in devices})
    gpus = [_gpu(device) for device in devices if device.type == "cuda"]
    return {
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "vector width": torch.backends.cpu.get_cpu_capability(),
        "processor": _processor(),
        "caches": _caches(),
        "torch build": hashlib.sha256(torch.__config__.show().encode()).hexdigest()[:16],
        "kinds of devices": ", ".join(kinds),
        **_switches(),
        "GPUs": ", ".join(sorted(set(gpus))),
        **chosen,
    }


def _switches() -> Fields:
    """List the switches of torch that choose kernels or formats."""
    return {
        "default dtype": str(torch.get_default_dtype()),
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        **_float32_precision(),
        "oneDNN enabled": str(torch.backends.mkldnn.enabled),
    }


def _float32_precision() -> Fields:
    """List the formats in which kernels of CUDA and of oneDNN may multiply float32: "ieee", "tf32" or "bf16".

    ``allow_tf32`` and ``set_float32_matmul_precision`` set these, too, but reading those raises where they
    cannot say what ``fp32_precision`` was set to. Only "tf32" and "bf16" choose other kernels, so "none"
    (nothing was set) is "ieee" here: asking for full precision must not tell a rank from one that has it.
    """
    backends: Any = torch.backends  # torch does not declare all of these
    cuda, cudnn, onednn = backends.cuda, backends.cudnn, backends.mkldnn
    read = {
        "float32 precision": {"all": backends, "cuDNN": cudnn, "oneDNN": onednn},
        "float32 matmul precision": {"CUDA": cuda.matmul, "oneDNN": onednn.matmul},
        "float32 convolution precision": {"cuDNN": cudnn.conv, "oneDNN": onednn.conv},
        "float32 RNN precision": {"cuDNN": cudnn.rnn, "oneDNN": onednn.rnn},
    }
    return {
        name: ", ".join(f"{owner} {_format_of(each)}" for owner, each in owners.items())
        for name, owners in read.items()
    }


def _format_of(owner: Any) -> str:
    precision: str = owner.fp32_precision
    return "ieee" if precision == "none" else precision


def _processor() -> str:
    """Name the processor and, where the system lists them, its features."""
    wanted = ("vendor_id", "cpu family", "model", "stepping", "flags", "CPU part", "Features")
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n", 1)[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    pairs = (line.partition(":") for line in first.splitlines())
    found = {name.strip(): value.strip() for name, _, value in pairs}
    for long in ("flags", "Features"):
        if long in found:
            features = " ".join(sorted(found[long].split()))
            found[long] = hashlib.sha256(features.encode()).hexdigest()[:16]
    named = ", ".join(f"{name} {found[name]}" for name in wanted if name in found)
    return f"{platform.machine()} {named}"


def _caches() -> str:
    """List the sizes of the first core's caches, by which oneDNN cuts its work, where the system tells."""
    folder = Path("/sys/devices/system/cpu/cpu0/cache")
    return ", ".join(each.read_text(encoding="utf-8").strip() for each in sorted(folder.glob("index*/size")))


def _gpu(device: torch.device) -> str:
    properties = torch.cuda.get_device_properties(device)
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]  # torch's gap
    return (
        f"{properties.name} {properties.major}.{properties.minor}, CUDA {torch.version.cuda}, "
        f"cuDNN {cudnn}, benchmark {torch.backends.cudnn.benchmark}"
    )


def self_test(device: torch.device) -> Fields:
    """Compute with a few kernels, forward and backward, in the state in which shards are computed.

    Args:
        device: Where.

    Returns:
        The digest of each kernel's numbers, by name. Takes a fraction of a second.

    Determinism: that of the kernels, which is what is asked.
    """
    return {f"self-test of {name}": _tried(kernel, device) for name, kernel in KERNELS.items()}


def _tried(kernel: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> str:
    numbers = _numbers(device).requires_grad_()
    with torch.enable_grad():
        output = kernel(numbers)
        (output * output).sum().backward()  # type: ignore[no-untyped-call]  # torch's gap
    return digest([output.detach(), numbers.grad])[:32]


def _numbers(device: torch.device) -> torch.Tensor:
    """Give numbers in about -1..1 whose sums are rounded, made without a generator: 3 x 257 x 131."""
    counted = torch.arange(3 * 257 * 131, dtype=torch.int64)
    mixed = counted * 48_271 % 65_537 - 32_768
    return (mixed.to(torch.float32) / 29_999).reshape(3, 257, 131).to(device)


KERNELS: Final[Mapping[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "a matrix product": lambda x: x @ x.transpose(1, 2),
    "a convolution": lambda x: functional.conv2d(x.unsqueeze(1), x.reshape(-1)[: 4 * 9].reshape(4, 1, 3, 3)),
    "a sum": lambda x: x.reshape(-1).sum(),
    "a normalisation": lambda x: functional.layer_norm(x, (131,)),
    "activations": lambda x: functional.mish(torch.sigmoid(x)) + functional.gelu(x),
    "a softmax": lambda x: functional.log_softmax(x, -1),
}
