"""An OpenAI-compatible server over HTTP: its address, its key, and what it says when it fails."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException, HTTPResponse
from typing import Any

from dflash_trt.core.replies import error_detail, open_reply, read_reply
from dflash_trt.errors import DflashError, one_line

API_KEY = "OPENAI_API_KEY"
"""The environment's variable that has the key, as OpenAI's own clients read it."""


class OpenAiConnection:
    """The server at `url`, with or without /v1; the key goes with every request.

    Args:
        url: begins with http:// or https://.
        option: which one it came from, for the error about another kind of address.
        unreachable: what to do where nobody answers.

    Attributes:
        base: the address with /v1.

    Raises:
        DflashError: another kind of address (usage).
    """

    def __init__(self, url: str, option: str, unreachable: str) -> None:
        if not url.startswith(("http://", "https://")):
            what = f"{one_line(repr(url), 80)} is no http:// or https:// address"
            raise DflashError(what, where=option, usage=True)
        self.base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._unreachable = unreachable

    def open(self, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> HTTPResponse:
        """The reply to a POST of `body`, or to a GET; its body is unread.

        Raises:
            DflashError: nobody answers, or with another status than 200.
        """
        headers = {"Content-Type": "application/json", "Accept": "*/*"}
        if key := os.environ.get(API_KEY):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.base + path, data, headers)
            return open_reply(request, timeout_s)
        except urllib.error.HTTPError as error:
            fix = f"set {API_KEY}" if error.code == 401 else None
            what = f"answers {error.code} to {path}: {error_detail(error)}"
            raise DflashError(what, where=self.base, fix=fix) from error
        except (OSError, HTTPException, ValueError) as error:
            what = f"does not answer {path} ({one_line(error, 120)})"
            raise DflashError(what, where=self.base, fix=self._unreachable) from error

    def read(self, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> dict[str, Any]:
        """As `open`, and the object that is answered."""
        with self.open(path, body, timeout_s) as reply:
            return read_reply(reply, self.base + path)
