"""What ranks must have in common is found out, cheaply, and what differs is named."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.nn.attention

from lockstep import DisagreementError, LocalCommunicator
from lockstep.communicators import MessageTable
from lockstep.communicators.comparison import StateComparer, check_fields
from lockstep.communicators.kernel_class import _describe_cuda_settings, _digest_of, kernel_class, self_test
from tests.support import zygote

CPU = torch.device("cpu")


class TwoRanks(LocalCommunicator):
    """Rank 0, beside a rank 1 whose messages are known beforehand."""

    def __init__(self, *messages: bytes) -> None:
        super().__init__()
        self.messages = iter(messages)

    @property
    def size(self) -> int:
        return 2

    def exchange(self, payload: bytes, table: MessageTable | None = None) -> list[bytes]:  # noqa: ARG002 - only messages
        return [payload, next(self.messages)]


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_the_self_test_tells_a_wrong_number_of_threads() -> None:
    torch.set_num_threads(1)
    one, again = self_test(CPU), self_test(CPU)
    torch.set_num_threads(2)
    assert one == again != self_test(CPU)


WIDTH = "import torch; from lockstep.communicators.kernel_class import self_test; torch.set_num_threads(1); "
WIDTH += "print(sorted(self_test(torch.device('cpu')).items()))"


@pytest.mark.usefixtures("threads")
def test_the_self_test_tells_another_vector_width() -> None:
    torch.set_num_threads(1)
    here = torch.backends.cpu.get_cpu_capability()
    if here not in ("AVX2", "AVX512"):
        pytest.skip(f"this processor has no narrower kernels than its own ({here})")
    other = {"ATEN_CPU_CAPABILITY": "avx2" if here == "AVX512" else "default"}
    # Torch is to be imported after the variable was set.
    anew = partial(subprocess.run, capture_output=True, text=True, check=True)
    found = [
        run([sys.executable, "-c", WIDTH], env={**os.environ, **variables}).stdout.strip()
        for run, variables in ((zygote.run, {}), (anew, other))
    ]
    assert found[0] == str(sorted(self_test(CPU).items())) != found[1]


@pytest.mark.usefixtures("threads")
def test_the_self_test_takes_less_than_a_second() -> None:
    torch.set_num_threads(1)
    self_test(CPU)
    begin = time.process_time()  # the machine may have other work
    self_test(CPU)
    assert time.process_time() - begin < 1


def test_the_self_test_asks_no_generator_and_leaves_nothing() -> None:
    before = torch.get_rng_state()
    with torch.no_grad():
        self_test(CPU)
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), before)


PRECISION = """
import os, sys, torch
from lockstep.communicators.kernel_class import kernel_class
for setting in sys.argv[1:]:
    if os.fork() == 0:
        exec(setting)
        fields = kernel_class([torch.device("cpu")], {})
        print(sorted(pair for pair in fields.items() if pair[0].startswith("float32")), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, setting
"""

CUDNN_PRECISION = "torch.backends.cudnn.fp32_precision = 'ieee'"
REACHES_CONVOLUTIONS = torch.__version__ >= (2, 12)
"""In torch 2.11, the setting of cuDNN as a whole leaves its convolutions and RNNs at their default, TF32."""
PRECISIONS = [
    [
        "pass",
        *([] if REACHES_CONVOLUTIONS else [CUDNN_PRECISION]),
        "torch.set_float32_matmul_precision('highest')",
        "torch.backends.cuda.matmul.allow_tf32 = False",
        "torch.backends.cuda.matmul.fp32_precision = 'ieee'",
        "torch.backends.cudnn.conv.fp32_precision = 'tf32'",
    ],
    [
        "torch.backends.cudnn.allow_tf32 = False",
        *([CUDNN_PRECISION] if REACHES_CONVOLUTIONS else []),
        "torch.backends.cudnn.conv.fp32_precision = torch.backends.cudnn.rnn.fp32_precision = 'ieee'",
    ],
    ["torch.backends.fp32_precision = 'tf32'"],
    ["torch.backends.fp32_precision = 'bf16'"],
    ["torch.backends.fp32_precision = 'tf32'; torch.backends.mkldnn.matmul.fp32_precision = 'ieee'"],
    ["torch.backends.fp32_precision = 'tf32'; torch.backends.cuda.matmul.fp32_precision = 'ieee'"],
    ["torch.set_float32_matmul_precision('high')"],
    ["torch.set_float32_matmul_precision('medium')"],
    [
        "torch.backends.cuda.matmul.allow_tf32 = True",
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    ],
    ["torch.backends.cudnn.conv.fp32_precision = 'ieee'"],
    ["torch.backends.cudnn.rnn.fp32_precision = 'ieee'"],
    ["torch.backends.mkldnn.matmul.fp32_precision = 'tf32'"],
    [
        "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
        "torch.set_float32_matmul_precision('medium'); torch.backends.cuda.matmul.fp32_precision = 'ieee'",
    ],
    ["torch.backends.mkldnn.conv.fp32_precision = 'bf16'"],
    ["torch.backends.mkldnn.rnn.fp32_precision = 'bf16'"],
    ["torch.backends.mkldnn.set_flags(_fp32_precision='bf16')"],
]
"""Settings of either API; those of one list allow the same kernels, those of two lists do not."""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="each setting needs a process of its own")
def test_float32_precisions_of_either_api_are_told_apart() -> None:
    settings = [setting for alike in PRECISIONS for setting in alike]
    command = [sys.executable, "-c", PRECISION, *settings]
    done = zygote.run(command)
    assert done.returncode == 0, done.stderr
    found = dict(zip(settings, done.stdout.splitlines(), strict=True))
    groups = [{found[setting] for setting in alike} for alike in PRECISIONS]
    assert [len(group) for group in groups] == [1] * len(PRECISIONS)
    assert len(set().union(*groups)) == len(PRECISIONS), found


def test_variables_that_choose_kernels_are_fields_and_those_about_places_are_not() -> None:
    plain = kernel_class([CPU], {})
    named = {"MKL_CBWR": "AVX2", "FBGEMM_NO_JIT": "1", "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2"}
    chosen = kernel_class([CPU], {**named, "OMP_NUM_THREADS": "7", "HOME": "/root"})
    assert chosen == {**plain, **{f"${name}": value for name, value in named.items()}}


def test_the_c_library_is_a_field() -> None:
    assert kernel_class([CPU], {})["C library"] == " ".join(platform.libc_ver())


def test_the_first_differing_fields_are_named() -> None:
    fields = dict.fromkeys("abcdef", "here")
    theirs = b'{"a": "here", "b": "there", "c": "there", "d": "there", "e": "there", "g": "there"}'
    with pytest.raises(DisagreementError) as raised:
        check_fields(TwoRanks(b"other", theirs), fields, what="recipe", remedy="Mend it.")
    assert str(raised.value) == (
        "Rank 1 must have rank 0's recipe, but on it b is there, not here; c is there, not here; d is there, "
        "not here; and 3 more differ. Mend it."
    )
    assert (raised.value.rank, raised.value.subject) == (1, "b")


@pytest.mark.parametrize("every", [1, 4, 8, 19])
def test_every_element_is_looked_at_within_so_many_updates(every: int) -> None:
    tensors = {
        "a": torch.zeros(5, 3),
        "b": torch.zeros(()),
        "c": torch.zeros(7),
        "d": torch.zeros(4, 4).T[:3],
    }
    watch = StateComparer(lambda: tensors, every)
    calm = [watch.digest_at(update) for update in range(every)]
    assert [watch.digest_at(update) for update in range(every, 2 * every)] == calm
    for tensor in tensors.values():
        for place in range(tensor.numel()):
            element = tensor.as_strided((1,), (1,), 0) if tensor.dim() == 0 else tensor[tuple(_at(tensor, place))]
            element.add_(1)
            assert [watch.digest_at(update) for update in range(every)] != calm
            element.sub_(1)
    assert [watch.digest_at(update) for update in range(every)] == calm


def _at(tensor: torch.Tensor, place: int) -> list[int]:
    indices = []
    for length in reversed(tensor.shape):
        place, index = divmod(place, length)
        indices.append(index)
    return indices[::-1]


def test_a_state_that_was_replaced_is_looked_at_after_forgetting() -> None:
    tensors = {"a": torch.zeros(4)}
    watch = StateComparer(lambda: tensors, 1)
    before = watch.digest_at(0)
    tensors["a"] = torch.ones(4)
    watch.forget()
    assert watch.digest_at(0) != before


def test_kernels_are_tried_with_algorithms_that_cudnn_chooses_every_time() -> None:
    """cuDNN may choose by the clock, or use atomic additions: equal ranks would differ in the self-test."""
    seen: list[tuple[bool, bool]] = []

    def kernel(numbers: torch.Tensor) -> torch.Tensor:
        seen.append((torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic))
        return numbers * 2

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.cudnn, "benchmark", True)
        _digest_of(kernel, CPU)
        assert seen == [(False, True)]
        assert (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic) == (True, False)


CUDA_SETTINGS = [
    (torch.backends.cudnn, "benchmark", True),
    (torch.backends.cudnn, "deterministic", True),
    (torch.backends.cudnn, "enabled", False),
    (torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False),
    (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
    (torch.backends.cuda.matmul, "allow_fp16_accumulation", True),
]


@pytest.mark.parametrize(("owner", "name", "value"), CUDA_SETTINGS, ids=[each[1] for each in CUDA_SETTINGS])
def test_each_setting_that_chooses_kernels_of_cuda_is_described(owner: object, name: str, value: object) -> None:
    before, usual = _describe_cuda_settings(), getattr(owner, name)
    try:
        setattr(owner, name, value)
        assert _describe_cuda_settings() != before
    finally:
        setattr(owner, name, usual)
    assert _describe_cuda_settings() == before


def test_attention_kernels_and_libraries_of_cuda_are_described() -> None:
    before = _describe_cuda_settings()
    assert before["attention kernels"] == "flash, memory-efficient, formula, cuDNN"
    assert before["matrix products"] == "_BlasBackend.Cublas, _LinalgBackend.Default"
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert _describe_cuda_settings()["attention kernels"] == "formula"
