"""The placement law for data in files: equal bits on any ranks, devices and workers, and after a resume."""

from __future__ import annotations

import json
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.data import Parts, SectionOrder, TextLines
from tests.support.counted_files import num_bytes_read, open_counted
from tests.support.ranks import run_on_ranks

NUM_SAMPLES = 711
NUM_FILES, BATCH, NUM_SECTIONS, NUM_SHARDS = 6, 48, 12, 12
UPDATES = 18  # an epoch and a few updates
EPOCH = 15
MIDDLE = 8
RESUMED = (MIDDLE, EPOCH)  # in the middle and at the end of the first epoch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write files of unequal lengths, and their index."""
    made = tmp_path_factory.mktemp("corpus")
    generator = torch.Generator().manual_seed(0)
    for file in range(NUM_FILES):
        records = torch.randn(101 + 7 * file, 5, generator=generator)
        (made / f"{file}.jsonl").write_text("".join(f"{json.dumps(row.tolist())}\n" for row in records))
    assert sum(corpus(made, made).parts[0].lengths) == 101
    assert len(corpus(made, made)) == NUM_SAMPLES
    return made


def corpus(folder: Path, log: Path, **options: Any) -> Parts:
    """Read the files, three lines at once."""
    files = [folder / f"{file}.jsonl" for file in range(NUM_FILES)]
    return Parts(
        [
            TextLines(path, block=3, index=path.with_suffix(".index"), open_file=partial(open_counted, log))
            for path in files
        ],
        **{"transform": sample, "num_sections": NUM_SECTIONS, **options},
    )


def sample(line: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw random numbers, as augmentation does."""
    values = torch.tensor(json.loads(line))
    return values[:4] + 0.1 * torch.randn(4), values[4:]


def updater(
    parts: Parts, devices: int, workers: int, communicator: ls.Communicator | None, **options: Any
) -> ls.ParallelUpdater:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    return ls.ParallelUpdater(
        ls.BatchIterator(parts, BATCH, shuffle=True, seed=3, num_workers=workers),
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        model,
        devices=["cpu"] * devices,
        num_shards=NUM_SHARDS,
        loss_fn=ls.supervised(nn.functional.mse_loss),
        communicator=communicator,
        **options,
    )


def trained(
    communicator: ls.Communicator | None,
    folder: Path,
    log: Path,
    placements: list[tuple[int, int]],
    state: dict[str, Any] | None = None,
) -> list[str]:
    """Train, or go on from a state, at some numbers of devices and of workers; return the digests."""
    return trained_until(UPDATES, communicator, folder, log, placements, state)


def trained_until(  # noqa: PLR0917 - the pool passes arguments by position
    updates: int,
    communicator: ls.Communicator | None,
    folder: Path,
    log: Path,
    placements: list[tuple[int, int]],
    state: dict[str, Any] | None = None,
) -> list[str]:
    found = []
    for devices, workers in placements:
        made = updater(corpus(folder, log), devices, workers, communicator)
        if state is not None:
            made.load_state_dict(state)
        while made.iteration < updates:
            made.update()
        made.finalize()
        found.append(ls.digest(made.get_all_models()["main"], made.get_optimizer("main")))
    return found


@pytest.fixture(scope="module")
def alone(folder: Path) -> tuple[str, dict[int, dict[str, Any]]]:
    """Train on one device, and keep some states."""
    made = updater(corpus(folder, folder.parent), 1, 0, None)
    states = {}
    while made.iteration < UPDATES:
        made.update()
        if made.iteration in RESUMED:
            states[made.iteration] = made.state_dict()
    made.finalize()
    return ls.digest(made.get_all_models()["main"], made.get_optimizer("main")), states


def test_devices_and_workers_are_only_places(folder: Path, tmp_path: Path, alone: tuple[str, Any]) -> None:
    assert trained(None, folder, tmp_path, [(3, 0), (1, 2)]) == [alone[0]] * 2


@pytest.mark.parametrize(
    ("size", "devices", "workers"),
    [
        each if each == (3, 2, 2) else pytest.param(*each, marks=pytest.mark.slow)
        for each in product((1, 2, 3, 4), (1, 2), (0, 2))
    ],
)
def test_ranks_are_only_places_before_and_after_a_resume(  # noqa: PLR0917 - fixtures and a table
    size: int,
    devices: int,
    workers: int,
    folder: Path,
    tmp_path: Path,
    alone: tuple[str, dict[int, dict[str, Any]]],
) -> None:
    digest, states = alone
    for at, state in [(0, None), *states.items()]:
        found = run_on_ranks(trained, size, folder, tmp_path, [(devices, workers)], state)
        assert found == [[digest]] * size, f"resumed after {at} updates"


def sample_of_small(line: str) -> tuple[torch.Tensor, torch.Tensor]:
    if json.loads(line)[0] > 2:
        raise ValueError("The first number is large.")
    return sample(line)


def skipped(communicator: ls.Communicator | None, folder: Path, log: Path) -> tuple[str, int, int]:
    """Train an epoch without bad records; return the digest, and how many this rank and all ranks have skipped."""
    parts = corpus(folder, log, transform=sample_of_small, on_bad_record="skip")
    # An audit reads records once more.
    made = updater(parts, 2, 0, communicator, audit_every=0)
    while made.iteration < EPOCH:
        made.update()
    made.finalize()
    return ls.digest(made.get_all_models()["main"]), parts.num_skipped, parts.num_skipped_by_all(made.communicator)


def test_bad_records_are_skipped_alike_and_counted_over_all_ranks(folder: Path, tmp_path: Path) -> None:
    digest, alone, of_all = skipped(None, folder, tmp_path)
    assert alone == of_all > 10
    found = run_on_ranks(skipped, 3, folder, tmp_path)
    assert [(each[0], each[2]) for each in found] == [(digest, alone)] * 3
    assert sum(each[1] for each in found) == alone
    assert min(each[1] for each in found) > 0


@pytest.mark.parametrize(
    ("size", "workers"),
    [(1, 2), (3, 0), pytest.param(3, 2, marks=pytest.mark.slow)],
)
def test_all_processes_together_read_the_data_once(size: int, workers: int, folder: Path, tmp_path: Path) -> None:
    data = sum((folder / f"{file}.jsonl").stat().st_size for file in range(NUM_FILES))
    run_on_ranks(partial(trained_until, EPOCH), size, folder, tmp_path, [(1, workers)])
    # What workers load ahead of the end of the epoch is no more than two batches.
    ahead = 2 * 2 * BATCH / NUM_SAMPLES if workers else 0
    assert data <= num_bytes_read(tmp_path) <= (1.1 + ahead) * data


def test_a_resume_reads_at_most_a_block_of_each_section_again(
    folder: Path, tmp_path: Path, alone: tuple[str, dict[int, dict[str, Any]]]
) -> None:
    counts = []
    for at in (0, MIDDLE):
        log = tmp_path / str(at)
        log.mkdir()
        state = alone[1][MIDDLE] if at else None
        run_on_ranks(partial(trained_until, MIDDLE + 5 if at else MIDDLE), 2, folder, log, [(1, 0)], state)
        counts.append(num_bytes_read(log))
    (log := tmp_path / "whole").mkdir()
    run_on_ranks(partial(trained_until, MIDDLE + 5), 2, folder, log, [(1, 0)])
    block = max(map(len, (folder / "0.jsonl").read_bytes().split(b"\n"))) * 3 * 1.1
    assert 0 <= sum(counts) - num_bytes_read(log) <= NUM_SECTIONS * block


def with_other_blocks(communicator: ls.Communicator, folder: Path) -> str:
    path = folder / "0.jsonl"
    made = updater(Parts([TextLines(path, block=3 + communicator.rank)], transform=sample), 1, 0, communicator)
    try:
        made.update()
    except ls.DisagreementError as error:
        return str(error)
    return "nothing"


def test_ranks_that_read_other_blocks_are_refused(folder: Path) -> None:
    for told in run_on_ranks(with_other_blocks, 2, folder):
        assert "`blocks_and_sections`" in told


def dealt_by_rank(communicator: ls.Communicator, folder: Path, log: Path) -> list[str]:
    """Deal files to ranks, as loaders of other libraries do: a section order that belongs to the number of ranks."""
    made = updater(corpus(folder, log, num_sections=communicator.size), 1, 0, communicator)
    while made.iteration < UPDATES:
        made.update()
    return [ls.digest(made.get_all_models()["main"], made.get_optimizer("main"))]


def test_the_law_bites_parts_that_are_dealt_by_rank(folder: Path, tmp_path: Path, alone: tuple[str, Any]) -> None:
    (found,), _ = run_on_ranks(dealt_by_rank, 2, folder, tmp_path)
    assert found != alone[0]


def test_the_law_bites_a_position_that_is_not_saved(
    folder: Path, tmp_path: Path, alone: tuple[str, dict[int, dict[str, Any]]]
) -> None:
    digest, states = alone
    lost = dict(states[MIDDLE])
    (key,) = [key for key in lost if "iterator" in key]
    lost[key] = {name: {**state, "position": 0, "epoch": 0} for name, state in lost[key].items()}
    assert trained(None, folder, tmp_path, [(1, 0)], lost) != [digest]


def test_the_law_bites_a_buffer_that_is_not_saved(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Buffer:
        """The orders of the samples in the blocks, drawn one after another as they come."""

        def __init__(self) -> None:
            self.generator, self.orders = torch.Generator().manual_seed(0), dict[int, torch.Tensor]()

        def order(self, sections: SectionOrder, block: int) -> torch.Tensor:
            if block not in self.orders:
                self.orders[block] = torch.randperm(int(sections._lengths[block]), generator=self.generator)
            return self.orders[block]

    def trained_with(buffer: Buffer, until: int, state: dict[str, Any] | None) -> tuple[str, dict[str, Any]]:
        def permutation(sections: SectionOrder, block: int) -> torch.Tensor:
            return buffer.order(sections, block)

        monkeypatch.setattr(SectionOrder, "_permutation", permutation)
        made = updater(corpus(folder, tmp_path), 1, 0, None)
        if state is not None:
            made.load_state_dict(state)
        while made.iteration < until:
            made.update()
        made.finalize()
        return ls.digest(made.get_all_models()["main"]), made.state_dict()

    whole, _ = trained_with(Buffer(), 10, None)
    _, state = trained_with(buffer := Buffer(), 5, None)
    # With the buffer the resumed run has the same bits, and without it others.
    assert trained_with(buffer, 10, state)[0] == whole
    assert trained_with(Buffer(), 10, state)[0] != whole
