"""Settings of the documentation site; `python3 dev.py docs` builds it into `docs/_build/html`."""

from __future__ import annotations

import re
from typing import Any

import lockstep

project = "lockstep"
author = "The lockstep developers"
project_copyright = "The lockstep developers"
release = lockstep.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "sphinxarg.ext"]
exclude_patterns = ["_build"]
smartquotes_action = "qe"  # not dashes, which would turn the `--` of options into one
html_theme = "furo"
html_title = f"lockstep {release}"
html_theme_options = {"navigation_with_keys": True}

myst_heading_anchors = 4

# A name in single backticks becomes a link if it is documented, and is shown as code otherwise.
default_role = "py:obj"
add_module_names = False
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_class_signature = "mixed"
napoleon_use_ivar = True
napoleon_use_rtype = False

# The prompts of a terminal and of Python are not copied.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

ENTRY = re.compile(r"\[(?P<title>[^\]]+)\]\((?P<page>[^):#]+)\.md\)")
"""A link of the index to a page."""


def toctrees(text: str) -> str:
    """Return a page with a hidden toctree after each section that lists pages.

    The lists themselves are plain Markdown, so that they also work where the repository is viewed without the site.

    Args:
        text: The Markdown source of the page.
    """
    sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    return "".join(section + _toctree(section) for section in sections)


def _toctree(section: str) -> str:
    pages = [f"{entry['title']} <{entry['page']}>" for entry in ENTRY.finditer(section)]
    if not pages or not section.startswith("## "):
        return ""
    caption = section.splitlines()[0].removeprefix("## ")
    return "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", "", ""])


def setup(app: Any) -> None:
    """Register the step that adds the toctrees to the index."""

    def add(_: object, page: str, source: list[str]) -> None:
        if page == "index":
            source[0] = toctrees(source[0])

    app.connect("source-read", add)
