"""The description of a machine is complete, and reads Linux's files."""

from __future__ import annotations

from pathlib import Path

import torch

from lockstep.doctor import describe_machine
from lockstep.doctor.machine import core_quota, file_system, kernel_variables


def test_every_topic_is_described_and_the_folder_is_left_as_it_was(tmp_path: Path) -> None:
    found = describe_machine(tmp_path)
    assert list(found) == ["processor", "devices", "kernels", "torch", "network", f"disk ({tmp_path})"]
    assert all(value for facts in found.values() for value in facts.values())
    assert torch.__version__ in found["torch"]["versions"]
    assert found[f"disk ({tmp_path})"]["fsync of 4 KiB"].endswith(" ms")
    assert list(tmp_path.iterdir()) == []
    assert describe_machine(tmp_path / "none")[f"disk ({tmp_path / 'none'})"]["writable"] == "yes"
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert describe_machine(tmp_path / "file")[f"disk ({tmp_path / 'file'})"]["writable"].startswith("no: ")


def test_the_quota_of_a_container(tmp_path: Path) -> None:
    limit = tmp_path / "cpu.max"
    assert core_quota(limit) is None
    for text, quota in (("max 100000", None), ("150000 100000", 1.5), ("", None)):
        limit.write_text(text)
        assert core_quota(limit) == quota


def test_the_innermost_file_system_counts(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/x / ext4 rw 0 0\nnone {tmp_path.resolve()} tmpfs rw 0 0\nproc /proc proc rw 0 0\n")
    assert file_system(tmp_path, mounts) == "tmpfs"
    assert file_system(Path("/"), mounts) == "ext4"
    assert file_system(tmp_path, tmp_path / "none") == "unknown"


def test_only_variables_that_choose_kernels_are_listed() -> None:
    assert kernel_variables({"MKL_CBWR": "AVX2", "OMP_NUM_THREADS": "3", "HOME": "/"}) == {"MKL_CBWR": "AVX2"}
