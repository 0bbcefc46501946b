"""Files and streams of other libraries, made and read by these libraries themselves."""

from __future__ import annotations

import gc
import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep as ls
from lockstep.data import ParquetRows, Parts, StreamPart, TarSamples
from tests.data.parts.test_files import everything
from tests.support.counted_files import num_bytes_read, open_counted

NUM_ROWS = 3000


def drained(parts: Parts, **options: Any) -> list[Any]:
    batches = ls.BatchIterator(parts, 32, shuffle=True, seed=2, **options)
    found = []
    while batches.epoch < 1:
        found.append(list(next(batches)))
    batches.finalize()
    return found


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Write parquet files with row groups of 20 rows."""
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import parquet  # noqa: PLC0415 - optional

    for file in range(3):
        numbers = list(range(file * NUM_ROWS // 3, (file + 1) * NUM_ROWS // 3))
        generator = torch.Generator().manual_seed(file)
        names = [f"{torch.randint(10**18, (2,), generator=generator).tolist()}" for _ in numbers]
        table = pyarrow.table({"number": numbers, "name": names, "pair": [[each, -each] for each in numbers]})
        parquet.write_table(table, tmp_path / f"{file}.parquet", row_group_size=20)
    return tmp_path


def test_parquet_rows(rows: Path) -> None:
    part = ParquetRows(rows / "1.parquet", columns=["pair", "number"])
    assert part.lengths == [20] * 50
    assert everything(part)[7] == {"pair": [1007, -1007], "number": 1007}
    log = rows / "log"
    log.mkdir()
    options = {"open_file": partial(open_counted, log)}
    parts = Parts([ParquetRows(rows / f"{file}.parquet", **options) for file in range(3)], num_sections=4)  # type: ignore[arg-type]
    found = drained(parts)
    assert sorted(sample["number"] for batch in found for sample in batch) == list(range(NUM_ROWS))
    # The metadata of each file is read once, with as much of the file as pyarrow reads for it.
    footers = 3 * 2**16
    assert num_bytes_read(log) - footers <= 1.05 * sum((rows / f"{file}.parquet").stat().st_size for file in range(3))
    assert drained(parts, num_workers=2) == found


def test_webdataset_archives(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset", reason="webdataset is not installed")
    pattern = str(tmp_path / "shard-%02d.tar")
    with webdataset.ShardWriter(pattern, maxcount=40, verbose=0) as writer:
        for number in range(100):
            tensor = torch.full((3,), float(number))
            writer.write({"__key__": f"sample{number:04}", "cls": number % 10, "json": {"n": number}, "x.pth": tensor})
    paths = [str(path) for path in sorted(tmp_path.glob("*.tar"))]
    assert len(paths) == 3
    decode = webdataset.autodecode.Decoder([webdataset.autodecode.basichandlers])
    parts = Parts([TarSamples(path, block=8) for path in paths], transform=decode, num_sections=4)
    with warnings.catch_warnings():
        # Webdataset leaves it to Python to close the archive that it has read last.
        warnings.simplefilter("ignore", ResourceWarning)
        reference = list(webdataset.WebDataset(paths, shardshuffle=False).decode())
        gc.collect()
    assert len(parts) == len(reference) == 100
    for index, expected in enumerate(reference):
        mine = parts[index]
        assert set(mine) == {name for name in expected if name not in ("__url__", "__local_path__")}
        assert (mine["__key__"], mine["cls"], mine["json"]) == (expected["__key__"], expected["cls"], expected["json"])
        assert torch.equal(torch.as_tensor(mine["x.pth"]), torch.as_tensor(expected["x.pth"]))
    found = [[sample["json"]["n"] for sample in batch] for batch in drained(parts)]
    assert sorted(number for batch in found for number in batch) == list(range(100))
    assert [[sample["json"]["n"] for sample in batch] for batch in drained(parts, num_workers=2)] == found


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_hugging_face_streams(rows: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(rows / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    if kind == "json":
        for file in range(3):
            numbers = range(file * NUM_ROWS // 3, (file + 1) * NUM_ROWS // 3)
            (rows / f"{file}.json").write_text("".join(f"{json.dumps({'number': number})}\n" for number in numbers))
    files = [str(rows / f"{file}.{kind}") for file in range(3)]

    def corpus() -> Parts:
        stream = datasets.load_dataset(
            kind, data_files=files, split="train", streaming=True, cache_dir=str(rows / "cache")
        )
        assert stream.num_shards == 3
        return Parts(
            [
                StreamPart(
                    partial(stream.shard, num_shards=3, index=shard),
                    f"shard {shard}",
                    block=50,
                    index=rows / f"{kind}-{shard}.index",
                )
                for shard in range(3)
            ],
            num_sections=4,
        )

    whole = [[sample["number"] for sample in batch] for batch in drained(corpus())]
    assert sorted(number for batch in whole for number in batch) == list(range(NUM_ROWS))
    assert [[sample["number"] for sample in batch] for batch in drained(corpus(), num_workers=2)] == whole
    first = ls.BatchIterator(corpus(), 32, shuffle=True, seed=2)
    first.advance(41)
    second = ls.BatchIterator(corpus(), 32, shuffle=True, seed=2)
    second.load_state_dict(first.state_dict())
    assert [[sample["number"] for sample in next(second)] for _ in range(20)] == whole[41:61]


def test_a_resumed_hugging_face_stream_reads_a_file_of_each_section_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    fsspec = pytest.importorskip("fsspec")
    from fsspec.implementations.local import LocalFileSystem  # noqa: PLC0415 - optional

    (log := tmp_path / "log").mkdir()

    class CountedFiles(LocalFileSystem):  # type: ignore[misc]  # typed as Any
        protocol = "counted"

        @classmethod
        def _strip_protocol(cls, path: Any) -> str:
            # By its name alone, because each library strips another part of a path.
            return str(tmp_path / Path(path).name)

        def _open(self, path: str, *_: Any, **__: Any) -> Any:
            return open_counted(log, self._strip_protocol(path))

    fsspec.register_implementation("counted", CountedFiles, clobber=True)
    for file in range(3):
        rows = ({"number": file * 1000 + row, "text": "x" * 50} for row in range(1000))
        (tmp_path / f"{file}.json").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    size = max((tmp_path / f"{file}.json").stat().st_size for file in range(3))

    def batches() -> ls.BatchIterator:
        files = [f"counted://{file}.json" for file in range(3)]
        stream = datasets.load_dataset("json", data_files=files, split="train", streaming=True)
        shards = [partial(stream.shard, num_shards=3, index=shard) for shard in range(3)]
        parts = [
            StreamPart(each, f"{shard}", block=50, index=tmp_path / f"{shard}") for shard, each in enumerate(shards)
        ]
        return ls.BatchIterator(Parts(parts, num_sections=4), 32, shuffle=True, seed=2)

    whole, numbers, read = batches(), [], []
    while whole.epoch < 1:
        numbers.append([sample["number"] for sample in next(whole)])
        read.append(num_bytes_read(log))
    first, second = batches(), batches()
    first.advance(41)
    second.load_state_dict(first.state_dict())
    before = num_bytes_read(log)
    assert [[sample["number"] for sample in next(second)] for _ in numbers[41:]] == numbers[41:]
    # The library looks at the first file once more for the names of its columns.
    assert size < num_bytes_read(log) - before - (read[-1] - read[40]) <= (4 + 1) * size


def test_the_samples_of_a_torchdata_pipeline(tmp_path: Path) -> None:
    pytest.importorskip("torchdata.nodes", reason="torchdata is not installed")
    from torchdata.nodes import IterableWrapper, Loader, Mapper  # noqa: PLC0415 - optional

    def pipeline(numbers: range) -> Any:
        return Loader(Mapper(IterableWrapper(numbers), str))

    parts = Parts(
        [
            StreamPart(partial(pipeline, range(at, at + 50)), f"from {at}", block=6, index=tmp_path / f"{at}.json")
            for at in range(0, 200, 50)
        ],
        num_sections=4,
    )
    found = drained(parts)
    assert sorted(int(text) for batch in found for text in batch) == list(range(200))
    assert drained(parts, num_workers=2) == found
