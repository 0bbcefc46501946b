"""What goes wrong in the middle of an update, and the name of the state that it must leave."""

from __future__ import annotations

import os
import signal


def fail() -> None:
    raise RuntimeError("sprung")


def interrupt() -> None:
    """Send Ctrl-C to this process."""
    os.kill(os.getpid(), signal.SIGINT)
