"""A language model on packed documents: the same bits on any devices and workers, and no document sees another one."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support import zygote

SCRIPT = Path(__file__).parents[2] / "examples" / "packed_text.py"


@pytest.fixture(scope="module")
def module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("packed_text_example", SCRIPT)
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


def test_the_digest_is_the_same_on_any_devices_and_workers_and_the_loss_falls() -> None:
    digests = set()
    for options in (["--devices", "cpu"], ["--workers", "2"]):
        output = run("--updates", "15", *options)
        digests.add(re.search(r"^weights ([0-9a-f]{64})$", output, re.MULTILINE)[1])
        before, after = map(float, re.search(r"per token ([\d.]+) -> ([\d.]+)", output).groups())
        assert after < before - 1
    assert len(digests) == 1


def test_no_document_sees_another_one(module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = module.write_corpus(tmp_path)
    with torch.random.fork_rng():
        assert module.largest_difference(paths) < 1e-12
        # The check finds a model without document masks.
        forward = module.Model.forward
        forward = module.Model.forward

        def unmasked(model: Any, tokens: Any, document: Any, position: Any) -> Any:
            return forward(model, tokens, 0 * document, position)

        monkeypatch.setattr(module.Model, "forward", unmasked)
        assert module.largest_difference(paths) > 1e-3


def test_a_sample_tells_documents_apart(module: ModuleType) -> None:
    sample = module.packed(torch.tensor([1, 2, module.END, 3, 4, module.END, module.END, 5]))
    assert sample["document"].tolist() == [0, 0, 0, 1, 1, 1, 2]
    assert sample["position"].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert sample["target"].tolist() == [2, module.END, -100, 4, module.END, -100, -100]
