"""Write the diagrams of `docs/images` from the texts beside this file and the layers in `pyproject.toml`.

python docs/diagrams/draw.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from canvas import Canvas

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[1]
IMAGES: Final = HERE.parent / "images"
SOURCE: Final = ROOT / "src" / "lockstep"

Texts = dict[str, Any]


def read(path: Path) -> Texts:
    """Read a TOML file."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


def start(texts: Texts, width: int, height: int) -> Canvas:
    """Return an empty canvas with the title and the description of a diagram."""
    return Canvas(width, height, texts["title"], texts["description"])


# One update on two devices

STAGE_X: Final = [(132, 100), (252, 100), (372, 270), (662, 170), (852, 100), (996, 148)]
"""The left edge and the width of each stage's column."""
STAGE_Y: Final = 16
BANDS: Final = [(112, 156), (352, 92)]
"""The upper edge and the height of each device's band."""
BORDER_X: Final = 974


def draw_update() -> str:
    """Draw one update on two devices, with the line before the commit."""
    texts = read(HERE / "update.toml")
    canvas = start(texts, 1168, 512)
    stages = texts["stage"]
    for (x, width), stage in zip(STAGE_X, stages, strict=True):
        kind = "commit" if stage["name"] == "Commit" else "plain"
        canvas.box(x, STAGE_Y, width, 48, kind)
        canvas.text(x + width / 2, STAGE_Y + 21, stage["name"], size=15, bold=True, within=width)
        canvas.text(x + width / 2, STAGE_Y + 39, stage["part"], size=10.5, mono=True, kind="muted", within=width)
    kinds = ["first", "second"]
    for (y, height), names, kind in zip(BANDS, texts["devices"], kinds, strict=True):
        canvas.band(12, y, 1144, height, kind)
        canvas.text(24, y + height / 2 - 4, names[0], anchor="start", bold=True, within=100)
        canvas.text(24, y + height / 2 + 14, names[1], anchor="start", size=11.5, kind="muted", within=104)
    middles = [y + height / 2 for y, height in BANDS]
    for index in (0, 1):
        x, width = STAGE_X[index]
        canvas.box(x, middles[0] - 32, width, 64, "first")
        write_lines(canvas, x + width / 2, middles[0], stages[index]["does"], within=width)
    canvas.line([(232, middles[0]), (252, middles[0])], arrow=True)
    canvas.line([(352, middles[0]), (372, middles[0])], arrow=True)
    canvas.line([(302, middles[0] + 32), (302, middles[1]), (372, middles[1])], arrow=True)
    nodes = draw_shards(canvas, texts, middles, kinds)
    draw_end(canvas, texts, middles, nodes)
    return canvas.render()


def draw_shards(canvas: Canvas, texts: Texts, middles: list[float], kinds: list[str]) -> list[tuple[float, float]]:
    """Draw the shards of each device and the sums of two; return where these are."""
    nodes = []
    for middle, shards, kind, total in zip(middles, texts["shards"], kinds, texts["sums"][:2], strict=True):
        for x, shard in zip((372, 514), shards, strict=True):
            canvas.box(x, middle - 28, 128, 56, kind)
            canvas.text(x + 64, middle - 4, shard, bold=True, within=128)
            canvas.text(x + 64, middle + 14, texts["shard"], size=11.5, kind="muted", within=128)
        canvas.line([(500, middle), (514, middle)], arrow=True)
        node = (690, middle)
        # The first shard's gradient passes below the second shard's box.
        canvas.line([(436, middle + 28), (436, middle + 38), (650, middle + 38), (674, middle + 13)], arrow=True)
        canvas.line([(642, middle), (668, middle)], arrow=True)
        draw_sum(canvas, node, total, kind)
        nodes.append(node)
    return nodes


def draw_sum(canvas: Canvas, node: tuple[float, float], total: str, kind: str) -> None:
    """Draw a node of the tree."""
    canvas.circle(*node, 22, kind)
    canvas.text(node[0], node[1] + 4, total, size=11.5, within=44)


def draw_end(canvas: Canvas, texts: Texts, middles: list[float], nodes: list[tuple[float, float]]) -> None:
    """Draw the root of the tree, the check, the line before the commit, and the commit."""
    stages = texts["stage"]
    top, bottom = BANDS[0][0] + BANDS[0][1], BANDS[1][0]
    root = (770.0, (top + bottom) / 2)
    for (x, y), side in zip(nodes, (1, -1), strict=True):
        canvas.line([(x + 16, y + 16 * side), (root[0] - 15, root[1] - 17 * side)], arrow=True)
    draw_sum(canvas, root, texts["sums"][2], "plain")
    canvas.text(846, root[1] - 7, texts["divide"], size=11.5, kind="muted", within=90)
    check_x, width = STAGE_X[4]
    canvas.line([(792, root[1]), (902, root[1]), (902, middles[0] + 36)], arrow=True)
    canvas.box(check_x, middles[0] - 36, width, 72, "first")
    write_lines(canvas, check_x + width / 2, middles[0], stages[4]["does"], within=width)
    canvas.line([(902, middles[0] - 36), (902, 92), (436, 92), (436, middles[0] - 28)], "dashed", arrow=True)
    canvas.text(669, 86, texts["retry"], size=12, kind="muted", within=460)
    commit_x, width = STAGE_X[5]
    canvas.line([(952, middles[0]), (996, middles[0])], arrow=True)
    canvas.box(commit_x, middles[0] - 60, width, 120, "commit")
    write_lines(canvas, commit_x + width / 2, middles[0], stages[5]["does"], within=width)
    canvas.line([(BORDER_X, 8), (BORDER_X, 504)], "border")
    canvas.text(BORDER_X - 12, 482, texts["before"], anchor="end", kind="border-text", bold=True, within=940)
    canvas.text(BORDER_X + 12, 482, texts["after"], anchor="start", kind="border-text", bold=True, within=180)


def write_lines(canvas: Canvas, x: float, y: float, lines: list[str], *, within: float, size: float = 12.5) -> None:
    """Write lines of text around the middle (x, y)."""
    pitch = size + 6
    first = y - pitch * (len(lines) - 1) / 2 + 0.35 * size
    for index, line in enumerate(lines):
        canvas.text(x, first + index * pitch, line, size=size, within=within)


# The parts

WIDTH: Final = 900
LEFT: Final = 16
GAP: Final = 16
CHIP: Final = (520, 24, 5)
"""The width and the height of a sub-package's box, and the gap below it."""


def layers_of(name: str) -> list[list[str]]:
    """Return the layers of `pyproject.toml` for a container, from top to bottom, without private modules."""
    contracts = read(ROOT / "pyproject.toml")["tool"]["importlinter"]["contracts"]
    (layers,) = [each["layers"] for each in contracts if each.get("containers") == [name]]
    rows = [[part.strip() for part in layer.split("|")] for layer in layers]
    public = [[part for part in row if not part.startswith("_")] for row in rows]
    return [row for row in public if row]


def sub_packages(part: str) -> list[str]:
    """Return the sub-packages of a part in the order of its layers; none where it has no layers."""
    contracts = read(ROOT / "pyproject.toml")["tool"]["importlinter"]["contracts"]
    if not any(each.get("containers") == [f"lockstep.{part}"] for each in contracts):
        return []
    names = [name for row in layers_of(f"lockstep.{part}") for name in row]
    return [name for name in names if (SOURCE / part / name / "__init__.py").is_file()]


def draw_parts() -> str:
    """Draw the parts in their layers, each with its sub-packages."""
    texts = read(HERE / "parts.toml")
    words = {name: text for name, text in texts["part"].items() if name != "sub"}
    rows = layers_of("lockstep")
    heights = [row_height(row) for row in rows]
    canvas = start(texts, WIDTH, sum(heights) + GAP * (len(rows) - 1) + 32)
    parts = [part for row in rows for part in row]
    chips = [f"{part}.{name}" for part in parts for name in sub_packages(part)]
    if {*words, *texts["part"]["sub"]} != {*parts, *chips}:
        raise ValueError("`parts.toml` must describe every part and sub-package of pyproject.toml, and no other.")
    y = 16
    for row, height in zip(rows, heights, strict=True):
        width = (WIDTH - 2 * LEFT - 10 * (len(row) - 1)) / len(row)
        for index, part in enumerate(row):
            draw_part(canvas, (LEFT + index * (width + 10), y, width, height), part, words[part], texts["part"]["sub"])
        y += height
        if row is not rows[-1]:
            canvas.line([(WIDTH / 2, y), (WIDTH / 2, y + GAP)], arrow=True)
        y += GAP
    return canvas.render()


def row_height(row: list[str]) -> int:
    """Return the height of a layer: tall for sub-packages, and for two lines where parts stand side by side."""
    chips = max(len(sub_packages(part)) for part in row)
    if chips:
        return chips * (CHIP[1] + CHIP[2]) - CHIP[2] + 16
    return 32 if len(row) == 1 else 46


def draw_part(
    canvas: Canvas, place: tuple[float, float, float, float], part: str, text: str, sub_texts: dict[str, str]
) -> None:
    """Draw one part, and its sub-packages from top to bottom."""
    x, y, width, height = place
    canvas.box(x, y, width, height, "first" if sub_packages(part) else "plain")
    text = text.replace("`", "")
    if width == WIDTH - 2 * LEFT and not sub_packages(part):
        canvas.text(x + 14, y + 21, part, size=14, anchor="start", bold=True, mono=True, within=150)
        canvas.text(x + 180, y + 21, text, size=12.5, anchor="start", kind="muted", within=width - 190)
        return
    first = y + (height - 46) / 2
    canvas.text(x + 14, first + 20, part, size=14, anchor="start", bold=True, mono=True, within=width)
    canvas.text(x + 14, first + 37, text, size=11.5, anchor="start", kind="muted", within=width - 16)
    chip_x, chip_y = x + width - CHIP[0] - 8, y + 8
    if sub_packages(part):
        canvas.line([(chip_x - 14, y + 10), (chip_x - 14, y + height - 10)], arrow=True)
    for name in sub_packages(part):
        says = sub_texts[f"{part}.{name}"].replace("`", "")
        canvas.box(chip_x, chip_y, CHIP[0], CHIP[1], "second", radius=4)
        canvas.text(chip_x + 12, chip_y + 16.5, name, size=12.5, anchor="start", mono=True, within=110)
        canvas.text(chip_x + 130, chip_y + 16.5, says, size=12, anchor="start", kind="muted", within=CHIP[0] - 140)
        chip_y += CHIP[1] + CHIP[2]


# One step on two ranks

RANK_X: Final = (180, 470)
PANEL: Final = (556, 400)
"""The left edge and the width of the panels."""


def draw_step() -> str:
    """Draw one step on two ranks as a sequence, and the three ways in which it can end instead."""
    texts = read(HERE / "step.toml")
    canvas = start(texts, 976, 640)
    draw_ranks(canvas, RANK_X, 16, 624, texts["ranks"])
    phases = texts["phase"]
    draw_phase(canvas, phases["compute"], 66, 52, "first")
    draw_phase(canvas, phases["early"], 126, 80, "first")
    cross_arrows(canvas, RANK_X, 176, "dashed")
    draw_phase(canvas, phases["control"], 214, 80, "first")
    cross_arrows(canvas, RANK_X, 264, "edge")
    draw_phase(canvas, phases["sum"], 302, 158, "first")
    left, right = RANK_X[0] + 8, RANK_X[1] - 8
    ends = [(left, right), (right, left)] * 2
    for y, (x0, x1), text in zip((330, 358, 416, 444), ends, phases["sum"]["text"], strict=True):
        canvas.line([(x0, y), (x1, y)], arrow=True)
        canvas.text(sum(RANK_X) / 2, y - 6, text, size=12, within=260)
    canvas.text(left + 6, 388, phases["sum"]["owners"][0], size=12, anchor="start", kind="muted", within=110)
    canvas.text(right - 6, 388, phases["sum"]["owners"][1], size=12, anchor="end", kind="muted", within=110)
    draw_phase(canvas, phases["check"], 468, 36, "first")
    canvas.line([(12, 520), (536, 520)], "border")
    canvas.text(sum(RANK_X) / 2, 540, texts["line"], size=12.5, kind="border-text", bold=True, within=300)
    draw_phase(canvas, phases["commit"], 554, 56, "commit")
    for index, ending in enumerate(texts["end"]):
        draw_ending(canvas, 16 + index * 186, ending, texts["ranks"], index)
    x = PANEL[0] + PANEL[1] / 2
    write_lines(canvas, x, 600, texts["footer"]["text"], within=PANEL[1])
    return canvas.render()


def draw_ranks(canvas: Canvas, xs: tuple[float, float], top: float, bottom: float, names: list[str]) -> None:
    """Draw the names of the ranks and their lifelines."""
    for x, name, kind in zip(xs, names, ("plain", "plain"), strict=True):
        canvas.line([(x, top + 30), (x, bottom)], "lifeline")
        canvas.box(x - 44, top, 88, 30, kind)
        canvas.text(x, top + 20, name, size=13.5, bold=True, within=88)


def draw_phase(canvas: Canvas, phase: Texts, y: float, height: float, kind: str) -> None:
    """Draw one phase: its name, the activity of both ranks and what happens."""
    canvas.text(16, y + 18, phase["name"], anchor="start", bold=True, size=12.5, within=150)
    for x in RANK_X:
        canvas.box(x - 8, y, 16, height, kind, radius=3)
    if "owners" not in phase:
        first = y + 18 if len(phase["text"]) > 1 else y + height / 2 + 4
        for index, line in enumerate(phase["text"]):
            canvas.text(sum(RANK_X) / 2, first + 17 * index, line, size=12, within=RANK_X[1] - RANK_X[0] - 20)


def cross_arrows(canvas: Canvas, xs: tuple[float, float], y: float, kind: str) -> None:
    """Draw a message from each rank to the other."""
    left, right = xs[0] + 8, xs[1] - 8
    canvas.line([(left, y), (right, y + 18)], kind, arrow=True)
    canvas.line([(right, y), (left, y + 18)], kind, arrow=True)


def draw_ending(canvas: Canvas, y: float, ending: Texts, ranks: list[str], which: int) -> None:
    """Draw one way in which the step can end instead."""
    x, width = PANEL
    canvas.box(x, y, width, 174, "error")
    canvas.text(x + 16, y + 24, ending["name"], anchor="start", bold=True, size=14, within=width)
    xs = (x + 70, x + width - 70)
    for at, name in zip(xs, ranks, strict=True):
        canvas.text(at, y + 46, name, size=12, within=88)
    left, right = xs[0] + 8, xs[1] - 8
    died = which == 1
    for at in xs:
        end = y + 84 if died and at == xs[1] else y + 126
        canvas.line([(at, y + 52), (at, end)], "lifeline")
        canvas.box(at - 8, y + 54, 16, end - y - 54 if died and at == xs[1] else 62, "first", radius=3)
    if which == 0:
        canvas.cross(xs[1], y + 70)
        canvas.line([(right, y + 98), (left, y + 98)], arrow=True)
    elif died:
        canvas.cross(xs[1], y + 84)
        canvas.line([(right, y + 98), (left, y + 98)], "dashed")
        canvas.cross((left + right) / 2, y + 98, 6)
    else:
        cross_arrows(canvas, xs, y + 92, "edge")
    canvas.text((left + right) / 2, y + 84, ending["arrow"][0], size=12, within=right - left - 4)
    write_lines(canvas, x + width / 2, y + 149, ending["result"], within=width - 16, size=12)


DIAGRAMS: Final[dict[str, Callable[[], str]]] = {
    "update.svg": draw_update,
    "parts.svg": draw_parts,
    "step.svg": draw_step,
}
"""The function that draws each image."""


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    for each, draw in DIAGRAMS.items():
        (IMAGES / each).write_text(draw(), encoding="utf-8")
