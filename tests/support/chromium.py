"""Open a page in Chromium, and use it as a person would, over the pipe of the DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.waiting import LONG

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
OPTIONS = [
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # of a page of ours; as root there is no other way
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--force-device-scale-factor=1",
    "--hide-scrollbars",
]


def find_chromium() -> str | None:
    """Return the path of the browser; None if there is none."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Page:
    """A page in the browser.

    Attributes:
        console: What it has written to the console, and the errors that no code has caught.
        requests: The addresses that it has asked for.
    """

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._received = b""
        self._count = 0
        self._session: str | None = None
        self._target: str | None = None
        self.console: list[str] = []
        self.requests: list[str] = []

    def open(self, path: Path, *, dark: bool = False, width: int = 1280, height: int = 900) -> None:
        """Open a file, and wait until it is drawn."""
        self._session = None
        if self._target is not None:
            self.call("Target.closeTarget", targetId=self._target)
        self._target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Network", "Page"):
            self.call(f"{domain}.enable")
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url=path.resolve().as_uri())
        while self.evaluate("document.readyState") != "complete":
            time.sleep(0.05)
        # Two frames, after which what was drawn at the end of loading is on the screen.
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, *, clicks: int = 1) -> None:
        """Move or press the mouse: ``mouseMoved``, ``mousePressed`` or ``mouseReleased``."""
        button = "none" if kind == "mouseMoved" else "left"
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, buttons=1, clickCount=clicks)

    def key(self, name: str) -> None:
        """Press a key."""
        text = {"text": name} if len(name) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=name, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=name)

    def screenshot(self) -> bytes:
        """Return the visible part as a PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def close(self) -> None:
        """End the browser."""
        self._session = None
        self.call("Browser.close")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer["error"]
                return dict(answer["result"])
            self._record(answer)

    def _record(self, event: dict[str, Any]) -> None:
        if event.get("sessionId") != self._session:
            return  # of a page that was closed
        method, about = event.get("method"), event.get("params", {})
        if method == "Runtime.consoleAPICalled":
            self.console.append(str([each.get("value") for each in about["args"]]))
        elif method == "Runtime.exceptionThrown":
            self.console.append(json.dumps(about["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.console.append(about["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._reading], [], [], LONG)
            data = os.read(self._reading, 1 << 16) if ready else b""
            assert data, "Chromium has ended, or does not answer"
            self._received += data
        message, _, self._received = self._received.partition(b"\0")
        return dict(json.loads(message))


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """Start Chromium with a new profile; it has ended when the context ends.

    Args:
        profile: An empty folder.
    """
    path = find_chromium()
    assert path is not None
    # Chromium reads commands from file descriptor 3 and writes to 4.
    from_us, to_browser = os.pipe()
    from_browser, to_us = os.pipe()
    command = f'exec "$@" 3<&{from_us} 4>&{to_us}'
    arguments = [path, *OPTIONS, f"--user-data-dir={profile}", "about:blank"]
    with subprocess.Popen(
        ["bash", "-c", command, "bash", *arguments],
        pass_fds=(from_us, to_us),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        os.close(from_us)
        os.close(to_us)
        try:
            page = Page(from_browser, to_browser)
            yield page
            page.close()
        except BaseException:
            process.kill()
            raise
        finally:
            os.close(to_browser)
            os.close(from_browser)
