"""Display images in a Jupyter notebook, in the output of the cell that is running."""

from __future__ import annotations

import sys
from typing import Any


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    # IPython is in use only if it has been imported.
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


class InlineImage:
    """An image in the output of a cell, which is replaced each time it is shown."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, png: bytes) -> None:
        """Display an image below the cell, instead of the one before.

        Args:
            png: The image in the format PNG.
        """
        from IPython.display import Image, display  # noqa: PLC0415 - present where `in_notebook` returns True

        if self._handle is None:
            self._handle = display(Image(png), display_id=True)
        else:
            self._handle.update(Image(png))
