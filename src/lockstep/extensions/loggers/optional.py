"""Import the packages of optional extras, with an error that names the extra."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any


def check_installed(package: str, *, extra: str, user: str) -> None:
    """Check that a package is installed, without importing it.

    Args:
        package: The name of the package.
        extra: The extra of lockstep that installs it.
        user: The name of the class that requires it.

    Raises:
        ImportError: If the package is not installed.
    """
    if importlib.util.find_spec(package) is None:
        raise ImportError(f"{user} requires {package}. Install it: pip install 'lockstep-torch[{extra}]'.")


def import_optional(module: str) -> Any:
    """Import a module of an optional package, whose types are not known here.

    Args:
        module: The full name of the module.
    """
    return importlib.import_module(module)
