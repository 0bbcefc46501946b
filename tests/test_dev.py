"""The second chance of tests in `dev.py` fails with a test that fails twice, and names one that passes alone."""

from __future__ import annotations

import sys
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[1]
ONCE = """
from pathlib import Path

def test_fails_first():
    seen = Path(__file__).with_name("seen")
    again = seen.exists()
    seen.touch()
    assert again
"""
ALWAYS = """
import pytest

@pytest.mark.parametrize("number", range({}))
def test_fails(number):
    assert number < 0
"""
MANY = """
import pytest
from pathlib import Path

@pytest.mark.parametrize("number", range(6))
def test_fails_first(number):
    seen = Path(__file__).with_name(f"seen {number}")
    again = seen.exists()
    seen.touch()
    assert again
"""


@pytest.mark.parametrize(
    ("tests", "status", "said"),
    [
        ({"test_once": ONCE}, 0, ["FAILED in the shared run", "FAILED first and PASSED alone", "test_fails_first"]),
        ({"test_once": ONCE, "test_always": ALWAYS.format(1)}, 1, ["FAILED in the shared run", "test_fails[0]"]),
        ({"test_many": MANY}, 1, []),
        ({"test_good": "def test_good(): pass"}, 0, []),
        ({"test_broken": "import nothing_of_this_name"}, 2, []),
    ],
    ids=["once", "always", "many", "good", "broken"],
)
def test_what_fails_once_is_run_again_alone(
    tests: dict[str, str], status: int, said: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    dev = SimpleNamespace(**run_path(str(ROOT / "dev.py")))
    for name, text in tests.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p no:hypothesispytest\n")
    found = dev.run_with_second_chance(Path(sys.executable), tmp_path, tmp_path / "cache", ["-q"])
    printed = capfd.readouterr().out
    assert found == status, printed
    assert all(each in printed for each in said), printed
    assert ("FAILED in the shared run" in printed) == bool(said)
    assert ("PASSED alone" in printed) == (status == 0 and bool(said))
