"""Portable kernels with one part left out give other bits in some case, so each part is needed.

What differs natively depends on the processor: without one of the settings, a processor whose own kernels are those
that the setting asks for gives the same bits. `test_emulated.py` runs other processors. NNPACK is not among the parts,
because the convolutions that replace torch's do not reach it. What refuses an operation is called by
`test_portable_kernels.py`.
"""

from __future__ import annotations

import json
import os
import sys

import pytest
import torch

from lockstep.portable import PORTABLE_ENV, VARIABLES, machine_problem
from lockstep.portable.golden import file_of
from tests.support import zygote

PLAIN = {name: value for name, value in os.environ.items() if name not in {*VARIABLES, PORTABLE_ENV}}

pytestmark = pytest.mark.skipif(
    bool(machine_problem()) or not file_of(torch.__version__).is_file(),
    reason=machine_problem() or f"no digests for torch {torch.__version__}",
)

EVERYWHERE = {
    "mkldnn": "LSTM",
    "mm": "float32 product 64x64x64",
    "addmm": "float32 sum of a product",
    "bmm": "float32 2 products 65x64x66",
    "convolution": "convolution 7x7",
    "convolution_backward": "convolution 7x7",
    "linalg_cholesky_ex": "Cholesky of 129",
}
"""By what is left out, a case that differs on every processor."""

ON_AVX512 = {"ATEN_CPU_CAPABILITY": "softmax of (33, 10) over -1", "ONEDNN_MAX_CPU_ISA": "convolution of 64 channels"}
"""The same for processors with AVX-512, whose kernels ATEN and oneDNN would choose."""

BY_MKL = {"MKL_CBWR": "float32 product 33x35x37", "MKL_VML_DEBUG_CPU_TYPE": "float32 sqrt"}
"""The same for the variables of MKL, which has other kernels for every processor that is made today."""


@pytest.mark.parametrize(("left_out", "case"), [("", ""), *(EVERYWHERE | ON_AVX512 | BY_MKL).items()])
def test_each_part_is_needed(left_out: str, case: str) -> None:
    if left_out in ON_AVX512 and not torch.cpu._is_avx512_supported():
        pytest.skip("this processor has no AVX-512")
    command = [sys.executable, "-m", "tests.support.programs.portable_mutants", left_out, *([case] if case else [])]
    done = zygote.run(command, env=PLAIN)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ([case] if left_out else [])
