"""The programs on the pages of `docs/` and in the README run, from the first to the last of a page."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

from tests.support import zygote

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"

PAGES = {
    "get-started/shards.md": 2,
    "how-to/batch-size.md": 1,
    "how-to/gradient-checkpointing.md": 1,
    "how-to/warm-up-and-cosine.md": 1,
    "group.md": 3,
    "how-to/buffers.md": 1,
    "how-to/clipping-and-schedules.md": 6,
    "how-to/data.md": 10,
    "how-to/streams.md": 2,
    "how-to/debugging-nan.md": 3,
    "how-to/evaluation.md": 4,
    "how-to/logging.md": 2,
    "how-to/notebooks.md": 4,
    "how-to/profiling.md": 2,
    "how-to/report.md": 2,
    "how-to/saving.md": 5,
    "how-to/several-networks.md": 2,
    "how-to/trainer.md": 9,
    "how-to/uneven-devices.md": 2,
    "how-to/state-in-losses.md": 3,
    "how-to/whole-batch-loss.md": 1,
    "index.md": 1,
    "modules.md": 6,
}
"""How many programs each page holds."""


def programs_of(page: str) -> list[str]:
    """Return the programs of a page, also those in lists, which are indented."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return [
        dedent(found[0]) for found in re.finditer(r"(?<=```python\n)(.*?)(?=^ *```)", text, re.DOTALL | re.MULTILINE)
    ]


def test_every_how_to_page_with_a_program_is_run() -> None:
    pages = [
        path.relative_to(DOCS).as_posix() for kind in ("get-started", "how-to") for path in (DOCS / kind).glob("*")
    ]
    assert sorted(page for page in pages if programs_of(page) and page not in {*PAGES, *FRAGMENTS}) == []


FRAGMENTS = {
    "get-started/compare.md": "run below with torchrun",
    "get-started/tutorial.md": "a file of its own with arguments; run below",
    "how-to/hidden-states.md": "`tests/updaters/test_carried.py` trains so",
}
"""Pages whose programs use objects that the page does not create, and why."""


@pytest.mark.usefixtures("one_intra_op_thread")
@pytest.mark.parametrize("page", PAGES)
def test_the_programs_of_a_page_run(
    page: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    programs = programs_of(page)
    assert len(programs) == PAGES[page]
    names: dict[str, Any] = {}
    with torch.random.fork_rng():
        for program in programs:
            exec(compile(program, page, "exec"), names)  # noqa: S102 - our own page
    assert capsys.readouterr().out


ALL_PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
WORDS_OF_A_PAGE = 2_000
WORDS_OF_THE_DESIGN = 1_500
INNER_ITEM = re.compile(r"[.:*]+ (?:\*|[2-9]\.) \*|(?<=\S) \*\n")
KINDS = r"py|toml|md|txt|json|sh|sbatch|yaml|svg|png"
NOT_OURS = {"train.py"}
"""Files of the reader."""
STARTS = [ROOT, ROOT / "src" / "lockstep", ROOT / "docs", ROOT / "tests", ROOT / "examples" / "libraries"]
"""Where a path on a page may begin."""


def anchor(heading: str) -> str:
    """Return the anchor of a heading.

    >>> anchor("## Where `shards` are cut, and why")
    'where-shards-are-cut-and-why'
    """
    return re.sub(r"[^\w\- ]", "", heading.lstrip("# ").lower()).replace(" ", "-")


def leads_somewhere(page: Path, link: str) -> bool:
    """Return whether a link of a page leads to another site, or to a file and a heading that are there."""
    file, _, section = link.partition("#")
    target = page.parent / file if file else page
    if ":" in link or not section:
        return ":" in link or target.exists()
    headings = re.findall(r"^#+ .*$", target.read_text(encoding="utf-8"), re.MULTILINE) if target.exists() else []
    return section in map(anchor, headings)


def test_the_links_of_all_pages_lead_somewhere() -> None:
    links = [(page, link) for page in ALL_PAGES for link in links_of(page)]
    assert [(str(page), link) for page, link in links if not leads_somewhere(page, link)] == []
    page = ROOT / "README.md"
    assert [leads_somewhere(page, each) for each in ("docs/nothing.md", "#nothing", "docs/index.md#nothing")] == [
        False
    ] * 3


def links_of(page: Path) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))


def named_paths(text: str) -> set[str]:
    """Find the paths that a text names: in its code and its commands.

    >>> sorted(named_paths("See `updaters/step`, `tree.py`, `a/b.py::test_c`, `/etc/hosts` and `1/2`."))
    ['a/b.py', 'tree.py', 'updaters/step']
    >>> named_paths("    python benchmarks/updates.py --rounds 8")
    {'benchmarks/updates.py'}
    """
    code = " ".join(re.findall(r"`([^`\n]+)`", text))
    files = re.findall(rf"(?<![\w./-])[\w-][\w./-]*\.(?:{KINDS})\b", code)
    folders = re.findall(r"(?<!\S)[a-z_]+(?:/[a-z_]+)+(?!\S)", code)
    # Others are names of values, and those in `runs` are written by the examples.
    folders = [path for path in folders if path.split("/")[0] != "runs" and is_there(path.split("/")[0])]
    commands = re.findall(rf"\b(?:benchmarks|docs|examples|src|tests)/[\w/.-]+\.(?:{KINDS})\b", text)
    return {*files, *folders, *commands}


def is_there(path: str) -> bool:
    """Return whether a path is one of the project's; a bare name may be in any folder of the source or the tests."""
    if any((start / path).exists() for start in STARTS):
        return True
    return "/" not in path and any(list((ROOT / folder).rglob(path)) for folder in ("src", "tests"))


def test_the_paths_that_pages_name_exist() -> None:
    missing = []
    for page in ALL_PAGES:
        text = page.read_text(encoding="utf-8")
        if page.name.startswith("differences"):  # traces lie outside of the repository
            text = re.sub(r"^## .*$|\(`.*`.*\)$", "", text, flags=re.MULTILINE)
        missing += [(str(page), path) for path in sorted(named_paths(text) - NOT_OURS) if not is_there(path)]
    assert missing == []


def test_a_path_that_is_not_there_is_noticed() -> None:
    text = "`updaters/step/nothing.py`, `tests/updaters/nothing.py`, `nothing.py`, `replicas/nothing` and `tree.py`"
    assert [path for path in sorted(named_paths(text)) if not is_there(path)] == [
        "nothing.py",
        "replicas/nothing",
        "tests/updaters/nothing.py",
        "updaters/step/nothing.py",
    ]


def test_pages_are_short() -> None:
    words = {str(page): len(page.read_text(encoding="utf-8").split()) for page in ALL_PAGES}
    assert {page: number for page, number in words.items() if number > WORDS_OF_A_PAGE} == {}
    assert words[str(DOCS / "design.md")] <= WORDS_OF_THE_DESIGN


def test_each_item_of_a_list_begins_a_line() -> None:
    prose = {
        page: re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL) for page in ALL_PAGES
    }
    assert [(str(page), each[0]) for page, text in prose.items() for each in INNER_ITEM.finditer(text)] == []
    assert INNER_ITEM.search("1. One.\n2. Two.\n* Three, 2 * `n`") is None
    planted = "* One. * **Two**. 2. **Three** *\n"
    assert [each[0] for each in INNER_ITEM.finditer(planted)] == [". * *", "**. 2. *", " *\n"]


def test_every_page_is_linked_from_another() -> None:
    linked = {
        (page.parent / link.partition("#")[0]).resolve()
        for page in ALL_PAGES
        for link in links_of(page)
        if ":" not in link
    }
    folders = [path for path in linked if path.is_dir()]
    assert [page for page in DOCS.rglob("*.md") if page not in linked and page.parent not in folders] == []


TWO_DEVICES = 'devices=["cpu", "cpu"]'
PLACEMENTS = {
    "as it is pasted": ([], TWO_DEVICES),
    "lockstep run": (["-m", "lockstep", "run", "-n", "2"], 'devices=["cpu"]'),
    "on three devices": ([], 'devices=["cpu"] * 3'),
    "torchrun": (["-m", "torch.distributed.run", "--nproc-per-node", "2"], TWO_DEVICES),
}
"""How the README's program is started, and on which devices. `tests/test_package.py` starts it anew, as pasted."""
MEASURED = ["main/loss", "validation/main/accuracy"]


@pytest.mark.parametrize(
    "placements",
    [
        pytest.param(["as it is pasted", "torchrun"], id="two"),
        pytest.param([*PLACEMENTS], id="all", marks=pytest.mark.slow),
    ],
)
def test_the_program_of_the_readme_prints_one_digest_wherever_it_runs(tmp_path: Path, placements: list[str]) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    program = readme.split("```python\n")[1].split("```\n")[0]
    assert TWO_DEVICES in program
    printed = {}
    for name in placements:
        start, devices = PLACEMENTS[name]
        folder = tmp_path / name
        folder.mkdir()
        (folder / "train.py").write_text(program.replace(TWO_DEVICES, devices), encoding="utf-8")
        lines = zygote.output_of([sys.executable, *start, "train.py"], folder).splitlines()
        assert lines[0].split()[:4] == ["epoch", "iteration", *MEASURED]
        assert [line.split()[0] for line in lines[1:11]] == [str(epoch) for epoch in range(1, 11)]
        assert float(lines[10].split()[3]) > 0.8
        (printed[name],) = lines[11:]
    assert len(set(printed.values())) == 1, printed
    assert re.fullmatch("[0-9a-f]{64}", printed["as it is pasted"])


@pytest.mark.slow
def test_two_processes_change_the_loss_of_ddp_and_not_that_of_lockstep(tmp_path: Path) -> None:
    (program,) = programs_of("get-started/compare.md")
    (tmp_path / "compare.py").write_text(program, encoding="utf-8")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
    printed = [
        zygote.output_of([*launcher, number, "compare.py"], tmp_path, run=zygote.run).splitlines()[-2:]
        for number in ("1", "2")
    ]
    (ddp, own), (other, same) = printed
    assert ddp.startswith("DistributedDataParallel  loss 0.")
    assert ddp != other
    assert own.startswith("lockstep                 loss 0.")
    assert own == same


def test_the_transcript_of_the_tutorial_holds(tmp_path: Path) -> None:
    (program,) = programs_of("get-started/tutorial.md")
    (tmp_path / "train.py").write_text(program, encoding="utf-8")

    def train(epochs: int, devices: int) -> list[str]:
        command = [sys.executable, "train.py", str(epochs), str(devices)]
        return zygote.output_of(command, tmp_path).splitlines()

    first, resumed = train(4, 1), train(6, 2)
    assert [line.split()[0] for line in first[1:-1]] == ["1", "2", "3", "4"]
    assert [line.split()[0] for line in resumed[1:-1]] == ["5", "6"]
    assert float(resumed[-2].split()[3]) > 0.9
    (tmp_path / "runs").rename(tmp_path / "runs-resumed")
    assert train(6, 3)[-1] == resumed[-1]
    compare = [sys.executable, "-m", "lockstep", "compare", "runs/moons", "runs-resumed/moons"]
    said = zygote.output_of(compare, tmp_path)
    assert said.strip() in (DOCS / "get-started" / "tutorial.md").read_text(encoding="utf-8")
