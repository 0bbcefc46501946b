"""Updates over two processes: faults, data, and what the ranks must agree on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import gan as several
from tests.support.programs.updates import from_rank_0, gan_undisturbed, loaded, run_programs, undisturbed
from tests.support.ranks import launch_on_ranks

Outcomes = list[dict[str, Any]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return launch_on_ranks(run_programs, 2, str(tmp_path_factory.mktemp("ranks")))


@pytest.fixture(scope="module")
def alone() -> str:
    return undisturbed()


def of(outcomes: Outcomes, name: str) -> tuple[Any, Any]:
    first, second = outcomes
    return first[name], second[name]


def test_two_ranks_end_where_one_does(outcomes: Outcomes, alone: str) -> None:
    assert of(outcomes, "undisturbed") == (alone, alone)


def test_what_a_shard_raises_is_raised_there_and_told_elsewhere(outcomes: Outcomes, alone: str) -> None:
    first, second = of(outcomes, "raising")
    assert second["raised"][0] == "ReplicaError"
    kind, message, _ = first["raised"]
    assert kind == "PeerError"
    assert message.startswith("Rank 1 raised ReplicaError: The forward of shard ")
    assert "ValueError: boom" in message
    assert "in boom" in message  # its own traceback
    for found in (first, second):
        assert found["unchanged"]
        assert found["end"] == alone


def test_an_interrupt_of_one_rank_stops_all_where_nothing_has_changed(outcomes: Outcomes, alone: str) -> None:
    first, second = of(outcomes, "interrupted")
    assert (first["raised"][0], second["raised"][0]) == ("PeerInterrupt", "ReplicaInterrupt")
    assert first["raised"][1] == "Rank 1 was interrupted."
    assert all(found["unchanged"] and found["end"] == alone for found in (first, second))


def test_an_interrupt_that_lets_the_work_go_on_leaves_no_shard_out(outcomes: Outcomes, alone: str) -> None:
    first, second = of(outcomes, "going on")
    assert (first["seen"], second["seen"]) == (0, 1)
    for found in (first, second):
        assert found["raised"][0] == "nothing"
        assert found["end"] == alone


def test_each_rank_loads_the_samples_of_its_own_shards(outcomes: Outcomes, tmp_path: Path) -> None:
    found = loaded(str(tmp_path), 0, 1)
    assert found["ended"] == "EndOfIteratorError"
    first, second = of(outcomes, "loaded")
    assert [list(map(int, each["indices"])) for each in (first, second)] == [
        [*range(4), *range(8, 12)],
        [*range(4, 8), *range(12, 16)],
    ]
    assert first["end"] == second["end"] == found["end"]
    assert first["ended"] == second["ended"] == "EndOfIteratorError"


@pytest.mark.parametrize(("num_workers", "accumulate"), [(0, 2), (1, 1), (1, 2)])
def test_so_do_its_workers(outcomes: Outcomes, tmp_path: Path, num_workers: int, accumulate: int) -> None:
    first, second = of(outcomes, f"loaded {num_workers} {accumulate}")
    indices = [sorted(map(int, each["indices"])) for each in (first, second)]
    assert indices[0] + indices[1] == list(range(16)) if accumulate == 2 else len(indices[0]) == 8
    assert sorted(indices[0] + indices[1]) == list(range(16))
    assert first["end"] == second["end"] == loaded(str(tmp_path), 0, accumulate)["end"]


def test_data_that_cannot_be_loaded_on_one_rank_stops_all(outcomes: Outcomes) -> None:
    first, second = of(outcomes, "raising data")
    assert second["raised"][0] == "OSError"
    assert first["raised"][0] == "PeerError"
    assert "Rank 1 raised OSError: sample 4 is out of reach" in first["raised"][1]
    assert first["end"] == second["end"]
    assert first["iteration"] == second["iteration"] == 1


@pytest.mark.parametrize("phase", several.PHASES)
def test_a_step_function_that_raises_on_one_rank_takes_all_back(outcomes: Outcomes, phase: str) -> None:
    first, second = of(outcomes, f"raising at {phase}")
    assert second["raised"][:2] == ["ValueError", "boom"]
    assert first["raised"][0] == "PeerError"
    end = gan_undisturbed()
    for found in (first, second):
        assert found["unchanged"]
        assert found["end"] == end


@pytest.mark.parametrize(
    ("name", "subject"),
    [
        ("other batch", "batch sizes"),
        ("other end", "batches"),
        ("other update", "update"),
        ("seed", "`seed`"),
        ("shards", "`num_shards`"),
        ("precision", "`precision`"),
        ("rate", "`optimizer.lr`"),
        ("dropout", "`code.model.1`"),
        ("criterion", "`code.loss_fn`"),
        ("switch", "float32 matmul precision"),
    ],
)
def test_ranks_that_differ_are_refused_with_the_field_named(outcomes: Outcomes, name: str, subject: str) -> None:
    for found in of(outcomes, name):
        assert (found[0], found[2]) == ("DisagreementError", subject)
        assert "rank 1" in found[1].lower()


def test_models_of_other_seeds_become_that_of_rank_0(outcomes: Outcomes) -> None:
    end = from_rank_0()
    for found in of(outcomes, "broadcast"):
        assert found["raised"][0] == "nothing"
        assert found["end"] == end


def test_or_they_are_refused(outcomes: Outcomes) -> None:
    for found in of(outcomes, "refuse"):
        kind, message, subject = found["raised"]
        assert (kind, subject) == ("DisagreementError", "0.bias")
        assert message.endswith(
            "Build the model from the same seed on every rank, or leave out `differing_models='refuse'`."
        )


@pytest.mark.parametrize(
    ("what", "subject", "every"),
    [
        ("parameter", "10.bias", 1),
        ("parameter", "10.bias", 4),
        ("momentum", "momentum_buffer of 10.bias", 1),
        ("momentum", "momentum_buffer of 10.bias", 4),
        # At the next update it would be gone: new buffers are combined over all ranks, for all of them.
        ("buffer", "1.running_var", 1),
    ],
)
def test_a_flipped_bit_is_found_and_named(outcomes: Outcomes, what: str, subject: str, every: int) -> None:
    for found in of(outcomes, f"flipped {what}, {every}"):
        kind, message, named = found["raised"]
        assert kind == "DisagreementError"
        assert 1 <= found["count"] <= every + 1
        assert message.startswith("Rank 1 holds other bits in ")
        assert f"after {3 + found['count'] - 1} updates" in message
        if every == 1:
            assert named == subject


def test_a_rank_that_fell_behind_is_named_at_the_next_update(outcomes: Outcomes) -> None:
    first, second = of(outcomes, "failing hook")
    assert (first["first"][0], second["first"][0]) == ("nothing", "ValueError")
    for found in (first, second):
        assert found["second"][0] == "DisagreementError"
        assert found["second"][2] == "update"


def test_a_state_is_the_same_on_every_rank_and_may_be_loaded_anywhere(outcomes: Outcomes, alone: str) -> None:
    first, second = of(outcomes, "saved")
    assert first == second
    assert first["end"] == alone
