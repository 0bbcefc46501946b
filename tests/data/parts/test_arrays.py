"""Tokens and tensors in files as parts of a dataset."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import lockstep as ls
from lockstep.data import Parts, Safetensors, Tokens
from tests.data.parts.test_files import everything


@pytest.mark.parametrize("kind", ["npy", "bin"])
@pytest.mark.parametrize(
    ("size", "length", "stride"), [(100, 9, 8), (100, 10, None), (97, 5, 5), (4, 5, None), (5, 5, 1)]
)
def test_samples_are_windows_of_tokens(tmp_path: Path, kind: str, size: int, length: int, stride: int | None) -> None:
    tokens = (np.arange(size) * 7919 % 65521).astype(np.uint16)
    path = tmp_path / f"tokens.{kind}"
    if kind == "npy":
        np.save(path, tokens)
    else:
        tokens.tofile(path)
    part = Tokens(path, length, stride=stride, block=3)
    expected = [tokens[at : at + length].tolist() for at in range(0, size - length + 1, stride or length)]
    found = everything(part)
    assert [sample.tolist() for sample in found] == expected
    assert all(sample.dtype == torch.int64 for sample in found)
    assert sum(part.lengths) == len(expected)


def test_tokens_of_two_dimensions_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((3, 4), np.int32))
    with pytest.raises(ValueError, match=r"a.npy must have one dimension, got shape \(3, 4\)"):
        Tokens(tmp_path / "a.npy", 2).lengths  # noqa: B018 - what raises


def test_tensors_are_cut_along_their_first_dimension(tmp_path: Path) -> None:
    tensors = {"x": torch.randn(10, 3, generator=torch.Generator().manual_seed(0)), "label": torch.arange(10)}
    save_file(tensors, tmp_path / "a.safetensors")
    part = Safetensors(tmp_path / "a.safetensors", block=4)
    assert part.lengths == [4, 4, 2]
    found = everything(part)
    assert torch.equal(torch.stack([sample["x"] for sample in found]), tensors["x"])
    assert [int(sample["label"]) for sample in found] == list(range(10))


@pytest.mark.parametrize("tensors", [{}, {"x": torch.zeros(3), "y": torch.zeros(4)}, {"x": torch.tensor(1.0)}])
def test_tensors_without_a_number_of_samples_are_refused(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"a.safetensors must have the same number of samples, got shapes"):
        Safetensors(tmp_path / "a.safetensors").lengths  # noqa: B018 - what raises


def test_batches_of_both(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(400))
    parts = Parts([Tokens(tmp_path / "a.npy", 4, block=5)], num_sections=2)
    batches = ls.BatchIterator(parts, 8, shuffle=True, num_workers=2, sample_streams=False)
    found = torch.cat([torch.stack(list(next(batches))) for _ in range(13)])
    batches.finalize()
    assert sorted(found.flatten().tolist()) == list(range(400))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, "`length` must be at least 1"),
        ({"length": 2, "stride": 0}, "`stride` must be at least 1"),
        ({"length": 2, "block": 0}, "`block` must be at least 1"),
    ],
)
def test_arguments_are_checked(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tokens("a.npy", **options)  # type: ignore[arg-type]
