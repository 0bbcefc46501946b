"""One word for one thing: the words that docs/words.toml rules out are in neither the source nor the pages."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
WORDS: list[dict[str, Any]] = tomllib.loads((ROOT / "docs" / "words.toml").read_text(encoding="utf-8"))["word"]
SOURCE = ROOT / "src" / "lockstep"
GLOSSARY = ROOT / "docs" / "glossary.md"
KINDS = {".md", ".toml", ".py", ".txt", ".sh", ".sbatch", ".yaml", ".svg"}
VERBS = ("Give", "Take", "Say", "Tell", "Let", "Make", "Put", "Bring", "Look", "Do", "Go", "Get hold")
"""What a docstring does not begin with: the standard verb is another one."""


def searched_files() -> list[Path]:
    pages = [path for path in (ROOT / "docs").rglob("*") if path.suffix in KINDS and path.name != "words.toml"]
    pages = [path for path in pages if not path.is_relative_to(ROOT / "docs" / "_build")]
    return sorted([*(ROOT / "src").rglob("*.py"), *pages, ROOT / "README.md", ROOT / "CONTRIBUTING.md"])


def normalised(text: str) -> str:
    """Turn a text into words and spaces, with as many lines as before.

    >>> normalised("class WorkLoads:  # in the\\n    # place of `_slot`").split()
    ['class', 'Work', 'Loads:', 'in', 'the', 'place', 'of', '`', 'slot`']
    """
    text = re.sub(r"^([ \t]*)(#:?|\*|>)", lambda found: " " * len(found[0]), text, flags=re.MULTILINE)
    text = text.replace(" # ", "   ")
    quoted = r"__\w+__|\bslots=|\S+::\S+"  # names that belong to Python, and names of tests
    text = re.sub(quoted, lambda found: " " * len(found[0]), text)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text.replace("_", " "))


def compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern.replace(" ", r"\s+"), re.IGNORECASE)


def searched_text(path: Path) -> str:
    """Read a file without the table of the words, and without the names of traces on the pages of differences."""
    text = path.read_text(encoding="utf-8")
    if path == GLOSSARY:
        return text.split("## Not used here", maxsplit=1)[0]
    return re.sub(r"`[^`]*`", "``", text) if path.name.startswith("differences") else text


def found_in(text: str, path: str = "") -> Iterator[tuple[int, str, str]]:
    """Yield the number of the line, the match and what to write instead, for every word that is ruled out."""
    plain = normalised(text)
    for word in WORDS:
        if path in word.get("allowed", ()):
            continue
        for match in compiled(word["pattern"]).finditer(plain):
            yield plain.count("\n", 0, match.start()) + 1, " ".join(match[0].split()), word["instead"]


def test_no_word_that_is_ruled_out_is_used() -> None:
    lines = []
    for path in searched_files():
        place = path.relative_to(ROOT)
        inner = path.relative_to(SOURCE).as_posix() if path.is_relative_to(SOURCE) else ""
        for line, word, instead in found_in(searched_text(path), inner):
            lines.append(f"{place}:{line}: {word!r}; instead: {instead}")
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("x = 1\n# the work loads of devices\n", 2),
        ("def one_shard_a_device(): ...\n", 1),
        ("class WorkLoad: ...\n", 1),
        ('"""Sum in the\n    place of nothing."""\n', 1),
        ("# one thing\n# in the\n# place of another\n", 2),
        ("error = 'Somebody wrote to it.'\n", 1),
        ("a lane\n", 1),
    ],
)
def test_a_planted_word_is_found(text: str, line: int) -> None:
    assert [number for number, _, _ in found_in(text)] == [line]


def test_words_that_are_in_order_are_left_alone() -> None:
    text = (
        "@dataclass(frozen=True, slots=True)\nclass A:\n    __slots__ = ()\n    # a workload per device, vector lanes\n"
    )
    assert list(found_in(text)) == []


def test_a_word_is_allowed_where_it_means_something_else() -> None:
    assert [word for _, word, _ in found_in("an arena of glibc")] == ["arena"]
    assert list(found_in("an arena of glibc", "replicas/pool/worker.py")) == []
    assert [each for word in WORDS for each in word.get("allowed", ()) if not (SOURCE / each).is_file()] == []


def test_the_table_of_the_glossary_is_made_of_the_list() -> None:
    table = GLOSSARY.read_text(encoding="utf-8").split("## Not used here")[1]
    rows = [f"| {word['shown']} | {word['instead']} |" for word in WORDS]
    assert [line for line in table.splitlines() if line.startswith("| ")][1:] == rows


def docstrings(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every docstring of a module, class or function."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield node.body[0].lineno, docstring


def test_docstrings_begin_with_standard_verbs() -> None:
    lines = []
    for path in [path for path in searched_files() if path.suffix == ".py"]:
        for line, docstring in docstrings(path.read_text(encoding="utf-8")):
            if re.match(rf"({'|'.join(VERBS)})\b", docstring):
                lines.append(f"{path.relative_to(ROOT)}:{line}: {docstring.splitlines()[0]}")
    assert not lines, "\n".join(lines)


def test_a_planted_verb_is_found() -> None:
    text = '"""Things."""\n\n\ndef f() -> None:\n    """Give nothing."""\n'
    assert [line for line, docstring in docstrings(text) if docstring.startswith(VERBS)] == [5]
