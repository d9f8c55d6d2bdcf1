"""Chromium without a window, driven over its DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.waiting import PATIENCE_S, wait_until

_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe"),
)
_KEYS = {"Enter": 13, "ArrowLeft": 37, "ArrowRight": 39}


def find_chromium() -> str | None:
    """Where Chromium is, as Debian or Google install it; None where it is not."""
    return next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)


class Tab:
    """A page of Chromium; `errors` and `asked` are what its console and its network have told."""

    def __init__(self, written: int, read: int) -> None:
        self._written, self._read, self._number = written, read, 0
        self._parts: list[bytes] = [b""]
        self._session: dict[str, str] = {}
        self.errors: list[str] = []
        self.asked: list[str] = []
        page = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=page, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """The answer to a command; what has happened meanwhile is kept."""
        self._number += 1
        asked = {"id": self._number, "method": method, "params": parameters, **self._session}
        os.write(self._written, json.dumps(asked).encode() + b"\0")
        while (told := self._receive()).get("id") != self._number:
            self._keep(told["method"], told["params"])
        assert "error" not in told, (method, told)
        return told["result"]

    def open(
        self,
        url: str,
        width: int = 1280,
        height: int = 900,
        *,
        dark: bool = False,
        scale: float = 1,
    ) -> None:
        """Loads `url` in a window of that size, in CSS pixels, of which a picture has `scale`."""
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, awaited."""
        how = {"returnByValue": True, "awaitPromise": True}
        told = self.call("Runtime.evaluate", expression=script, **how)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def wait(self, script: str) -> None:
        """Waits until the expression is true."""
        wait_until(lambda: bool(self.run(f"Boolean({script})")), script)

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def fill(self, selector: str, text: str) -> None:
        """Sets the value of a field."""
        self.run(f"document.querySelector({json.dumps(selector)}).value = {json.dumps(text)}")

    def press(self, key: str) -> None:
        """Presses a key where the focus is."""
        text = {"text": "\r"} if key == "Enter" else {}
        about = {"key": key, "code": key, "windowsVirtualKeyCode": _KEYS[key]}
        self.call("Input.dispatchKeyEvent", type="keyDown", **about, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def picture(self) -> bytes:
        """The window as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot")["data"])

    def _receive(self) -> Any:
        """The next message; each ends with a null byte."""
        while len(self._parts) < 2:
            assert select.select([self._read], [], [], PATIENCE_S)[0], "Chromium says nothing"
            first, *others = os.read(self._read, 1 << 20).split(b"\0")
            self._parts = [self._parts[0] + first, *others]
        return json.loads(self._parts.pop(0))

    def _keep(self, event: str, told: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.asked.append(told["request"]["url"])
        is_log = event == "Log.entryAdded" and told["entry"]["level"] == "error"
        is_call = event == "Runtime.consoleAPICalled" and told["type"] in ("error", "assert")
        if event == "Runtime.exceptionThrown" or is_log or is_call:
            self.errors.append(json.dumps(told))


@contextmanager
def open_tab(chromium: str) -> Iterator[Tab]:
    """A page of a Chromium of its own, which ends with it."""
    (theirs, ours), (heard, told) = os.pipe(), os.pipe()
    pipes = f'exec "$@" 3<&{theirs} 4>&{told}'  # the protocol's place for them
    null = subprocess.DEVNULL
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = ["bash", "-c", pipes, "bash", chromium, *_FLAGS, f"--user-data-dir={folder}"]
        with subprocess.Popen(
            command, stdout=null, stderr=null, pass_fds=(theirs, told)
        ) as process:
            try:
                yield Tab(ours, heard)
            finally:
                process.terminate()
                process.wait(PATIENCE_S)
                for one in (theirs, ours, heard, told):
                    os.close(one)
