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
NO_UNDERLINES = {"color-link-underline": "transparent", "color-link-underline--visited": "transparent"}
html_theme_options = {
    "navigation_with_keys": True,
    "light_css_variables": NO_UNDERLINES,
    "dark_css_variables": NO_UNDERLINES,
}
html_logo = html_favicon = "_static/logo.svg"
toc_object_entries_show_parents = "hide"  # long names would be broken in the middle of a word
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["sidebar.js"]

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


def entries(text: str) -> list[re.Match[str]]:
    """Return the links in the lists of the index, which the sidebar shows."""
    return [entry for line in text.splitlines() if line.startswith("* ") for entry in ENTRY.finditer(line)]


def toctrees(text: str) -> str:
    """Return a page with a hidden toctree after each section that lists pages.

    The lists themselves are plain Markdown, so that they also work where the repository is viewed without the site.

    Args:
        text: The Markdown source of the page.
    """
    sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    return "".join(section + _toctree(section) for section in sections)


def _toctree(section: str) -> str:
    pages = [f"{entry['title']} <{entry['page']}>" for entry in entries(section)]
    if not pages or not section.startswith("## "):
        return ""
    caption = section.splitlines()[0].removeprefix("## ")
    return "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", "", ""])


NAME = re.compile(r"(?P<package>ls\.|lockstep\.)?(?P<name>[\w.]+)(?P<call>\(.*\))?", re.DOTALL)
"""A name in the text of a page, or a call of it."""
OTHERS = ("coming-from/", "differences", "ported-programs", "changelog")
"""Pages where a bare name such as `Trainer` may be that of another library."""


def link_names(app: Any, tree: Any, page: str) -> None:
    """Replace the public names in the text of a page by links to the reference.

    A name is public with its package, as in `ls.digest(model)`; a class and its members also without it, as in
    `Evaluator` and `Trainer.run`.

    Args:
        app: The application.
        tree: The page.
        page: Its name.
    """
    from docutils import nodes  # noqa: PLC0415 - a test reads this file, and needs no Sphinx

    entries = {name.removeprefix("lockstep."): each for name, each in app.env.get_domain("py").objects.items()}
    # The last part of the name of a class, and the last two of a member of it.
    parts = {"class": -1, "exception": -1, "method": -2, "property": -2, "attribute": -2}
    classes = {
        ".".join(name.split(".")[parts[each.objtype] :]): each
        for name, each in entries.items()
        if each.objtype in parts
    }
    for literal in list(tree.findall(nodes.literal)):
        found = NAME.fullmatch(literal.astext())
        if found is None or isinstance(literal.parent, nodes.reference | nodes.title):
            continue
        bare = {} if found["call"] or page.startswith(OTHERS) else classes
        entry = entries.get(found["name"]) if found["package"] else bare.get(found["name"])
        if entry is not None:
            uri = f"{app.builder.get_relative_uri(page, entry.docname)}#{entry.node_id}"
            link = nodes.reference("", "", internal=True, refuri=uri)
            literal.replace_self(link)
            link.append(literal)


HEADINGS = {"Positional Arguments": "Arguments", "Named Arguments": "Options", "Sub-commands": "Commands"}
"""The headings of the page of the command line, in the words of its help."""


def setup(app: Any) -> None:
    """Register the steps that add the toctrees to the index, links to names, headings, and dashes."""

    def add(_: object, page: str, source: list[str]) -> None:
        if page == "index":
            source[0] = toctrees(source[0])

    def name_headings(_: object, tree: Any) -> None:
        from docutils import nodes  # noqa: PLC0415 - as above

        for title in [each for each in tree.findall(nodes.title) if each.astext() in HEADINGS]:
            title.children = [nodes.Text(HEADINGS[title.astext()])]

    def name_commands(_: object, env: Any) -> list[str]:
        # The search shows the second entry of each, which sphinx-argparse sets to the whole description.
        commands = env.get_domain("commands").data["commands"]
        commands[:] = [(name, name, *rest) for name, _, *rest in commands]
        return []

    def draw_dashes(_: object, tree: Any, __: str) -> None:
        from docutils import nodes  # noqa: PLC0415 - as above

        # Sphinx leaves them to `smartquotes`, of which only the quotes are wanted here.
        for text in [each for each in tree.findall(nodes.Text) if each == " -- "]:
            text.parent.replace(text, nodes.Text(" \N{EN DASH} "))

    app.connect("source-read", add)
    app.connect("doctree-read", name_headings, priority=100)  # before the table of contents is collected
    app.connect("env-updated", name_commands)
    app.connect("doctree-resolved", draw_dashes)
    app.connect("doctree-resolved", link_names)
