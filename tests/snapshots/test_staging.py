"""What is copied when, and what a snapshot cannot hold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep as ls
from lockstep.snapshots import Content, SnapshotWriter, load
from lockstep.snapshots.commit import Buffers, stage
from tests.support.snapshots import RUN, small_content, write


def content_of(**fields: Any) -> Content:
    return Content(**({"progress": {"update": 1}, "run_id": RUN, "models": {}} | fields))


def test_buffers_are_kept_while_the_tensors_are_alike() -> None:
    buffers = Buffers()
    addresses = [copy.data_ptr() for copy in buffers.copy(stage(small_content(1), ()).tensors)]
    tensors = stage(small_content(2), ()).tensors
    second = buffers.copy(tensors)
    assert [copy.data_ptr() for copy in second] == addresses
    assert all(map(torch.equal, second, tensors))
    third = buffers.copy(stage(small_content(3, rows=6), ()).tensors)
    assert [copy.shape for copy in third] != [copy.shape for copy in second]


def in_place(change: Callable[[list[torch.Tensor]], object]) -> None:
    """Copy the same tensors, change them, and compare the next copies."""
    base = torch.arange(12.0)
    tensors = [base[:6].view(2, 3), torch.arange(4.0), torch.arange(6).view(3, 2), torch.tensor(3.0), torch.ones(0)]
    buffers = Buffers()
    for step in range(6):
        if step == 4:
            change(tensors)
        copies = buffers.copy(stage(content_of(state=tensors), ()).tensors)
        assert [copy.dtype for copy in copies] == [tensor.dtype for tensor in tensors]
        assert all(torch.equal(copy, tensor) for copy, tensor in zip(copies, tensors, strict=True))
        for tensor in tensors:
            tensor.add_(1)
    assert not torch.equal(copies[1], tensors[1])


def replaced(place: int, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[list[torch.Tensor]], object]:
    return lambda tensors: tensors.__setitem__(place, make(tensors[place]))


@pytest.mark.parametrize(
    "change",
    [
        lambda _: None,
        replaced(0, torch.Tensor.clone),
        replaced(0, lambda each: each.view(3, 2)),
        replaced(0, lambda each: each.as_strided((2, 3), (1, 2))),
        replaced(0, lambda each: each.as_strided((3, 3), (3, 1))),
        replaced(2, lambda each: each.view(torch.float64)),
        replaced(2, lambda each: each.t()),
        replaced(1, lambda each: each.double()),
        replaced(3, lambda _: torch.tensor([2 + 5j]).conj().imag[0]),
        lambda tensors: tensors[1].resize_(3),
        lambda tensors: tensors[2].t_(),
        lambda tensors: setattr(tensors[1], "data", torch.arange(4.0) * 7),
        lambda tensors: tensors.append(torch.arange(5.0)),
        lambda tensors: tensors.__delitem__(1),
        lambda tensors: tensors.reverse(),
    ],
)
def test_whatever_happens_to_tensors_is_noticed(change: Callable[[list[torch.Tensor]], object]) -> None:
    in_place(change)


def test_state_of_many_parameters_is_read_as_it_was(tmp_path: Path) -> None:
    rows = {index: {"step": torch.tensor(float(index)), "exp_avg": torch.full((2,), index)} for index in range(3)}
    trees: list[Any] = [
        rows,
        {**rows, 3: {"step": torch.ones(1)}},
        {**rows, 3: {"exp_avg": torch.ones(1), "step": torch.ones(2)}},
        {**rows, 3: {"step": torch.ones(1), "exp_avg": 2}},
        {**rows, "main": {"step": torch.ones(1), "exp_avg": torch.ones(2)}},
        {0: {}, 1: {}},
        OrderedDict(rows),
        {index: {"$": each["step"]} for index, each in rows.items()},
    ]
    [folder] = write(tmp_path, content_of(state=trees))
    read = load(folder).state()
    assert ls.digest(read) == ls.digest(trees)
    assert read[0].keys() == rows.keys()
    with SnapshotWriter(tmp_path / "refused", run_id=RUN) as writer:
        for wrong in ({(1, 2): rows[0], 1: rows[0]}, {0: {(1, 2): torch.ones(1)}, 1: {(1, 2): torch.ones(1)}}):
            with pytest.raises(TypeError, match=r"type tuple at state"):
                writer.save(content_of(state=wrong))


def test_a_warm_copy_allocates_no_tensor() -> None:
    buffers, content = Buffers(), small_content(1)
    found, staged = [], stage(content, ())
    for _ in range(2):
        with torch.profiler.profile(profile_memory=True) as profile:
            buffers.copy(staged.tensors)
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
        (
            {"state": {"w": torch.ones(2).to(torch.complex128)}},
            "got 'state/w' of torch.complex128.*view_as_real",
        ),
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
