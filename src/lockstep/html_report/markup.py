"""Build HTML in which every text is escaped, because it comes from files that anything may have written."""

from __future__ import annotations

import html
import json
from typing import Any


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def element(tag: str, *content: object, **attributes: object) -> Markup:
    """Return an element.

    Args:
        tag: The name of the element.
        content: Markup is inserted as it is, and the text of everything else is escaped.
        attributes: Their values are escaped. One of None or False is left out, and True is an attribute without a
            value. Underscores stand for hyphens, and one at the end is left out.

    >>> element("td", "<script>", class_="number", title='"')
    '<td class="number" title="&quot;">&lt;script&gt;</td>'
    """
    given = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
    text = "".join(
        f" {name}" if value is True else f' {name}="{html.escape(str(value))}"'
        for name, value in given.items()
        if value is not None and value is not False
    )
    return Markup(f"<{tag}{text}>{joined(*content)}</{tag}>")


def joined(*content: object) -> Markup:
    """Return content one after the other.

    >>> joined(element("b", 1), " < 2")
    '<b>1</b> &lt; 2'
    """
    return Markup("".join(each if isinstance(each, Markup) else html.escape(str(each)) for each in content))


def folded(summary: str, content: Markup) -> Markup:
    """Return content that is shown when the reader opens its summary."""
    return element("details", element("summary", summary), content)


def table(
    header: list[str], rows: list[list[object]], *, caption: str, numbers: frozenset[int] = frozenset()
) -> Markup:
    """Return a table that scrolls sideways if it is too wide.

    Args:
        header: The names of the columns.
        rows: The cells of each row, the first of which names the row.
        caption: What the table shows, for readers who do not see it.
        numbers: The columns that are aligned as numbers.
    """
    kinds = ["number" if column in numbers else None for column in range(len(header))]
    head = joined(*(element("th", name, scope="col", class_=kind) for name, kind in zip(header, kinds, strict=True)))
    body = joined(
        *(
            element(
                "tr",
                element("th", first, scope="row"),
                *(element("td", cell, class_=kind) for cell, kind in zip(cells, kinds[1:], strict=True)),
            )
            for first, *cells in rows
        )
    )
    parts = (element("caption", caption), element("thead", element("tr", head)), element("tbody", body))
    return element("div", element("table", *parts), class_="table", tabindex=0, role="region", aria_label=caption)


def script_data(value: Any) -> Markup:
    """Return JSON for a ``script`` element, which would end at the first ``</script`` whatever surrounds it."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))
