"""What is copied when, and what a snapshot cannot hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.snapshots import Content, SnapshotWriter, load
from lockstep.snapshots.writing.staging import Buffers, freeze_content
from tests.support.snapshots import RUN, small_content, write


def content_of(**fields: Any) -> Content:
    return Content(**({"progress": {"update": 1}, "run_id": RUN, "models": {}} | fields))


def test_buffers_are_kept_while_the_tensors_are_alike() -> None:
    buffers = Buffers()
    first = buffers.copy(freeze_content(small_content(1)).tensors)
    addresses = [copy.data_ptr() for copy in first]
    second = buffers.copy(freeze_content(small_content(2)).tensors)
    assert [copy.data_ptr() for copy in second] == addresses
    assert all(torch.equal(a, b) for a, b in zip(second, freeze_content(small_content(2)).tensors, strict=True))
    third = buffers.copy(freeze_content(small_content(3, rows=6)).tensors)
    assert [copy.shape for copy in third] != [copy.shape for copy in second]


def test_a_warm_copy_allocates_no_tensor() -> None:
    buffers, content = Buffers(), small_content(1)
    found = []
    for _ in range(2):
        with torch.profiler.profile(profile_memory=True) as profile:
            buffers.copy(freeze_content(content).tensors)
        found.append([event.key for event in profile.key_averages() if event.self_cpu_memory_usage > 0])
    # The first copy shows that the profiler sees what is allocated.
    assert found[0]
    assert found[1] == []


def test_the_same_memory_is_stored_once(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    models = {
        "gen": {"a": weight, "b": weight, "view": weight[0], "turned": weight.t()},
        "dis": {"shared": weight},
    }
    empty = [torch.empty(0), torch.empty(0)]
    [folder] = write(tmp_path, content_of(models=models, state={"w": weight, "x": torch.ones(2), "empty": empty}))
    snapshot = load(folder)
    assert sorted(snapshot.tensors()) == [
        "model-dis.safetensors/shared",
        "model-gen.safetensors/a",
        "model-gen.safetensors/turned",
        "model-gen.safetensors/view",
        "state.safetensors/state/empty/0",
        "state.safetensors/state/empty/1",
        "state.safetensors/state/x",
    ]
    gen = snapshot.model("gen")
    assert gen["a"] is gen["b"] is snapshot.state()["w"]
    assert torch.equal(gen["turned"], weight.t())
    assert torch.equal(snapshot.model("dis")["shared"], weight)


def test_views_that_are_conjugate_are_stored_as_their_values(tmp_path: Path) -> None:
    values = torch.tensor([1 + 2j, 3 - 1j])
    [folder] = write(tmp_path, content_of(state=[values, values.conj(), values.imag, values.conj().imag]))
    read = load(folder).state()
    expected = [values, values.conj(), values.imag, values.conj().imag]
    assert all(torch.equal(a, b.resolve_conj().resolve_neg()) for a, b in zip(read, expected, strict=True))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"state": {"a": [1, {"b": object()}]}}, r"type object at state\.a\.1\.b"),
        ({"state": {"a": b"bytes"}}, r"type bytes at state\.a"),
        ({"state": {"a": {(1, 2): 3}}}, r"type tuple at state\.a"),
        ({"state": {"a": torch.float32}}, r"type dtype at state\.a"),
        ({"surroundings": [2**2000]}, r"an integer of 2001 bits at surroundings\.0"),
        ({"recipe": {"f": print}}, r"type builtin_function_or_method at recipe\.f"),
        ({"recipe": {"w": torch.ones(1)}}, "must hold no tensors"),
        ({"state": torch.ones(2).to(torch.complex128)}, r"torch\.complex128"),
        ({"state": torch.ones(2).to_sparse()}, "sparse"),
        ({"state": torch.ones(2, device="meta")}, "on meta"),
        ({"models": {"main": {"w": 1}}}, "`models` must hold tensors by their names, got 'w'"),
        ({"models": {"main": {"__metadata__": torch.ones(1)}}}, "__metadata__"),
    ],
)
def test_what_a_snapshot_cannot_hold_is_refused_when_it_is_saved(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    with SnapshotWriter(tmp_path, run_id=RUN) as writer, pytest.raises(TypeError, match=message):
        writer.save(content_of(**fields))


def test_containers_that_are_too_deep_are_refused(tmp_path: Path) -> None:
    deep: Any = 0
    for _ in range(16):
        deep = {0: deep}
    [folder] = write(tmp_path, content_of(state=deep))
    assert load(folder).state() == deep
    cycle: list[Any] = []
    cycle.append(cycle)
    with SnapshotWriter(tmp_path, run_id=RUN) as writer:
        for each in ({0: deep}, cycle):
            with pytest.raises(TypeError, match=r"type (list|dict|int) at state\."):
                writer.save(content_of(state=each))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"progress": {}}, "`progress` must hold the number of updates"),
        ({"progress": {"update": -1}}, "got -1"),
        ({"models": {"../x": {}}}, "Names of models"),
        ({"run_id": "other"}, "`content.run_id` must be"),
    ],
)
def test_arguments_are_checked(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with SnapshotWriter(tmp_path, run_id=RUN) as writer, pytest.raises(ValueError, match=message):
        writer.save(content_of(**fields))
