"""A drawing surface that writes SVG and refuses text that does not fit or that overlaps other text."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

LIGHT: Final = {
    "page": "#ffffff",
    "text": "#1f2328",
    "muted": "#59636e",
    "line": "#6e7781",
    "plain": ("#f6f8fa", "#8c959f"),
    "first": ("#ddf4ff", "#0969da"),
    "second": ("#dafbe1", "#1a7f37"),
    "commit": ("#fff1e5", "#bc4c00"),
    "error": ("#ffebe9", "#cf222e"),
}
DARK: Final = {
    "page": "#0d1117",
    "text": "#e6edf3",
    "muted": "#9198a1",
    "line": "#8b949e",
    "plain": ("#1c2128", "#656c76"),
    "first": ("#13233a", "#4493f8"),
    "second": ("#12261e", "#3fb950"),
    "commit": ("#2b1c10", "#db6d28"),
    "error": ("#2c1a1d", "#f85149"),
}
"""Colours by their use; a pair is the fill and the stroke of a box."""

SANS: Final = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"
MONO: Final = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"

# Widths in em, at least those of DejaVu Sans, which is the widest of the usual fonts.
NARROW: Final = frozenset("iljIftr.,:;'|!()[] ")
WIDE: Final = frozenset("mwMW@%+=÷→")
MONO_WIDTH: Final = 0.605
BOLD: Final = 1.1
MARGIN: Final = 4


def text_width(text: str, size: float, *, bold: bool = False, mono: bool = False) -> float:
    """Return an upper bound of the width of a line of text, in pixels."""
    if mono:
        return len(text) * MONO_WIDTH * size
    ems = sum(0.42 if each in NARROW else 0.99 if each in WIDE else 0.64 for each in text)
    return ems * size * (BOLD if bold else 1.0)


class Canvas:
    """An SVG image of fixed size in the colours of the page it is shown on.

    Args:
        width: In pixels.
        height: In pixels.
        title: A short name, which screen readers read.
        description: What the image shows, for those who do not see it.
    """

    def __init__(self, width: int, height: int, title: str, description: str) -> None:
        self.width, self.height = width, height
        self._title, self._description = title, description
        self._shapes: list[str] = []
        self._texts: list[str] = []
        self._rectangles: list[tuple[float, float, float, float, str]] = []

    def box(self, x: float, y: float, width: float, height: float, kind: str, *, radius: int = 6) -> None:
        """Draw a filled box with its upper left corner at (x, y)."""
        size = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}"'
        self._shapes.append(f'<rect class="{kind}" {size}/>')

    def band(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        """Draw a band in the background, without a border."""
        size = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8"'
        self._shapes.append(f'<rect class="{kind} band" {size}/>')

    def circle(self, x: float, y: float, radius: float, kind: str) -> None:
        """Draw a filled circle around (x, y)."""
        self._shapes.append(f'<circle class="{kind}" cx="{x:g}" cy="{y:g}" r="{radius:g}"/>')

    def line(self, points: Sequence[tuple[float, float]], kind: str = "edge", *, arrow: bool = False) -> None:
        """Draw a line through points, with an arrowhead at the last one if wanted."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._shapes.append(f'<polyline class="{kind}" points="{path}"/>')
        if arrow:
            self._head(*points[-2], *points[-1], kind)

    def _head(self, x0: float, y0: float, x: float, y: float, kind: str) -> None:
        # Drawn as a triangle, for some viewers ignore markers.
        length = ((x - x0) ** 2 + (y - y0) ** 2) ** 0.5
        dx, dy = (x - x0) / length, (y - y0) / length
        back_x, back_y = x - 8 * dx, y - 8 * dy
        corners = [(x, y), (back_x - 4 * dy, back_y + 4 * dx), (back_x + 4 * dy, back_y - 4 * dx)]
        path = " ".join(f"{round(a, 2):g},{round(b, 2):g}" for a, b in corners)
        self._shapes.append(f'<polygon class="head {kind}-head" points="{path}"/>')

    def cross(self, x: float, y: float, size: float = 7) -> None:
        """Draw the mark of a failure around (x, y)."""
        self.line([(x - size, y - size), (x + size, y + size)], "failure")
        self.line([(x - size, y + size), (x + size, y - size)], "failure")

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 13,
        anchor: str = "middle",
        kind: str = "text",
        bold: bool = False,
        mono: bool = False,
        within: float | None = None,
    ) -> None:
        """Write one line of text with its baseline at (x, y).

        Args:
            x: The left end, the middle or the right end of the text, as `anchor` says.
            y: The baseline.
            text: One line.
            size: The size of the font in pixels.
            anchor: ``"start"``, ``"middle"`` or ``"end"``.
            kind: The name of the colour.
            bold: Whether the text is bold.
            mono: Whether the font is monospaced.
            within: The width that the text must fit into, in pixels.

        Raises:
            ValueError: If the text does not fit, leaves the image, or overlaps text that is there.
        """
        width = text_width(text, size, bold=bold, mono=mono)
        if within is not None and width > within:
            raise ValueError(f"{text!r} must fit into {within:g} pixels, got {width:.0f}.")
        left = {"start": x, "middle": x - width / 2, "end": x - width}[anchor]
        mine = (left, y - 0.8 * size, left + width, y + 0.25 * size, text)
        if left < MARGIN or mine[2] > self.width - MARGIN or mine[1] < MARGIN or mine[3] > self.height - MARGIN:
            raise ValueError(f"{text!r} must lie in the image, got {[round(each) for each in mine[:4]]}.")
        for other in self._rectangles:
            if mine[0] < other[2] and other[0] < mine[2] and mine[1] < other[3] and other[1] < mine[3]:
                raise ValueError(f"{text!r} must not overlap {other[4]!r}.")
        self._rectangles.append(mine)
        classes = " ".join([kind, *(["bold"] if bold else []), *(["mono"] if mono else [])])
        place = f'x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}"'
        self._texts.append(f'<text class="{classes}" {place}>{escape(text, quote=False)}</text>')

    def render(self) -> str:
        """Return the image as SVG."""
        size = f'width="{self.width}" height="{self.height}" viewBox="0 0 {self.width} {self.height}"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
                f"<title>{escape(self._title, quote=False)}</title>",
                f"<desc>{escape(self._description.strip(), quote=False)}</desc>",
                "<style>",
                *_rules(LIGHT),
                f"text {{ font-family: {SANS}; }}",
                f".mono {{ font-family: {MONO}; }}",
                ".bold { font-weight: bold; }",
                "rect, circle { stroke-width: 1.2; }",
                "rect.band { stroke: none; opacity: 0.45; }",
                "polyline { fill: none; stroke-width: 1.4; stroke-linejoin: round; }",
                ".dashed, .lifeline { stroke-dasharray: 5 4; }",
                ".border { stroke-width: 2.4; stroke-dasharray: 9 5; }",
                ".failure { stroke-width: 2.6; }",
                "@media (prefers-color-scheme: dark) {",
                *_rules(DARK),
                "}",
                "</style>",
                f'<rect class="page" width="{self.width}" height="{self.height}"/>',
                *self._shapes,
                *self._texts,
                "</svg>",
                "",
            ]
        )


def _rules(colours: dict[str, str | tuple[str, str]]) -> list[str]:
    """Return the style rules for one set of colours."""
    line, commit, error = colours["line"], colours["commit"][1], colours["error"][1]
    rules = [
        f".page {{ fill: {colours['page']}; stroke: none; }}",
        f".text {{ fill: {colours['text']}; }}",
        f".muted {{ fill: {colours['muted']}; }}",
        f".edge, .dashed, .lifeline {{ stroke: {line}; }}",
        f".head {{ fill: {line}; }}",
        f".border {{ stroke: {commit}; }}",
        f".border-text {{ fill: {commit}; }}",
        f".failure {{ stroke: {error}; }}",
    ]
    for name in ("plain", "first", "second", "commit", "error"):
        fill, stroke = colours[name]
        rules.append(f".{name} {{ fill: {fill}; stroke: {stroke}; }}")
    return rules
