"""A run of several processes: every number is global, and what is printed or written is so once."""

from __future__ import annotations

from pathlib import Path

import pytest

import lockstep as ls
from tests.support.programs.training import fail_between_updates, train
from tests.support.ranks import launch_on_ranks

pytest.importorskip("matplotlib", reason="the curve is drawn with it")


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_run_logs_what_one_process_logs(tmp_path: Path, size: int) -> None:
    alone = train(str(tmp_path))
    assert alone["files"] == ["curve.png", "log.jsonl"]
    assert alone["bar"]
    assert alone["asked"] == (39, 39)
    ranks = launch_on_ranks(train, size, str(tmp_path))
    for found in ranks:
        assert found["log"] == alone["log"]
        assert found["end"] == alone["end"]
        assert found["calls"]["best"] == alone["calls"]["best"]
        assert found["calls"]["time"] == ranks[0]["calls"]["time"]
    assert ranks[0]["calls"]["time"]
    assert ranks[0]["printed"] == alone["printed"]
    assert ranks[0]["files"] == alone["files"]
    assert ranks[0]["bar"]
    # Samples of evaluations are loaded once, also where metrics cannot be merged.
    assert sum(found["asked"][0] for found in ranks) == 39
    assert sum(found["asked"][1] for found in ranks) == 39
    for found in ranks[1:]:
        # The first rank of each folder writes the log.
        assert (found["printed"], found["files"], found["bar"]) == ("", ["log.jsonl"], False)


@pytest.mark.usefixtures("spawned_by_forks")
def test_an_extension_that_fails_on_one_rank_ends_the_run_on_all(tmp_path: Path) -> None:
    with pytest.raises(ls.PeerError, match="the disk is full") as raised:
        ls.launch(fail_between_updates, 2, args=(str(tmp_path),))
    assert raised.value.rank == 1
