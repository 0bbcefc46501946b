"""Runs that are killed again and again, each time started on another placement, end as one that was left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.campaign import play, with_tensorboard


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(80))
def test_a_chain_of_kills(tmp_path: Path, seed: int) -> None:
    with with_tensorboard():
        play(tmp_path / "run", seed)
