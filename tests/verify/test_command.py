"""`lockstep verify` runs a script with a trainer in all ways, and leaves the files of the user's runs alone."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep.cli import main
from lockstep.verify import WAYS, chosen, driver
from tests.support import zygote

SCRIPT = """
import sys
import torch
import lockstep as ls

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(40, 4), torch.randint(2, (40,)))
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(), torch.nn.Linear(8, 2))
updater = ls.ParallelUpdater(
    ls.BatchIterator(data, 16, shuffle=True),
    torch.optim.AdamW(model.parameters()),
    model,
    devices=2,
    num_shards=4,
    loss_fn=ls.supervised(torch.nn.functional.cross_entropy),
)
trainer = ls.Trainer(updater, until=(50, "iteration"), out=sys.argv[1])
trainer.extend(ls.extensions.LogReport(), trigger=(1, "iteration"))
trainer.extend(ls.extensions.Snapshot(), trigger=(1, "iteration"))
trainer.run(resume="auto")
"""


@pytest.fixture(params=[pytest.param(True, id="forked")])
def forked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the process that forks those of the ways, which saves it the imports, unless a test wants it anew."""
    if not request.param:
        return
    monkeypatch.setattr(driver, "subprocess", SimpleNamespace(Popen=zygote.Popen, PIPE=subprocess.PIPE))


def run_verify(*arguments: str) -> int:
    return main(["verify", *arguments])


@pytest.mark.parametrize(
    "forked", [pytest.param(True, id="forked"), pytest.param(False, id="anew", marks=pytest.mark.slow)], indirect=True
)
@pytest.mark.usefixtures("forked")
def test_all_ways_of_a_script_are_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, out = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT, encoding="utf-8")
    assert run_verify("--json", "--updates", "5", str(script), str(out)) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["way"] for row in found["ways"]] == [way.name for way in WAYS]
    assert [row["status"] for row in found["ways"]] == ["equal"] * len(WAYS)
    # Half of the updates were made by the process that was killed.
    assert [row["updates"] for row in found["ways"]] == [5] * (len(WAYS) - 2) + [3, 1]
    assert [text[:13] for text in found["findings"]] == ["1 layers (1) "]
    assert found["starts"] <= 8
    assert not out.exists()


NOT_TRAINED = """
import torch
import lockstep as ls

class Stuck(torch.optim.SGD):
    def step(self, closure=None):
        kept = [each.detach().clone() for each in self.param_groups[0]["params"][:1]]
        super().step(closure)
        with torch.no_grad():
            self.param_groups[0]["params"][0].copy_(kept[0])

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(40, 4), torch.randint(2, (40,)))
model = torch.nn.ModuleDict({name: torch.nn.Linear(4, 2) for name in ("a", "b", "c")})

def loss(model, images, labels):
    return torch.nn.functional.cross_entropy(model["a"](images) + model["b"](images), labels)

trained = [*model["a"].parameters(), *model["c"].parameters()]
batches = ls.BatchIterator(data, 16, shuffle=True)
updater = ls.ParallelUpdater(batches, Stuck(trained, lr=0.1), model, devices=1, num_shards=4, loss_fn=loss)
while True:
    updater.update()
"""


@pytest.mark.usefixtures("forked")
def test_parameters_that_are_not_trained_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(NOT_TRAINED, encoding="utf-8")
    page = tmp_path / "page.html"
    assert run_verify("--json", "--html", str(page), "--updates", "2", "--only", "one-shard", str(script)) == 0
    shown = page.read_text(encoding="utf-8")
    assert "1 of 1 ways agree with the first one" in shown
    assert "<p>1 parameters (a.weight) get a gradient, and no update changes them.</p>" in shown
    assert json.loads(capsys.readouterr().out)["findings"] == [
        "2 parameters (b.weight, b.bias) require a gradient, and no optimizer holds them.",
        "2 parameters (c.weight, c.bias) are held by an optimizer, and get no gradient in these updates.",
        "1 parameters (a.weight) get a gradient, and no update changes them.",
    ]


@pytest.mark.usefixtures("forked")
def test_a_script_that_fails_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise ValueError('no data')", encoding="utf-8")
    page = tmp_path / "page.html"
    assert run_verify("--only", "later", "--html", str(page), str(script)) == 1
    assert "The script could not be run on one device: ValueError: no data" in capsys.readouterr().out
    assert "ValueError: no data" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "moon", __file__], "`only` must hold names of"),
        (["--updates", "1", __file__], "`updates` must be at least 2, got 1."),
        (
            ["--only", "moon", __file__, "--only", "later"],
            "lockstep verify: --only is passed to the script; options of",
        ),
        (["nothing.py"], "`script` must be a file, got nothing.py."),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_verify(*arguments) == 2
    assert message in capsys.readouterr().err


def test_only_the_script_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_verify()
    assert capsys.readouterr().err.endswith("are required: script\n")


def test_no_way_left_is_refused() -> None:
    with pytest.raises(ValueError, match="must leave at least one way, got none"):
        chosen(only=["later"], skip=["later"])


OWN_LOOP = """
import sys
from pathlib import Path
import torch
import lockstep as ls

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(40, 4), torch.randint(2, (40,)))
model = torch.nn.Linear(4, 2)
updater = ls.ParallelUpdater(
    ls.BatchIterator(data, 20, shuffle=True),
    torch.optim.SGD(model.parameters(), lr=0.1),
    model,
    num_shards=4,
    loss_fn=ls.supervised(torch.nn.functional.cross_entropy),
)
newest = max(Path(sys.argv[1]).glob("epoch-*"), default=None)
if newest is not None:
    ls.snapshots.restore(updater, newest)
while updater.epoch < 4:
    updater.update()
    if updater.is_new_epoch:
        ls.snapshots.save(updater, f"{sys.argv[1]}/epoch-{updater.epoch}")
"""


@pytest.mark.usefixtures("forked")
def test_a_loop_that_saves_snapshots_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(OWN_LOOP, encoding="utf-8")
    command = ("--json", "--updates", "6", "--only", "two-devices", "--only", "resume", "train.py", "run")
    assert run_verify(*command) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["status"] for row in found["ways"]] == ["equal"] * 2
    assert not Path("run").exists()
    # What an earlier run has written is where all ways begin, and the command says so.
    monkeypatch.setattr("sys.argv", ["train.py", "run"])
    exec(OWN_LOOP.replace("epoch < 4", "epoch < 2"), {})  # noqa: S102 - as the script
    written = sorted(Path("run").iterdir())
    assert run_verify(*command) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["status"] for row in found["ways"]] == ["equal", "skipped"]
    assert any(
        "The script goes on from 'run/epoch-2', a snapshot that an earlier run" in each for each in found["findings"]
    )
    assert sorted(Path("run").iterdir()) == written
    exec(OWN_LOOP, {})  # noqa: S102 - as above
    assert run_verify(*command) == 1
    assert "It goes on from 'run/epoch-4', which an earlier run has written" in capsys.readouterr().out


COMPUTED = """
import torch
import lockstep as ls

torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
batches = list(zip(torch.randn(4, 16, 4), torch.randint(2, (4, 16))))
updater = ls.ParallelUpdater(
    batches, torch.optim.SGD(model.parameters(), lr=0.1), model, num_shards=4,
    loss_fn=ls.supervised(torch.nn.functional.cross_entropy),
)
for batch in batches:
    updater.compute_gradients(batch)
    updater.apply_gradients()
"""


@pytest.mark.usefixtures("forked")
def test_a_loop_with_a_number_of_updates_of_its_own_is_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    loop = "for batch in batches:\n    updater.compute_gradients(batch)\n    updater.apply_gradients()\n"
    script.write_text(COMPUTED.replace(loop, "for _ in range(4):\n    updater.update()\n"), encoding="utf-8")
    assert run_verify("--json", "--updates", "8", "--only", "resume", str(script)) == 0
    (resume,) = json.loads(capsys.readouterr().out)["ways"]
    assert resume["status"] == "equal"


@pytest.mark.usefixtures("forked")
def test_a_loop_that_computes_gradients_is_run_by_two_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(COMPUTED, encoding="utf-8")
    assert run_verify("--json", "--updates", "3", "--only", "processes", "--only", "resume", str(script)) == 0
    processes, resume = json.loads(capsys.readouterr().out)["ways"]
    assert processes["status"] == "equal"
    assert "only if its `update` is called" in json.dumps(resume)
