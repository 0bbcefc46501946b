"""The main job as a user starts it: short runs from the command line, on one device and on several."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils.data import TensorDataset

SCRIPT = Path(__file__).parents[2] / "examples" / "digits.py"

# Looked for and not imported, which takes a second wherever tests are collected.
pytestmark = pytest.mark.skipif(find_spec("sklearn") is None, reason="scikit-learn ships the digits")


def digests_in(output: str) -> list[str]:
    return re.findall(r"^weights ([0-9a-f]{64})$", output, flags=re.MULTILINE)


@pytest.fixture(scope="module")
def module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("digits_example", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture
def few_images(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train and test on the first images of each part."""
    parts = [TensorDataset(*part[:130]) for part in module.load_images()]
    monkeypatch.setattr(module, "load_images", lambda: parts)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """Numbers of devices mean cores here, in this process and in those it starts."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_a_run_that_is_resumed_at_its_end_has_the_same_digest(
    tmp_path: Path, module: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--resume", "--epochs", "1", "--devices", "1", "--out", str(tmp_path)]
    module.main(command)
    assert [path.name for path in (tmp_path / "snapshots").glob("0*")] == ["00000010"]
    module.main(command)
    first, again = digests_in(capsys.readouterr().out)
    assert first == again


def test_a_run_learns_and_leaves_log_and_curve(tmp_path: Path) -> None:
    options = ["--epochs", "2", "--devices", "1", "--out", str(tmp_path)]
    # Started anew, because imports, too, are to warn of nothing.
    command = [sys.executable, "-W", "error", str(SCRIPT), *options]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert re.fullmatch(r"(\s*\d+% epoch [^\n]*\n)+", run.stderr), run.stderr  # plain lines of the progress
    assert re.search(r"^seed 0: test accuracy \d+\.\d\d%, .* on 1 x cpu$", run.stdout, re.MULTILINE)
    assert len(digests_in(run.stdout)) == 1
    entries = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [entry["epoch"] for entry in entries] == [1, 2]
    assert {"main/loss", "val/main/loss", "val/main/accuracy", "elapsed_time"} <= entries[1].keys()
    assert entries[1]["main/loss"] < entries[0]["main/loss"]
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("few_images")
def test_another_seed_gives_another_digest_and_several_a_mean(tmp_path, module, capsys):
    module.main(["--seeds", "2", "--epochs", "1", "--out", str(tmp_path)])
    output = capsys.readouterr().out
    assert len(set(digests_in(output))) == 2
    accuracies = [float(text) for text in re.findall(r"^seed \d: test accuracy (.+)%,", output, re.MULTILINE)]
    (mean,) = re.findall(r"^mean test accuracy of 2 seeds: (.+)%$", output, flags=re.MULTILINE)
    # All three were rounded to two places for printing.
    assert float(mean) == pytest.approx(sum(accuracies) / 2, abs=0.0101)


@pytest.mark.usefixtures("few_images")
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_compare_says_that_the_digests_are_equal(tmp_path, module, capsys, precision):
    options = ["--compare", "--devices", "cpu,cpu", "--precision", precision]
    module.main([*options, "--epochs", "1", "--out", str(tmp_path)])
    output = capsys.readouterr().out
    assert re.findall(r"on (\d) x cpu", output) == ["2", "1", "3"]
    assert len(digests_in(output)) == 3
    assert output.endswith("The digests are equal: the same weights, bit for bit.\n")


@pytest.mark.usefixtures("few_images")
def test_compare_tells_digests_that_differ(tmp_path, module, monkeypatch):
    # Without a number of shards every device makes one, so that other devices give other bits.
    monkeypatch.setattr(module, "NUM_SHARDS", None)
    with pytest.raises(SystemExit, match="The digests differ"):
        module.main(["--compare", "--devices", "1", "--epochs", "1", "--out", str(tmp_path)])


def test_no_image_is_in_two_parts_and_each_part_has_its_share_of_every_digit(module):
    parts = module.load_images()
    assert [len(part) for part in parts] == [1257, 180, 360]
    images = torch.cat([part.tensors[0] for part in parts]).flatten(1)
    assert len(torch.unique(images, dim=0)) == len(images) == 1797
    for part in parts:
        shares = torch.bincount(part.tensors[1], minlength=10) / len(part)
        # A digit is 9.7 % to 10.2 % of all images; a part's count is rounded to whole images.
        assert ((shares > 0.09) & (shares < 0.11)).all()


def test_the_parts_do_not_depend_on_random_state(module):
    torch.manual_seed(5)
    first = module.load_images()
    torch.manual_seed(6)
    again = module.load_images()
    assert all(torch.equal(a.tensors[0], b.tensors[0]) for a, b in zip(first, again, strict=True))
