"""Portable kernels are in force or refused; what they compute is right; and runs with them are equal everywhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.portable import PORTABLE_ENV, VARIABLES, ask_for_portable_kernels, machine_problem
from lockstep.portable.cases import CASES
from lockstep.portable.golden import DIGITS, FOLDER, file_of, libc_version
from lockstep.portable.record import merged
from tests.support import zygote

needs_portable = pytest.mark.skipif(
    bool(machine_problem()) or not file_of(torch.__version__).is_file(),
    reason=machine_problem() or f"no digests for torch {torch.__version__}",
)
PROGRAM = [sys.executable, "-m", "tests.support.programs.portable"]
PLAIN = {name: value for name, value in os.environ.items() if name not in {*VARIABLES, PORTABLE_ENV}}


def ran(code: str, **variables: str) -> str:
    done = zygote.run([sys.executable, "-c", code], env={**PLAIN, **variables})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


REFUSED = """
import os, sys, torch
import lockstep as ls
from lockstep.portable import is_portable
exec(sys.argv[1])
before = dict(os.environ)
try:
    ls.use_portable_kernels()
except ls.PortableKernelsError as error:
    print(error)
assert dict(os.environ) == before and not is_portable() and torch.backends.mkldnn.enabled
assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::mm", "BackendSelect")
"""


@needs_portable
@pytest.mark.parametrize(
    ("code", "variables", "expected"),
    [
        ("torch.backends.cpu.get_cpu_capability()", {"ATEN_CPU_CAPABILITY": ""}, "`ATEN_CPU_CAPABILITY` must be avx2"),
        ("pass", {"MKL_CBWR": "AVX2"}, "`MKL_CBWR` must be COMPATIBLE for portable kernels, got AVX2"),
        ("torch.__version__ = '1.0.0'", {}, "no digests of portable kernels for torch 1.0.0"),
    ],
)
def test_what_cannot_be_portable_is_refused_and_changes_nothing(
    code: str, variables: dict[str, str], expected: str
) -> None:
    done = zygote.run([sys.executable, "-c", REFUSED, code], env={**PLAIN, **variables})
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


@needs_portable
def test_a_choice_of_torch_that_comes_first_is_refused_with_the_cure() -> None:
    code = "torch.ones(3).exp()"
    done = zygote.run([sys.executable, "-c", REFUSED, code], env=PLAIN)
    assert done.returncode == 0, done.stderr
    if torch.backends.cpu.get_cpu_capability() == "AVX2":
        pytest.skip("this processor has the kernels that are asked for")
    assert "Portable kernels must be chosen before other kernels are: torch uses those of" in done.stdout
    assert "lockstep run --portable" in done.stdout


WRONG = """
import lockstep as ls
from lockstep.portable import golden, is_portable
recorded = golden.recorded_digests()
wrong = {**recorded, "float32 sqrt": "0" * 12}
golden.recorded_digests = lambda: wrong
try:
    ls.use_portable_kernels()
except ls.PortableKernelsError as error:
    print(is_portable(), error)
"""


@needs_portable
def test_a_kernel_with_other_bits_is_named() -> None:
    found = ran(WRONG)
    assert found.startswith("False This machine gives other bits than those recorded for torch")
    assert "results of kernels: float32 sqrt." in found


RIGHT = """
import itertools, warnings, torch, lockstep as ls
from torch.nn import functional as F
ls.use_portable_kernels()
ls.use_portable_kernels()
torch.manual_seed(0)
def check(function, *shapes, layout=torch.contiguous_format):
    inputs = [torch.randn(shape) for shape in shapes]
    inputs[0] = inputs[0].contiguous(memory_format=layout) if inputs[0].dim() == 4 else inputs[0]
    results = []
    for dtype in (torch.float32, torch.float64):
        leaves = [each.to(dtype).detach().requires_grad_() for each in inputs]
        output = function(*leaves)
        seed = torch.ones_like(output).cumsum(0)
        results.append([output.detach(), *torch.autograd.grad(output, leaves, seed)])
    for single, double in zip(*results):
        assert single.dtype is torch.float32 and single.shape == double.shape
        # Sums of some hundred rounded terms.
        torch.testing.assert_close(single.double(), double, rtol=1e-4, atol=1e-4 * double.abs().max().item())
    assert results[0][0].stride() == results[1][0].stride()
plains = F.conv1d, F.conv2d, F.conv3d
transposes = F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d
for dims, plain, transposed in zip((1, 2, 3), plains, transposes):
    for stride, padding, dilation, groups, kernel in itertools.product((1, 3), (0, 2), (1, 2), (1, 4), (1, 3)):
        sizes = dict(stride=stride, padding=padding, dilation=dilation, groups=groups)
        weight = 12, 8 // groups, *(kernel,) * dims
        check(lambda x, w, b: plain(x, w, b, **sizes), (3, 8, *(7,) * dims), weight, (12,))
        more = int(max(stride, dilation) > 1)
        if 4 * stride - 2 * padding + dilation * (kernel - 1) + 1 + more > 0:
            weight = 8, 12 // groups, *(kernel,) * dims
            sizes |= {"output_padding": more}
            check(lambda x, w, b: transposed(x, w, b, **sizes), (3, 8, *(5,) * dims), weight, (12,))
check(lambda x, w: F.conv2d(x, w, stride=(1, 2), padding=(2, 0), dilation=(1, 3)), (2, 3, 12, 14), (5, 3, 3, 2))
check(lambda x, w: F.conv2d(x, w, padding=1), (20, 32, 32, 32), (8, 32, 3, 3))
check(lambda x, w: F.conv2d(x, w, padding=1), (4, 8, 9, 9), (16, 8, 3, 3), layout=torch.channels_last)
check(lambda x: x.expand(200, 300) @ torch.ones(300, 100, dtype=x.dtype), (1, 300))
check(lambda x, y: x.t() @ y.t(), (90, 80), (70, 90))
check(lambda x, y: x[::2, ::2] @ y[:, 50:150], (200, 300), (150, 200))
check(lambda x, y, z: torch.addmm(z, x, y), (70, 80), (80, 90), (90,))
check(lambda x, y: torch.bmm(x, y), (3, 70, 80), (3, 80, 90))
check(lambda x: torch.linalg.cholesky(x @ x.mT + 200 * torch.eye(150, dtype=x.dtype)), (150, 150))
one, other = torch.randn(900, 90), torch.randn(900, 80)
assert torch.equal(one.t() @ other, one.t().contiguous() @ other)  # which matrix is copied changes no bit
definite = torch.eye(150) * 200 + torch.ones(150, 150)
assert torch.equal(torch.linalg.cholesky(definite), torch.linalg.cholesky(definite.double()).float())
if hasattr(torch.ops.aten, "cholesky"):  # torch 2.15 has it no longer
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch prefers the other name
        assert torch.equal(torch.cholesky(definite), torch.linalg.cholesky(definite))
for wrong in (
    lambda: F.conv2d(torch.ones(1, 3, 5, 5), torch.ones(2, 4, 3, 3)),
    lambda: F.conv2d(torch.ones(1, 3, 2, 2), torch.ones(2, 3, 3, 3)),
    lambda: F.conv_transpose2d(torch.ones(1, 3, 2, 2), torch.ones(3, 3, 3, 3), output_padding=1),
    lambda: torch.ones(300, 400) @ torch.ones(300, 400),
    lambda: torch.linalg.lstsq(torch.eye(3), torch.ones(3, 1)),
    lambda: torch.triangular_solve(torch.ones(3, 1), torch.eye(3).to_sparse_csr()),
):
    try:
        wrong()
    except RuntimeError as error:
        print(type(error).__name__)
with torch.no_grad(), torch.inference_mode():
    F.conv2d(torch.ones(1, 3, 5, 5), torch.ones(2, 3, 3, 3))
print(torch.func.vmap(torch.mm)(torch.ones(2, 70, 80), torch.ones(2, 80, 90)).sum().item())
"""


@needs_portable
def test_replacements_compute_what_torch_does_and_refuse_what_is_not_portable() -> None:
    lines = ran(RIGHT).splitlines()
    assert lines == ["RuntimeError"] * 4 + ["PortableKernelsError"] * 2 + [str(float(2 * 70 * 80 * 90))]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Train on one to three devices of a process with portable kernels."""
    done = zygote.run([*PROGRAM, "sgd", "adamw"], env=PLAIN)
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads(done.stdout)
    return results


@needs_portable
def test_runs_are_equal_on_any_number_of_devices_and_the_class_has_no_processor(found: dict[str, Any]) -> None:
    assert all(len(set(digests)) == 1 for digests in found["digests"].values()), found
    assert len({digests[0] for digests in found["digests"].values()}) == len(found["digests"]) == 8
    assert found["class"]["processor"] == "portable kernels"
    assert found["class"]["C library"].startswith("glibc ")
    assert not {"caches", "vector width", *(f"${name}" for name in VARIABLES)} & set(found["class"])


@needs_portable
def test_ranks_of_a_portable_run_have_the_digest_of_one_process(found: dict[str, Any]) -> None:
    command = [sys.executable, "-m", "lockstep", "run", "-n", "2", "--portable", "-m", PROGRAM[-1], "rank", "sgd"]
    ranks = zygote.run(command, env=PLAIN)
    assert ranks.returncode == 0, ranks.stderr
    expected = {name.split()[0]: digests[0] for name, digests in found["digests"].items() if name.endswith(" sgd")}
    assert json.loads(ranks.stdout.splitlines()[-1]) == expected


def test_the_command_sets_the_variables_and_refuses_others() -> None:
    variables = {"HOME": "/root"}
    ask_for_portable_kernels(variables)
    assert variables == {"HOME": "/root", PORTABLE_ENV: "1", **VARIABLES}
    with pytest.raises(ValueError, match="`MKL_CBWR` must be COMPATIBLE for portable kernels, got AVX2"):
        ask_for_portable_kernels({"MKL_CBWR": "AVX2"})


@needs_portable
def test_the_variable_alone_chooses_portable_kernels_when_lockstep_is_imported() -> None:
    code = "import lockstep; from lockstep.portable import is_portable; print(is_portable())"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**PLAIN, PORTABLE_ENV: "1"}, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("fpu avx2 fma", ""), ("fpu avx fma", "lacks avx2"), ("fpu sse2", "lacks avx2 and fma")],
)
def test_processors_without_avx2_or_fma_are_named(flags: str, expected: str) -> None:
    problem = machine_problem(f"processor : 0\nflags\t\t: {flags}\n")
    assert expected in problem
    if not machine_problem():
        assert bool(problem) == bool(expected)


def test_digests_ship_for_every_version_of_torch_that_was_tried_and_every_case() -> None:
    page = (Path(__file__).parents[2] / "docs/get-started/install.md").read_text(encoding="utf-8")
    tried = re.findall(r"\| torch (\d[\w.]+)", page)
    assert len(tried) > 3
    assert {*map(file_of, tried)} == {*FOLDER.glob("torch-*.json")}
    for file in map(file_of, tried):
        read = json.loads(file.read_text(encoding="utf-8"))
        assert {"glibc 2.36", "glibc 2.41", "glibc 2.43"} <= set(read["C library"])
        for listed in read["C library"].values():
            assert {*read["common"], *listed} == set(CASES)
            assert all(len(each) == DIGITS for each in (*read["common"].values(), *listed.values()))
    assert len(CASES) > 400


def test_cases_that_depend_on_the_c_library_are_told_apart() -> None:
    one, other = {"a": "1", "b": "2"}, {"a": "1", "b": "3"}
    assert merged({"one": one, "other": other}) == {
        "common": {"a": "1"},
        "C library": {"one": {"b": "2"}, "other": {"b": "3"}},
    }


@needs_portable
def test_the_digest_in_the_readme_is_that_of_portable_kernels(tmp_path: Path) -> None:
    if libc_version() != "glibc 2.36":
        pytest.skip(f"the README has the digest for glibc 2.36, not for {libc_version()}")
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    program = text.split("```python\n")[1].split("```\n")[0]
    script = tmp_path / "train.py"
    script.write_text(f"import lockstep\nlockstep.use_portable_kernels()\n{program}", encoding="utf-8")
    done = zygote.run([sys.executable, script], env=PLAIN, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"`{done.stdout.splitlines()[-1][:12]}…`" in text
