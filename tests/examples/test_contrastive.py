"""A loss over the whole batch: the gradient of one device, the same bits on any, and something is learnt."""

from __future__ import annotations

import importlib.util
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch

import lockstep as ls
from tests.support import zygote

SCRIPT = Path(__file__).parents[2] / "examples" / "contrastive.py"

# Looked for and not imported, which takes a second wherever tests are collected.
pytestmark = pytest.mark.skipif(find_spec("sklearn") is None, reason="scikit-learn ships the digits")


@pytest.fixture(scope="module")
def module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("contrastive_example", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def run(*options: str) -> str:
    """Run the example; `test_digits.py` shows that what it imports warns of nothing."""
    done = zygote.run([sys.executable, "-W", "error", str(SCRIPT), *options])
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize(
    "places",
    [
        pytest.param([["cpu"] * 3], id="three"),
        pytest.param([["cpu"], ["cpu"] * 3], id="all", marks=pytest.mark.slow),
    ],
)
def test_the_digest_is_the_same_on_any_devices_and_pairs_are_found_more_often(places: list[list[str]]) -> None:
    digests = set()
    for devices in places:
        output = run("--epochs", "2", "--devices", *devices)
        digests.add(re.search(r"^weights ([0-9a-f]{64})$", output, re.MULTILINE)[1])
        before, after = map(float, re.search(r"360 new images: ([\d.]+)% -> ([\d.]+)%", output).groups())
        assert after > 1.2 * before
    assert len(digests) == 1


def test_the_gradient_is_that_of_one_device_for_any_split(module: ModuleType) -> None:
    images, _ = module.load_images()
    assert module.largest_error(images[:33]) < 1e-12


def test_gradients_of_parts_alone_would_be_wrong(module: ModuleType) -> None:
    """What the two stages are for: devices that compare their own images alone learn something else."""
    images = module.load_images()[0][:32].double()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        encoder = module.Encoder().double()
    whole = module.gradient(encoder, images)
    parts = sum(module.gradient(encoder, part) for part in images.split(16)) / 2
    assert (parts - whole).norm() > 0.01 * whole.norm()


def test_the_example_says_how_it_is_split(module: ModuleType) -> None:
    with torch.random.fork_rng():
        encoder = module.build(["cpu"] * 2)
    assert isinstance(encoder, ls.DataParallel)
    assert encoder.num_shards == module.NUM_SHARDS
