"""The pages for those who come from elsewhere: made of the list, and their programs run."""

from __future__ import annotations

import difflib
import importlib.util
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import zygote

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = DOCS / "coming-from"
HF = "hf_trainer_after.py"
GENERATOR: dict[str, Any] = runpy.run_path(str(DOCS / "coming_from.py"))


@pytest.mark.parametrize("file", GENERATOR["PAGES"])
@pytest.mark.parametrize("system", GENERATOR["SYSTEMS"])
def test_a_page_is_made_of_the_list_and_its_programs(system: str, file: str) -> None:
    made = GENERATOR["PAGES"][file](system)
    written = (PAGES / file.format(system)).read_text(encoding="utf-8")
    assert written == made, "run `python docs/coming_from.py`"


PEERS = {
    "accelerate": ["before.txt", "loop.py", "after.py"],
    "ddp": ["before.txt", "loop.py", "resume.py", "after.py"],
    "hf_trainer": ["before.txt", "after.py"],
    "ignite": ["before.txt", "after.py"],
    "lightning": ["before.txt", "module.py", "after.py"],
}
"""The programs on the pages for those who come from trainers of PyTorch, in the order of the page."""

NEEDS = {"accelerate": "accelerate", "hf_trainer": "accelerate", "ignite": "ignite", "lightning": "lightning"}
"""The packages of programs that use the library that one comes from."""
PORTS = {"accelerate_loop.py": 10, "ddp_loop.py": 10, "lightning_module.py": 11}
"""The programs that keep most of the original, and how many lines are changed or new."""
SPELLED = {10: "Ten", 11: "Eleven"}


@pytest.mark.parametrize("peer", PEERS)
def test_a_page_shows_the_programs_beside_it(peer: str) -> None:
    shown = re.findall(r"(?<=```python\n)(.*?)(?=```)", (PAGES / f"{peer}.md").read_text(encoding="utf-8"), re.DOTALL)
    assert shown == [(PAGES / f"{peer}_{file}").read_text(encoding="utf-8") for file in PEERS[peer]]


@pytest.mark.parametrize("peer", ["accelerate", "lightning"])
def test_the_programs_of_a_page_can_be_run_one_after_another(peer: str) -> None:
    texts = [(PAGES / f"{peer}_{file}").read_text(encoding="utf-8") for file in PEERS[peer]]
    outs = [re.findall(r'"(runs/[\w-]+)', text) for text in texts if "import lockstep" in text]
    assert len(outs) == len({folder for found in outs for folder in found}) == 2


def test_there_is_no_other_page_or_program() -> None:
    kinds = ["{}.md", "{}_names.md", "{}_before.txt", "{}_after.py", "{}_core.py"]
    wanted = {kind.format(system) for system in GENERATOR["SYSTEMS"] for kind in kinds}
    wanted |= {"pages.toml"} | {f"{peer}.md" for peer in PEERS}
    wanted |= {f"{peer}_{file}" for peer, files in PEERS.items() for file in files}
    assert {path.name for path in PAGES.iterdir() if path.is_file()} == wanted


@pytest.mark.usefixtures("one_intra_op_thread")
@pytest.mark.parametrize("program", sorted(path.name for path in PAGES.glob("*.py") if path.name not in {HF, *PORTS}))
def test_a_program_runs_and_learns(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = runpy.run_path(str(PAGES / program))
    outputs = made["model"](made["inputs"]) if "Classifier" not in made else made["model"].layers(made["inputs"])
    right = outputs.argmax(dim=1) == (made["inputs"].sum(dim=1) > 0)
    assert right.float().mean() > 0.75
    assert made["model"].training


@pytest.mark.usefixtures("one_intra_op_thread")
def test_the_program_with_a_model_of_transformers_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    made = runpy.run_path(str(PAGES / HF))
    assert made["updater"].iteration == 20
    assert (tmp_path / "runs" / "hf" / "model" / "model.safetensors").exists()


TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]


def skip_without(peer: str) -> None:
    """Skip a test if the package that its program uses is not installed; it is not imported here."""
    package = NEEDS.get(peer)
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


@pytest.mark.parametrize("peer", PEERS)
def test_the_program_that_one_comes_from_runs(peer: str, tmp_path: Path) -> None:
    skip_without(peer)
    start = TORCHRUN if peer == "ddp" else []
    zygote.output_of([sys.executable, *start, PAGES / f"{peer}_before.txt"], tmp_path)
    assert (tmp_path / "runs").is_dir()


@pytest.mark.parametrize("program", PORTS)
def test_a_port_changes_as_many_lines_as_its_page_says(program: str) -> None:
    peer = program.partition("_")[0]
    before, after = (
        (PAGES / name).read_text(encoding="utf-8").splitlines() for name in (f"{peer}_before.txt", program)
    )
    new = [line for line in difflib.ndiff(before, after) if line.startswith("+")]
    assert len(new) == PORTS[program]
    assert f"{SPELLED[len(new)]} lines change or are new" in (PAGES / f"{peer}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("program", PORTS)
def test_a_port_learns_and_has_one_digest_wherever_it_runs(program: str, tmp_path: Path) -> None:
    skip_without(program.partition("_")[0])
    text = (PAGES / program).read_text(encoding="utf-8")
    assert "num_shards=4" in text
    printed = set()
    for start, devices in (([], 1), ([], 2), (TORCHRUN, 1)):
        folder = tmp_path / f"{len(start)}-{devices}"
        folder.mkdir()
        placed = text.replace("num_shards=4", f'devices=["cpu"] * {devices}, num_shards=4')
        (folder / "train.py").write_text(placed + SHOW, encoding="utf-8")
        output = zygote.output_of([sys.executable, *start, "train.py"], folder)
        (line,) = re.findall("^result .*$", output, re.MULTILINE)
        printed.add(line)
    ((_, digest, right),) = map(str.split, printed)
    assert re.fullmatch("[0-9a-f]{64}", digest)
    assert float(right) > 0.75


SHOW = """
layers = getattr(model, "layers", model)
if updater.communicator.rank == 0:
    right = layers(inputs).argmax(dim=1) == (inputs.sum(dim=1) > 0)
    print("result", ls.digest(model), right.float().mean().item(), flush=True)
"""
"""What is added to a port to look at its result."""
