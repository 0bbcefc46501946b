"""The page in a real browser: it draws its curves, answers mouse and keys, and asks for nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.html_report import read_run, render
from tests.html_report.test_page import NASTY, write_nasty
from tests.support.chromium import Page, browser, find_chromium
from tests.support.recorded import recorded_run

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="not run: Chromium is not installed")

LINES = "[...document.querySelectorAll('.chart path.line[data-label]')]"
LOSS = "[...document.querySelectorAll('.chart')].find(each => each.querySelector('h3').textContent === 'loss')"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write pages of one run, of two that differ, and of files that are traps."""
    folder = tmp_path_factory.mktemp("pages")
    recorded_run(folder / "one")
    recorded_run(folder / "two", lr=0.125)
    (folder / "nasty").mkdir()
    write_nasty(folder / "nasty")
    one, two, nasty = (read_run(folder / name) for name in ("one", "two", "nasty"))
    for name, text in {"one": render(one), "both": render(one, two), "traps": render(nasty, nasty)}.items():
        (folder / f"{name}.html").write_text(text)
    return folder


def open_(page: Page, path: Path, **options: Any) -> None:
    page.console.clear()
    page.requests.clear()
    page.open(path, **options)


def middle(page: Page, share: float = 0.5) -> tuple[float, float]:
    """Return a place in the chart of the loss."""
    page.evaluate(f"{LOSS}.scrollIntoView()")
    box = f"{LOSS}.querySelector(':scope > svg').getBoundingClientRect()"
    left, top, width, height = page.evaluate(f"(b => [b.left, b.top, b.width, b.height])({box})")
    return left + 60 + share * (width - 70), top + height / 2


def reading(page: Page) -> str:
    return str(page.evaluate(f"{LOSS}.querySelector('.reading').textContent"))


def test_curves_are_drawn_without_an_error_or_a_request(chromium: Page, pages: Path) -> None:
    for dark in (False, True):
        open_(chromium, pages / "one.html", dark=dark)
        drawn = chromium.evaluate(f"{LINES}.map(each => [each.dataset.label, each.getTotalLength()])")
        assert [label for label, _ in drawn][:2] == ["main/loss", "lr"]
        assert all(length > 100 for _, length in drawn)
        assert chromium.console == []
        assert chromium.requests == [(pages / "one.html").as_uri()]
        assert chromium.screenshot().startswith(b"\x89PNG")


def test_the_cursor_shows_all_values_of_an_update(chromium: Page, pages: Path) -> None:
    open_(chromium, pages / "both.html")
    chromium.mouse("mouseMoved", *middle(chromium, 0.6))
    assert reading(chromium).startswith("update 4, epoch ")
    values = chromium.evaluate("[...document.querySelectorAll('.chart .value')].map(each => each.textContent)")
    assert all(values)
    # In the log of the first run, too.
    losses = read_run(pages / "one").log
    assert losses is not None
    assert float(values[0]) == pytest.approx(losses.series["main/loss"].values[3], rel=1e-5)  # 6 digits are shown


def test_drag_zooms_all_charts_and_a_double_click_shows_all(chromium: Page, pages: Path) -> None:
    open_(chromium, pages / "one.html")
    ticks = "[...document.querySelectorAll('.chart')].map(each => each.querySelector(':scope > svg').textContent)"
    before = chromium.evaluate(ticks)
    chromium.mouse("mousePressed", *middle(chromium, 0.2))
    chromium.mouse("mouseMoved", *middle(chromium, 0.4))
    chromium.mouse("mouseReleased", *middle(chromium, 0.4))
    zoomed = chromium.evaluate(ticks)
    assert all(one != other for one, other in zip(before, zoomed, strict=True))
    for clicks in (1, 2):
        chromium.mouse("mousePressed", *middle(chromium), clicks=clicks)
        chromium.mouse("mouseReleased", *middle(chromium), clicks=clicks)
    assert chromium.evaluate(ticks) == before
    assert chromium.console == []


def test_keys_move_the_cursor_zoom_and_switch_the_axis(chromium: Page, pages: Path) -> None:
    open_(chromium, pages / "one.html")
    chromium.evaluate(f"{LOSS}.querySelector(':scope > svg').focus()")
    chromium.key("ArrowRight")
    chromium.key("ArrowRight")
    assert reading(chromium).startswith("update 2, ")
    assert "main/loss" in chromium.evaluate(f"{LOSS}.querySelector('[aria-live]').textContent")
    path = f"{LOSS}.querySelector('path.line[data-label]').getAttribute('d')"
    linear = chromium.evaluate(path)
    chromium.key("l")
    assert chromium.evaluate(f"{LOSS}.querySelector('button').getAttribute('aria-pressed')") == "true"
    assert chromium.evaluate(path) != linear
    chromium.key("l")
    chromium.key("+")
    assert chromium.evaluate(path) != linear
    chromium.key("0")
    assert chromium.evaluate(path) == linear


def test_the_first_difference_is_marked_and_runs_have_colours(chromium: Page, pages: Path) -> None:
    open_(chromium, pages / "both.html")
    assert "differs from update 1" in chromium.evaluate(f"{LOSS}.textContent")
    colours = chromium.evaluate(f"{LINES}.slice(0, 2).map(each => getComputedStyle(each).stroke)")
    assert len(set(colours)) == 2


def test_names_from_files_stay_text(chromium: Page, pages: Path) -> None:
    open_(chromium, pages / "traps.html")
    assert chromium.console == []
    assert chromium.requests == [(pages / "traps.html").as_uri()]
    assert chromium.evaluate("document.querySelectorAll('img').length") == 0
    labels = chromium.evaluate(
        "[...document.querySelectorAll('.legend button span:first-of-type')].map(e => e.textContent)"
    )
    assert any(NASTY in label for label in labels)
    assert chromium.evaluate("document.querySelectorAll('.chart path.broken').length") > 0


def test_a_script_that_fails_would_be_seen(chromium: Page, pages: Path, tmp_path: Path) -> None:
    page = (pages / "one.html").read_text()
    # Both without the policy, which would refuse a changed script.
    start, end = page.index("<meta http-equiv"), page.index('<meta name="viewport"')
    (tmp_path / "broken.html").write_text((page[:start] + page[end:]).replace("bounds = extent();", "bounds = gone();"))
    open_(chromium, tmp_path / "broken.html")
    assert any("gone is not defined" in each for each in chromium.console)
    assert "The charts could not be drawn" in chromium.evaluate("document.querySelector('.failure').textContent")
    (tmp_path / "changed.html").write_text(page.replace("bounds = extent();", "bounds = extent(); ", 1))
    open_(chromium, tmp_path / "changed.html")
    assert any("Content Security Policy" in each for each in chromium.console)
