"""Chromium without a window, driven over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.waiting import PATIENCE_S, wait_until

_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0"),
)


def find_chromium() -> str | None:
    """Where Chromium is, as Debian or Google install it; None where it is not."""
    return next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)


class Tab:
    """A page of Chromium; `errors` and `asked` are what its console and its network have told."""

    def __init__(self, url: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._number = 0
        self.errors: list[str] = []
        self.asked: list[str] = []
        self._session, self._socket = self._loop.run_until_complete(self._connect(url))
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self._loop.run_until_complete(self._session.close())
        self._loop.close()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to a command; what has happened meanwhile is kept."""
        return self._loop.run_until_complete(self._call(method, parameters))

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
        options = {"returnByValue": True, "awaitPromise": True}
        told = self.call("Runtime.evaluate", expression=script, **options)
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
        code = {"Enter": 13, "Tab": 9, "ArrowLeft": 37, "ArrowRight": 39}.get(key, 0)
        text = {"text": "\r"} if key == "Enter" else {}
        about = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", **about, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def picture(self) -> bytes:
        """The window as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot")["data"])

    async def _connect(
        self, url: str
    ) -> tuple[aiohttp.ClientSession, aiohttp.ClientWebSocketResponse]:
        session = aiohttp.ClientSession()
        return session, await session.ws_connect(url, max_msg_size=1 << 28)

    async def _call(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        asked = {"id": self._number, "method": method, "params": parameters}
        async with asyncio.timeout(PATIENCE_S):
            await self._socket.send_json(asked)
            while (told := await self._socket.receive_json()).get("id") != self._number:
                self._keep(told["method"], told["params"])
        assert "error" not in told, (method, told)
        result: dict[str, Any] = told["result"]
        return result

    def _keep(self, event: str, told: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.asked.append(told["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(told["exceptionDetails"]))
        elif event == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.errors.append(told["entry"]["text"])
        elif event == "Runtime.consoleAPICalled" and told["type"] in ("error", "assert"):
            self.errors.append(json.dumps(told["args"]))


@contextmanager
def open_tab(chromium: str) -> Iterator[Tab]:
    """A page of a Chromium of its own, which ends with it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        profile = Path(folder) / "profile"
        command = [chromium, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(command, **quiet) as process:  # type: ignore[call-overload]
            try:
                told = profile / "DevToolsActivePort"
                wait_until(lambda: told.is_file() and bool(told.read_text()))
                port = told.read_text().split()[0]
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
                    pages = [one for one in json.load(answer) if one["type"] == "page"]
                tab = Tab(pages[0]["webSocketDebuggerUrl"])
                try:
                    yield tab
                finally:
                    tab.close()
            finally:
                process.terminate()
                process.wait(PATIENCE_S)
