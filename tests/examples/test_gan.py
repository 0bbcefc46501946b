"""The GAN example learns, and does so to the same bits on other devices."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep as ls

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "gan.py"


def train(devices: list[str], updates: int) -> ls.ParallelUpdater:
    with torch.random.fork_rng():
        updater: Any = runpy.run_path(str(EXAMPLE))["build"](devices)
    for _ in range(updates):
        assert updater.update().applied
    updater.finalize()
    return updater


def test_the_gan_has_the_same_bits_on_any_devices() -> None:
    found = [ls.digest(train(["cpu"] * devices, 20).state_dict()) for devices in (1, 3)]
    assert found[0] == found[1]


@pytest.mark.slow
def test_the_gan_makes_points_near_the_circle() -> None:
    generator = train(["cpu"], 1200).get_all_models()["gen"].eval()
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        radii = generator(torch.randn(500, 4)).norm(dim=1)
    assert 0.9 < radii.mean() < 1.1
    assert radii.std() < 0.15
