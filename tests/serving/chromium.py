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
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.waiting import PATIENCE_S, wait_until

_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0"),
)
_KEYS = {"Enter": 13, "ArrowLeft": 37, "ArrowRight": 39}


def find_chromium() -> str | None:
    """Where Chromium is, as Debian or Google install it; None where it is not."""
    return next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)


class Tab:
    """A page of Chromium; `errors` and `asked` are what its console and its network have told."""

    def __init__(self, url: str, loop: asyncio.Runner) -> None:
        self._loop, self._number = loop, 0
        self._session, self._socket = loop.run(_connect(url))
        self.errors: list[str] = []
        self.asked: list[str] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """The answer to a command; what has happened meanwhile is kept."""
        return self._loop.run(self._call(method, parameters))

    def close(self) -> None:
        self._loop.run(self._session.close())

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
        text = {"text": "\r"} if key == "Enter" else {}
        about = {"key": key, "code": key, "windowsVirtualKeyCode": _KEYS[key]}
        self.call("Input.dispatchKeyEvent", type="keyDown", **about, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def picture(self) -> bytes:
        """The window as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot")["data"])

    async def _call(self, method: str, parameters: dict[str, Any]) -> Any:
        self._number += 1
        async with asyncio.timeout(PATIENCE_S):
            asked = {"id": self._number, "method": method, "params": parameters}
            await self._socket.send_json(asked)
            while (told := await self._socket.receive_json()).get("id") != self._number:
                self._keep(told["method"], told["params"])
        assert "error" not in told, (method, told)
        return told["result"]

    def _keep(self, event: str, told: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.asked.append(told["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(told["exceptionDetails"]))
        elif event == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.errors.append(told["entry"]["text"])
        elif event == "Runtime.consoleAPICalled" and told["type"] in ("error", "assert"):
            self.errors.append(json.dumps(told["args"]))


async def _connect(url: str) -> tuple[aiohttp.ClientSession, aiohttp.ClientWebSocketResponse]:
    session = aiohttp.ClientSession()
    return session, await session.ws_connect(url, max_msg_size=1 << 28)


@contextmanager
def open_tab(chromium: str) -> Iterator[Tab]:
    """A page of a Chromium of its own, which ends with it."""
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        asyncio.Runner() as loop,
    ):
        command = [chromium, *_FLAGS, f"--user-data-dir={folder}", "about:blank"]
        null, told = subprocess.DEVNULL, Path(folder) / "DevToolsActivePort"
        with subprocess.Popen(command, stdout=null, stderr=null) as process:
            try:
                wait_until(lambda: told.is_file() and bool(told.read_text()))
                port = told.read_text().split()[0]
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
                    url = next(one for one in json.load(answer) if one["type"] == "page")
                with closing(Tab(url["webSocketDebuggerUrl"], loop)) as tab:
                    yield tab
            finally:
                process.terminate()
                process.wait(PATIENCE_S)
