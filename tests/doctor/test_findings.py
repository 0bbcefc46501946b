"""`lockstep doctor` names what breaks the guarantee, and nothing where there is nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lockstep as ls
from lockstep.doctor import find_problems, is_sound
from lockstep.doctor.findings import Finding, check_cores, check_disk, check_gpu_settings, check_variables

CORE = "processor\t: 0\nmodel\t\t: 1\nflags\t\t: avx2 avx512f\n\n"
SMALL_CORE = "processor\t: 1\nmodel\t\t: 1\nflags\t\t: avx2\n\n"
GOOD_GPU = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({}, []),
        ({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "LD_PRELOAD": ""}, []),
        ({"OMP_NUM_THREADS": "4", "MKL_NUM_THREADS": "2"}, ["OMP_NUM_THREADS=4, MKL_NUM_THREADS=2"]),
        ({"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "avx2"}, ["ATEN_CPU_CAPABILITY=avx2, MKL_CBWR=COMPATIBLE"]),
        ({"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}, ["TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"]),
        ({"LD_PRELOAD": "libx.so"}, ["LD_PRELOAD=libx.so"]),
    ],
)
def test_variables(variables: dict[str, str], named: list[str]) -> None:
    found = list(check_variables(variables))
    assert [finding.level for finding in found] == ["note"] * len(named)
    assert all(name in finding.text for name, finding in zip(named, found, strict=True))


def test_cores_of_two_kinds_are_a_problem() -> None:
    assert list(check_cores(CORE + CORE, cores=2, quota=None)) == []
    assert list(check_cores("", cores=2, quota=2.0)) == []
    (finding,) = check_cores(CORE + SMALL_CORE, cores=2, quota=None)
    assert (finding.level, "2 kinds" in finding.text) == ("problem", True)


def test_a_container_with_less_time_than_cores() -> None:
    (finding,) = check_cores(CORE, cores=8, quota=2.5)
    assert (finding.level, "devices=2" in finding.cure) == ("note", True)


def test_settings_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    with ls.use_deterministic_kernels():
        assert list(check_gpu_settings(GOOD_GPU)) == []
        for variables in ({}, {"CUBLAS_WORKSPACE_CONFIG": ":0:0"}):
            (finding,) = check_gpu_settings(variables)
            assert (finding.level, "not set: CUBLAS_WORKSPACE_CONFIG=:4096:8." in finding.text) == ("note", True)
    (finding,) = check_gpu_settings(GOOD_GPU)
    assert (finding.level, "torch.use_deterministic_algorithms(True)" in finding.text) == ("note", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    (finding,) = check_gpu_settings(GOOD_GPU)
    assert (finding.level, "torch.backends.cudnn.benchmark = False" in finding.text) == ("problem", True)


def test_folders(tmp_path: Path) -> None:
    assert list(check_disk(tmp_path, "ext4")) == []
    assert [each.level for each in check_disk(tmp_path, "tmpfs")] == ["note"]
    # A run creates its folder.
    assert list(check_disk(tmp_path / "runs" / "first", "ext4")) == []
    (tmp_path / "file").touch()
    assert [each.level for each in check_disk(tmp_path / "file" / "runs", "ext4")] == ["problem"]


def test_problems_come_first_and_alone_are_unsound(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = find_problems(tmp_path / "file", {"LD_PRELOAD": "libx.so"})
    assert found[0].level == "problem"
    assert "note" in [each.level for each in found]
    assert not is_sound(found)
    assert is_sound([Finding("note", "")])
