"""Programs as the documentation of other libraries writes them: their samples on any place, and after a resume."""

from __future__ import annotations

import gc
import json
import math
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, get_worker_info

import lockstep as ls
from lockstep.data import Parts, StreamPart

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata calls it
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),  # webdataset leaves it to Python
]

NUM_FILES, ROWS, BATCH = 3, 90, 16


def rows(file: int) -> list[dict[str, Any]]:
    """Return the records of a file, which has its own number of them."""
    numbers = range(100 * file, 100 * file + ROWS + 7 * file)
    return [
        {"number": number, "text": f"the {number} words" * (1 + number % 3), "label": number % 2} for number in numbers
    ]


def tensors(record: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """Draw random numbers, as augmentation does."""
    return torch.tensor([record["number"] / 300, float(len(record["text"]))]) + 0.1 * torch.randn(2), record["label"]


def datasets_streaming(folder: Path) -> list[StreamPart]:
    """As in "Stream" of datasets: a JSON corpus that is streamed, filtered and mapped in batches."""
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    files = []
    for file in range(NUM_FILES):
        (folder / f"{file}.json").write_text("".join(f"{json.dumps(record)}\n" for record in rows(file)))
        files.append(str(folder / f"{file}.json"))
    dataset = datasets.load_dataset("json", data_files=files, split="train", streaming=True, cache_dir=str(folder))
    dataset = dataset.filter(lambda example: example["number"] % 10 != 3)
    dataset = dataset.map(lambda examples: {"text": [text.upper() for text in examples["text"]]}, batched=True)
    count = dataset.num_shards
    return [
        StreamPart(
            partial(dataset.shard, num_shards=count, index=index),
            f"shard {index}",
            block=8,
            index=folder / f"{index}.i",
        )
        for index in range(count)
    ]


def webdataset_pipeline(folder: Path) -> list[StreamPart]:
    """As in webdataset's README: archives that are decoded to tuples; its shuffling is left to lockstep."""
    wds = pytest.importorskip("webdataset", reason="webdataset is not installed")
    parts = []
    for file in range(NUM_FILES):
        url = str(folder / f"{file}.tar")
        with wds.TarWriter(url) as writer:
            for record in rows(file):
                key = f"sample{record['number']:06}"
                writer.write(
                    {"__key__": key, "txt": record["text"], "cls": record["label"], "id": str(record["number"])}
                )
        pipeline = partial(wds.WebDataset, url, shardshuffle=False)
        parts.append(StreamPart(partial(decoded, pipeline), url, block=8, index=folder / f"{file}.i"))
    return parts


def decoded(pipeline: Callable[[], Any]) -> Any:
    return pipeline().decode().to_tuple("txt", "cls", "id").map(as_record)


def as_record(sample: tuple[str, int, Any]) -> dict[str, Any]:
    text, label, number = sample
    return {"number": int(number), "text": text, "label": label}


def stateful_loader(folder: Path) -> list[StreamPart]:
    """As in torchdata's StatefulDataLoader tutorial: a loader that saves its position, here of single samples."""
    loaders = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    return [
        StreamPart(
            partial(loaders.StatefulDataLoader, rows(file), batch_size=None),
            f"loader {file}",
            block=8,
            index=folder / f"{file}.i",
        )
        for file in range(NUM_FILES)
    ]


def pyarrow_batches(folder: Path) -> list[StreamPart]:
    """As in pyarrow's documentation of parquet: `iter_batches` of a file."""
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import parquet  # noqa: PLC0415 - optional

    for file in range(NUM_FILES):
        parquet.write_table(pyarrow.Table.from_pylist(rows(file)), folder / f"{file}.parquet", row_group_size=30)

    def read(path: Path) -> Iterator[dict[str, Any]]:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=20):
            yield from batch.to_pylist()

    paths = [folder / f"{file}.parquet" for file in range(NUM_FILES)]
    return [StreamPart(partial(read, path), path.name, block=8) for path in paths]


class MyIterableDataset(IterableDataset[dict[str, Any]]):
    """As in PyTorch's documentation of `IterableDataset`, which divides its range between workers."""

    def __init__(self, records: list[dict[str, Any]], start: int, end: int) -> None:
        super().__init__()
        self.records, self.start, self.end = records, start, end

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker_info = get_worker_info()
        if worker_info is None:
            iter_start, iter_end = self.start, self.end
        else:
            per_worker = math.ceil((self.end - self.start) / float(worker_info.num_workers))
            iter_start = self.start + worker_info.id * per_worker
            iter_end = min(iter_start + per_worker, self.end)
        return iter(self.records[iter_start:iter_end])


def iterable_dataset(_: Path) -> list[StreamPart]:
    return [
        StreamPart(partial(MyIterableDataset, rows(file), 0, len(rows(file))), f"range {file}", block=8)
        for file in range(NUM_FILES)
    ]


def updater(parts: list[StreamPart], devices: int, workers: int) -> ls.ParallelUpdater:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.1), nn.Linear(4, 2))
    dataset = Parts(parts, num_sections=8, transform=tensors)
    return ls.ParallelUpdater(
        ls.BatchIterator(dataset, BATCH, shuffle=True, seed=1, num_workers=workers),
        torch.optim.SGD(model.parameters(), lr=0.1),
        model,
        devices=["cpu"] * devices,
        num_shards=4,
        loss_fn=ls.supervised(nn.functional.cross_entropy),
    )


def digest_after(made: ls.ParallelUpdater, updates: int) -> str:
    while made.iteration < updates:
        made.update()
    made.finalize()
    return ls.digest(made.get_all_models()["main"])


@pytest.mark.parametrize(
    "program", [datasets_streaming, webdataset_pipeline, stateful_loader, pyarrow_batches, iterable_dataset]
)
def test_a_program_has_one_result_on_any_place_and_after_a_resume(
    program: Callable[[Path], list[StreamPart]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    expected = [record for file in range(NUM_FILES) for record in rows(file)]
    if program is datasets_streaming:
        expected = [{**record, "text": record["text"].upper()} for record in expected if record["number"] % 10 != 3]
    parts = program(tmp_path)
    dataset = Parts(parts)
    assert [dataset.read(block)[1][at] for block, at in map(dataset.locate, range(len(dataset)))] == expected
    whole = digest_after(updater(parts, 1, 0), 30)
    first = updater(parts, 2, 0)
    digest_after(first, 11)
    for devices, workers in ((1, 0), (2, 2)):
        second = updater(program(tmp_path), devices, workers)
        second.load_state_dict(first.state_dict())
        assert digest_after(second, 30) == whole
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.mark.parametrize("change", ["shuffle", "random map"])
def test_a_stream_of_datasets_that_lockstep_cannot_find_again_is_refused(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    (tmp_path / "a.json").write_text("".join(f"{json.dumps(record)}\n" for record in rows(0)))
    dataset = datasets.load_dataset(
        "json", data_files=str(tmp_path / "a.json"), split="train", streaming=True, cache_dir=str(tmp_path)
    )
    if change == "shuffle":
        dataset = dataset.shuffle(seed=1, buffer_size=20)
    else:
        dataset = dataset.map(lambda example: {"number": example["number"] + float(torch.rand(()))})
    parts = Parts([StreamPart(partial(dataset.shard, num_shards=1, index=0), "the shard", block=8)])
    with pytest.raises(ls.errors.PartError, match=r"Cannot read the shard to count its samples: .* Leave out its shuf"):
        len(parts)
