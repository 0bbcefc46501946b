"""What ranks compare of a batch: equal for equal batches, and different for batches that training would tell apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Subset, TensorDataset

import lockstep as ls
from lockstep.data import Samples, fingerprint

INPUTS = torch.randn(300, 3, 20, generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(INPUTS, torch.arange(300))


@dataclass
class Record:
    inputs: torch.Tensor
    name: str = ""


def changed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flip(0)


@pytest.mark.parametrize(
    "batch",
    [
        INPUTS,
        INPUTS[:5],
        INPUTS[:, 0, 0],
        INPUTS.bfloat16(),
        INPUTS.to(torch.complex64).conj(),
        INPUTS.to(torch.complex64).conj()[:2],
        INPUTS[:, :, ::3],
        INPUTS.view(300, 3, 4, 5).to(memory_format=torch.channels_last),
        INPUTS[:, :, ::3].to(torch.float8_e4m3fn),
        INPUTS[:, :, ::3].to(torch.int32).to(torch.uint16),
        (INPUTS * 1j).conj().imag,
        (INPUTS * 1j)[:, 0, 0].conj().imag[:1],
        torch.arange(4000),
        torch.randn(1, 1000, requires_grad=True),
    ],
)
def test_equal_tensors_have_equal_fingerprints_and_others_do_not(batch: torch.Tensor) -> None:
    assert fingerprint(batch) == fingerprint(batch.detach().clone().resolve_conj())
    assert fingerprint((batch, {"y": batch})) == fingerprint((batch.clone(), {"y": batch.clone()}))
    other = changed(batch) if len(batch) > 1 else batch + 1
    assert fingerprint(batch) == fingerprint(batch.detach().clone(memory_format=torch.contiguous_format))
    assert fingerprint(batch).about == fingerprint(other).about
    assert fingerprint(batch) != fingerprint(other)


@pytest.mark.parametrize("shape", [(256, 784), (2, 5000), (5000, 2), (4000,), (3, 3, 16, 16), (1, 300)])
def test_elements_of_four_rows_are_read_from_the_first_column_to_the_last(shape: tuple[int, ...]) -> None:
    batch = torch.zeros(shape)
    found, flat, row = fingerprint(batch), batch.view(-1), batch[0].numel()
    starts = [part * len(batch) // 4 * row + part * max(0, row - 64) // 3 for part in range(4)]
    assert len(set(starts)) == 4
    for start in starts:
        for index in (start, start + 63):
            flat[index] = 1
            assert fingerprint(batch) != found
            flat[index] = 0
    assert fingerprint(batch) == found


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_tensors_count_by_their_shapes() -> None:
    one, other = (torch.quantize_per_tensor(torch.full((3, 2), value), 0.1, 0, torch.quint8) for value in (0.0, 1.0))
    assert fingerprint(one) == fingerprint(other)
    assert fingerprint((one, torch.ones(2))) != fingerprint((one, torch.zeros(2)))


def test_names_dtypes_and_shapes_count() -> None:
    zeros = torch.zeros(4, 2)
    batches = [zeros, {"x": zeros}, {"y": zeros}, (zeros,), zeros.double(), zeros.view(2, 4), Record(zeros)]
    assert len({fingerprint(batch).about for batch in batches}) == len(batches)


def test_tensors_that_cannot_be_read_count_by_their_shapes() -> None:
    for kind in (torch.zeros(3, 2, device="meta"), torch.zeros(3, 2).to_sparse(), torch.zeros(0, 2)):
        assert fingerprint(kind) == fingerprint(kind.clone())
        assert fingerprint(kind).about.endswith(f"float32 {tuple(kind.shape)}")


def test_many_tensors_are_described_by_a_digest() -> None:
    many = {f"tensor {number}": torch.zeros(2, number) for number in range(100)}
    assert fingerprint(many).about.startswith("100 tensors of shapes with the digest ")
    assert fingerprint(many) != fingerprint({**many, "tensor 7": torch.zeros(2, 8)})


def test_indices_count_for_samples_and_nothing_is_loaded() -> None:
    class Counts:
        loaded = 0

        def __len__(self) -> int:
            return 9

        def __getitem__(self, index: int) -> int:
            Counts.loaded += 1
            return index

    found = fingerprint(Samples(Counts(), [3, 1]))
    assert found == fingerprint(Samples(Counts(), (3, 1)))
    assert fingerprint(Samples(Counts(), range(3))) == fingerprint(Samples(Counts(), [0, 1, 2]))
    assert found != fingerprint(Samples(Counts(), [1, 3]))
    assert found.about == "2 samples of a dataset of 9"
    assert Counts.loaded == 0


def test_those_of_subsets_are_indices_of_the_whole_dataset() -> None:
    first, second = Subset(DATA, range(0, 300, 2)), Subset(DATA, range(1, 300, 2))
    assert fingerprint(Samples(first, [0, 1]), contents=False) != fingerprint(Samples(second, [0, 1]), contents=False)
    nested = Subset(first, [5, 6])
    assert fingerprint(Samples(nested, [0])) == fingerprint(Samples(Subset(DATA, [10, 12]), [0]))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (DATA, TensorDataset(INPUTS + 1, torch.arange(300))),
        (["a"] * 300, ["b"] * 300),
        ([{"x": np.zeros(3), "y": 1}] * 300, [{"x": np.ones(3), "y": 1}] * 300),
        ([Record(INPUTS[0])] * 300, [Record(INPUTS[0], "other")] * 300),
    ],
)
def test_contents_of_datasets_in_memory_count_where_they_are_asked_for(one: Any, other: Any) -> None:
    places = range(20)
    assert fingerprint(Samples(one, places)) == fingerprint(Samples(list(one), places))
    assert fingerprint(Samples(one, places)) != fingerprint(Samples(other, places))
    assert fingerprint(Samples(one, places), contents=False) == fingerprint(Samples(other, places), contents=False)


# Samplers that share samples among processes -----------------------------------------------------------


class OfAPeer:
    """A shard of batches as Accelerate makes it."""

    def __init__(self, batch_sampler: Any, num_processes: int) -> None:
        self.batch_sampler, self.num_processes, self.process_index = batch_sampler, num_processes, 0

    def __iter__(self) -> Any:
        return iter(self.batch_sampler)


class OfATrainer(DistributedSampler[Any]):
    """A sampler of a class derived from torch's."""


@pytest.mark.parametrize(
    ("loader", "name"),
    [
        (DataLoader(DATA, 4, sampler=DistributedSampler(DATA, 2, 1)), "DistributedSampler (num_replicas=2)"),
        (DataLoader(DATA, 4, sampler=OfATrainer(DATA, 3, 1)), "OfATrainer (num_replicas=3)"),
        (DataLoader(DATA, batch_sampler=OfAPeer([[0]], 2)), "OfAPeer (num_processes=2)"),
        (DataLoader(DATA, batch_sampler=OfAPeer(DistributedSampler(DATA, 2, 0), 1)), "DistributedSampler"),
    ],
)
def test_samplers_that_share_samples_are_refused_by_name(loader: Any, name: str) -> None:
    for build in (ls.IterableBatches, lambda source: ls.IterableBatches(lambda: source).peek()):
        with pytest.raises(ValueError, match="`source` must give every rank the same batches") as raised:
            build(loader)
        assert f"with a {name}" in str(raised.value)


def test_accelerates_own_are_too() -> None:
    data_loader = pytest.importorskip("accelerate.data_loader")
    made = data_loader.prepare_data_loader(DataLoader(DATA, 4), num_processes=2, process_index=1)
    with pytest.raises(ValueError, match="with a BatchSamplerShard"):
        ls.IterableBatches(made)


def test_samplers_of_one_process_are_accepted() -> None:
    for sampler in (DistributedSampler(DATA, 1, 0), RandomSampler(DATA)):
        assert ls.IterableBatches(DataLoader(DATA, 4, sampler=sampler)).peek()[0].shape == (4, 3, 20)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_are_told_apart_by_their_elements(layout: torch.layout) -> None:
    def nested(last: float) -> torch.Tensor:
        # Each has a symbol of its own in its shape.
        return torch.nested.nested_tensor([torch.ones(2, 3), torch.full((4, 3), last)], layout=layout)

    assert fingerprint((nested(1.0), torch.ones(2))) == fingerprint((nested(1.0), torch.ones(2)))
    assert fingerprint(nested(1.0)) != fingerprint(nested(2.0))
