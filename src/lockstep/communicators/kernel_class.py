"""Describe what must be equal wherever shards are computed: builds, processors and settings; and test it.

Equal kernels compute equal bits from equal numbers. Other builds, processors or vector widths round differently.
The description lists what decides which kernels run. The self-test runs a few kernels, to detect differences that
no list can show, including a wrong number of intra-op threads.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch.nn import functional

from lockstep.digest import digest
from lockstep.portable import VARIABLES as PORTABLE_VARIABLES, is_portable
from lockstep.state import temporarily

KERNEL_VARIABLES: Final = re.compile(
    r"(ATEN|CUBLAS|DNNL|FBGEMM|KMP|MKL|OMP|ONEDNN|OPENBLAS)_.*|(GLIBC_TUNABLES|NVIDIA_TF32).*", re.DOTALL
)
"""The environment variables by which libraries choose kernels."""
THREAD_VARIABLES: Final = re.compile(
    r"(MKL|OMP)_NUM_THREADS|OMP_(PLACES|PROC_BIND)|KMP_(AFFINITY|BLOCKTIME|DUPLICATE_LIB_OK|INIT_AT_FORK)"
)
"""Those that may differ without changing a result, because lockstep sets the number of threads itself."""
PROCESSOR: Final = re.compile(
    r"^(vendor_id|cpu family|model|stepping|flags|CPU part|Features)[ \t]*:[ \t]*(.*?)[ \t]*$", re.MULTILINE
)
"""The lines in which Linux describes a core."""

Fields = dict[str, str]
"""Properties as text, by the name that an error uses for them."""


def kernel_class(devices: Iterable[torch.device], variables: Mapping[str, str] | None = None) -> Fields:
    """Return the properties that decide which kernels run.

    Portable kernels do not depend on the processor, so its properties are left out if this process has chosen them.

    Args:
        devices: The devices of this process.
        variables: The environment variables; by default those of this process.

    >>> fields = kernel_class([torch.device("cpu")])
    >>> fields["torch"].startswith(torch.__version__)
    True
    """
    variables, devices = os.environ if variables is None else variables, list(devices)
    chosen = {
        f"${name}": value
        for name, value in sorted(variables.items())
        if KERNEL_VARIABLES.fullmatch(name) and not THREAD_VARIABLES.fullmatch(name)
    }
    # oneDNN blocks its loops by the sizes of the caches of a core, and another blocking sums in another order.
    caches = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    processor = {
        "vector width": torch.backends.cpu.get_cpu_capability(),
        "processor": _describe_processor(),
        "caches": ", ".join(each.read_text(encoding="utf-8").strip() for each in caches),
    }
    if is_portable():
        processor = {"processor": "portable kernels"}
        chosen = {name: value for name, value in chosen.items() if name[1:] not in PORTABLE_VARIABLES}
    properties = [torch.cuda.get_device_properties(device) for device in devices if device.type == "cuda"]
    return {
        "torch": f"{torch.__version__} {torch.version.git_version}",
        **processor,
        # Its mathematical functions compute what vector kernels leave over, and differ between versions.
        "C library": " ".join(platform.libc_ver()),
        # The text is hashed, because it is long and an error prints the values.
        "torch build": hashlib.sha256(torch.__config__.show().encode()).hexdigest()[:16],
        "kinds of devices": ", ".join(sorted({device.type for device in devices})),
        "default dtype": str(torch.get_default_dtype()),
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        **_describe_float32_precision(),
        "oneDNN enabled": str(torch.backends.mkldnn.enabled),
        "GPUs": ", ".join(sorted({f"{each.name} {each.major}.{each.minor}" for each in properties})),
        **(_describe_cuda_settings() if properties else {}),
        **chosen,
    }


def _describe_float32_precision() -> Fields:
    """Return the formats in which CUDA and oneDNN kernels may multiply float32: "ieee", "tf32" or "bf16"."""
    # ``allow_tf32`` and ``set_float32_matmul_precision`` change these settings as well, but reading those raises if
    # they cannot express what ``fp32_precision`` was set to.
    backends: Any = torch.backends  # torch does not declare all of these
    cuda, cudnn, onednn = backends.cuda, backends.cudnn, backends.mkldnn
    read = {
        "float32 precision": {"all": backends, "cuDNN": cudnn, "oneDNN": onednn},
        "float32 matmul precision": {"CUDA": cuda.matmul, "oneDNN": onednn.matmul},
        "float32 convolution precision": {"cuDNN": cudnn.conv, "oneDNN": onednn.conv},
        "float32 RNN precision": {"cuDNN": cudnn.rnn, "oneDNN": onednn.rnn},
    }
    # Only "tf32" and "bf16" choose other kernels. A rank that asks for full precision must not differ from one that
    # has it because nothing was set.
    return {
        name: ", ".join(f"{owner} {each.fp32_precision.replace('none', 'ieee')}" for owner, each in owners.items())
        for name, owners in read.items()
    }


def _describe_processor() -> str:
    """Return the model of the processor and, if the system lists them, a hash of its features."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    found = dict(PROCESSOR.findall(first))
    for long in found.keys() & {"flags", "Features"}:
        # The features are sorted, because their order does not depend on the processor alone.
        features = " ".join(sorted(found[long].split()))
        found[long] = hashlib.sha256(features.encode()).hexdigest()[:16]
    # Of ARM's processors, Linux lists the features first.
    listed = sorted(found.items(), key=lambda field: field[0] == "Features")
    return f"{platform.machine()} {', '.join(f'{name} {value}' for name, value in listed)}"


def _describe_cuda_settings() -> Fields:
    """Return the libraries of CUDA and the settings by which they choose kernels."""
    cuda: Any = torch.backends.cuda
    cudnn: Any = torch.backends.cudnn
    sums = {
        "float16 in reduced precision": cuda.matmul.allow_fp16_reduced_precision_reduction,
        "bfloat16 in reduced precision": cuda.matmul.allow_bf16_reduced_precision_reduction,
        "float16 accumulated in float16": cuda.matmul.allow_fp16_accumulation,
        "half precision in the attention formula": cuda.fp16_bf16_reduction_math_sdp_allowed(),
    }
    attention = {
        "flash": cuda.flash_sdp_enabled(),
        "memory-efficient": cuda.mem_efficient_sdp_enabled(),
        "formula": cuda.math_sdp_enabled(),
        "cuDNN": cuda.cudnn_sdp_enabled(),
    }
    return {
        "CUDA": str(torch.version.cuda),
        "cuDNN": str(cudnn.version()),
        "cuDNN settings": f"enabled {cudnn.enabled}, benchmark {cudnn.benchmark}, deterministic {cudnn.deterministic}",
        "matrix products": f"{cuda.preferred_blas_library()}, {cuda.preferred_linalg_library()}",
        "sums in matrix products": ", ".join(name for name, is_allowed in sums.items() if is_allowed),
        "attention kernels": ", ".join(name for name, is_enabled in attention.items() if is_enabled),
    }


def self_test(device: torch.device) -> Fields:
    """Run a few kernels forward and backward, in the state in which shards are computed.

    Args:
        device: The device to run the kernels on.

    Returns:
        The digest of the results of each kernel, by name. Computing it takes a fraction of a second.

    Determinism: the digests depend on the kernels, which is what the test is for.
    """
    return {f"self-test of {name}": _digest_of(kernel, device) for name, kernel in KERNELS.items()}


def _digest_of(kernel: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> str:
    numbers = _test_input(device).requires_grad_()
    # The caller may have disabled gradients. cuDNN may otherwise choose other algorithms for a convolution each time,
    # and equal ranks would seem to differ. Not by `cudnn.flags`, which reads the format of float32 and raises if that
    # was set in more than one way.
    with torch.enable_grad(), temporarily(torch.backends.cudnn, benchmark=False, deterministic=True):
        output = kernel(numbers)
        # The gradient of a plain sum would be ones, from which a wrong kernel may compute the right result.
        (output * output).sum().backward()  # type: ignore[no-untyped-call]  # torch's gap
    return digest([output.detach(), numbers.grad])[:32]


def _test_input(device: torch.device) -> torch.Tensor:
    """Return numbers of about -1 to 1 of shape (3, 257, 131), whose sums are rounded."""
    # The numbers come from integers and not from a generator, whose state belongs to the user and whose numbers differ
    # between kinds of devices.
    counted = torch.arange(3 * 257 * 131, dtype=torch.int64)
    mixed = counted * 48_271 % 65_537 - 32_768
    return (mixed.to(torch.float32) / 29_999).reshape(3, 257, 131).to(device)


def _convolve_many_channels(x: torch.Tensor) -> torch.Tensor:
    """Convolve so many channels with so large a kernel that oneDNN cuts the sum to fit into the cache."""
    channels, size = 512, 48
    flat = x.reshape(-1)
    wide = flat.repeat(channels * size**2 // len(flat) + 1)[: channels * size**2]
    images = wide.reshape(1, channels, size, size).contiguous(memory_format=torch.channels_last)
    return functional.conv2d(images, wide[: 8 * channels * 5**2].reshape(8, channels, 5, 5), stride=4)


KERNELS: Final[Mapping[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "a matrix product": lambda x: x @ x.transpose(1, 2),
    "a convolution": lambda x: functional.conv2d(x.unsqueeze(1), x.reshape(-1)[: 4 * 9].reshape(4, 1, 3, 3)),
    "a sum": lambda x: x.reshape(-1).sum(),
    "a normalisation": lambda x: functional.layer_norm(x, (131,)),
    "a convolution of many channels": _convolve_many_channels,
    "activations": lambda x: functional.mish(torch.sigmoid(x)) + functional.gelu(x),
    # An odd number of elements, of which a vector kernel leaves the last ones to a scalar loop.
    "elu": lambda x: functional.elu(-x.abs()),
    "square roots": lambda x: (x.abs() + 0.1).sqrt(),
    "exponentials": torch.exp,
    "a softmax": lambda x: functional.log_softmax(x, -1),
    "a bfloat16 product": lambda x: (x[0, :64].bfloat16() @ x[1, :64].bfloat16().t()).float(),
}
"""The kernels of the self-test, by the name that an error uses for them."""
