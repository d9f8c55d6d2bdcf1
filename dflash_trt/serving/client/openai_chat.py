"""An OpenAI-compatible server over HTTP: requests, and a streamed conversation.

The standard library is enough. What is answered is as little to be trusted as a stranger's file.
"""

from __future__ import annotations

import json
import math
import os
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from http.client import HTTPException, HTTPResponse
from typing import Any

from dflash_trt.core.strict_json import parse_json
from dflash_trt.errors import DflashError, one_line
from dflash_trt.sampling.params import SamplingParams

API_KEY = "OPENAI_API_KEY"
"""The environment's variable that has the key, as OpenAI's own clients read it."""
QUESTION_S, _ANSWER_S, _BODY_S = 20.0, 600.0, 60.0
_MAX_LINE = 1 << 20
_MAX_ANSWER = 256 << 20
"""Bytes of a stream: an event for each of a million tokens."""
_MAX_NAME = 500
MAX_BYTES = 16 << 20
MAX_VALUES = 200_000
_DETAIL_BYTES, _DETAIL_SHOWN = 2000, 200
_NEUTRAL = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


def neutral_sampling(models: object) -> dict[str, Any]:
    """What a request says, beside its temperature, so that no checkpoint's defaults are used.

    Nothing where the `models` that a server lists are not ours: others may refuse the fields.
    """
    listed = models if isinstance(models, list) else []
    is_ours = any(isinstance(one, dict) and one.get("owned_by") == "dflash-trt" for one in listed)
    return dict(_NEUTRAL) if is_ours else {}


def version_path(owner: str) -> str:
    """Where above /v1 a server tells its version, by `owned_by` of the models that it lists."""
    return {"sglang": "/server_info", "llamacpp": "/props"}.get(owner, "/version")


def name_server(owner: str, told: bytes) -> str:
    """A server's name and version, of what it tells at `version_path`."""
    try:
        fields = parse_json(told, "version", MAX_VALUES)
    except DflashError:
        fields = None
    fields = fields if isinstance(fields, dict) else {}
    version = fields.get("version") or fields.get("build_info") or ""
    return one_line(f"{owner} {version}", 80)


class HttpStatusError(DflashError):
    """An answer with an HTTP `status` of failure."""

    def __init__(self, what: str, status: int, **more: str | None) -> None:
        super().__init__(what, where=more["where"], fix=more["fix"])
        self.status = status


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A request has a key in it, and a redirect would give that to whom the server names."""

    def redirect_request(self, *_: object) -> None:
        return None


_opener = urllib.request.build_opener(_NoRedirects)


class OpenAiConnection:
    """The server at `url`, with or without /v1, which `base` has; the key goes with every request.

    Errors name the `option` that an address of another kind came from, and say with `unreachable`
    what to do where nobody answers.
    """

    def __init__(self, url: str, option: str, unreachable: str) -> None:
        if not url.startswith(("http://", "https://")):
            what = f"{one_line(repr(url), 80)} is no http:// or https:// address"
            raise DflashError(what, where=option, usage=True)
        self.base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._unreachable = unreachable

    def open(
        self, path: str, body: Mapping[str, Any] | None, timeout_s: float, base: str | None = None
    ) -> HTTPResponse:
        """The reply to a POST of `body`, or to a GET, below /v1 or `base`; its body is unread."""
        headers = {"Content-Type": "application/json", "Accept": "*/*"}
        if key := os.environ.get(API_KEY):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request((base or self.base) + path, data, headers)
            reply: HTTPResponse = _opener.open(request, timeout=timeout_s)  # of one silence
        except urllib.error.HTTPError as error:
            fix = f"set {API_KEY}" if error.code == 401 else None
            what = f"answers {error.code} to {path}: {_read_detail(error)}"
            raise HttpStatusError(what, error.code, where=self.base, fix=fix) from error
        except (OSError, HTTPException, ValueError) as error:
            what = f"does not answer {path} ({one_line(error, 120)})"
            raise DflashError(what, where=self.base, fix=self._unreachable) from error
        return reply

    def read(self, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> dict[str, Any]:
        """As `open`, and the object that is answered."""
        with self.open(path, body, timeout_s) as reply:
            return read_reply(reply, self.base + path)

    def list_models(self) -> list[dict[str, Any]]:
        """The models that it lists, at least one; DflashError for a first without a usable name."""
        listed = self.read("/models", None, QUESTION_S).get("data")
        models = (
            [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
        )
        if not models or "id" not in models[0]:
            raise DflashError("lists no model", where=self.base)
        name = models[0]["id"]
        if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME:
            what = f"lists a model by the name {one_line(repr(name), 60)}"
            raise DflashError(what, where=self.base)
        return models

    def read_above(self, path: str) -> bytes:
        """What is above /v1, where not everyone has something; else nothing."""
        try:
            with self.open(path, None, QUESTION_S, self.base.removesuffix("/v1")) as reply:
                return _read_body(reply)
        except (DflashError, OSError, HTTPException, ValueError):
            return b""

    def events(
        self, path: str, body: Mapping[str, Any], silence_s: float, whole_s: float = math.inf
    ) -> Generator[dict[str, Any], None, None]:
        """The events of a streamed answer to a POST of `body`; closing it ends the answer.

        Raises:
            DflashError: it fails, ends early, is silent for `silence_s` or not whole in `whole_s`.
        """
        ends_at, why, left, held = time.monotonic() + whole_s, "", _MAX_ANSWER, b""
        with closing(self.open(path, body, silence_s)) as reply:
            kind = reply.headers.get_content_type()
            if kind in ("text/html", "application/json"):
                raise DflashError(f"answers {path} with {kind}, not a stream", where=self.base)
            try:
                while piece := reply.read1(_MAX_LINE):  # of what is there: lines may take for ever
                    left -= len(piece)
                    *lines, held = (held + piece).split(b"\n")
                    if left < 0 or len(held) > _MAX_LINE:
                        what = f"answers with more than {_MAX_ANSWER >> 20} MiB"
                        raise DflashError(what, where=self.base)
                    for line in lines:
                        field, _, data = line.strip().partition(b":")
                        if field == b"data" and data.strip() == b"[DONE]":
                            return
                        if field == b"data":
                            event = _parse_object(data, self.base)
                            if told := event.get("error"):
                                raise DflashError(f"failed: {one_line(told)}", where=self.base)
                            yield event
                    if time.monotonic() > ends_at:
                        raise DflashError(f"takes over {whole_s:g} s to answer", where=self.base)
            except (OSError, HTTPException, ValueError) as error:
                why = f" ({one_line(error, 100)})"
        raise DflashError(f"the answer broke off{why}", where=self.base, fix="ask again")


def _read_detail(error: urllib.error.HTTPError) -> str:
    """What a server says of its refusal, on one line."""
    try:
        with error:
            said = error.read(_DETAIL_BYTES)
    except (OSError, HTTPException, ValueError):
        return "and breaks off"
    return one_line(said.decode(errors="replace"), _DETAIL_SHOWN)


def _read_body(response: HTTPResponse) -> bytes:
    """A body, of MAX_BYTES + 1 at most; OSError where it takes longer than _BODY_S."""
    data, ends_at = bytearray(), time.monotonic() + _BODY_S
    while piece := response.read1(MAX_BYTES + 1 - len(data)):
        data += piece
        if time.monotonic() > ends_at:
            raise TimeoutError(f"not whole in {_BODY_S:g} s")
    return bytes(data)


def read_reply(response: HTTPResponse, where: str) -> dict[str, Any]:
    """The object that a server answers.

    Raises:
        DflashError: it breaks off, is too large, or is no JSON object.
    """
    try:
        data = _read_body(response)
    except (OSError, HTTPException, ValueError) as error:
        raise DflashError(f"breaks off ({one_line(error, 120)})", where=where) from error
    if len(data) > MAX_BYTES:
        raise DflashError(f"answers with more than {MAX_BYTES >> 20} MiB", where=where)
    return _parse_object(data, where)


def _parse_object(data: bytes, where: str) -> dict[str, Any]:
    """The object in an answer, or in an event of one."""
    try:
        reply = parse_json(data, where, MAX_VALUES)
    except DflashError as error:
        raise DflashError(f"answers {error.what}", where=where) from error  # no file's advice
    if not isinstance(reply, dict):
        raise DflashError("answers with no JSON object", where=where)
    return reply


class OpenAiChat:
    """The server at `url`, with or without /v1, and the one model that it lists first.

    `options` are more keys of each request's body.
    """

    def __init__(
        self, url: str, sampling: SamplingParams, options: Mapping[str, Any] | None = None
    ) -> None:
        self._server = OpenAiConnection(url, "--url", "is the server there?")
        self.base = self._server.base
        models = self._server.list_models()
        self.model = models[0]["id"]
        self._body: dict[str, Any] = {
            "model": self.model,
            **neutral_sampling(models),
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
            **({} if sampling.top_k is None else {"top_k": sampling.top_k}),
            **(options or {}),
        }

    @property
    def greeting(self) -> str:
        return f"{self.model} at {self.base}"

    def answer(
        self, messages: Sequence[Mapping[str, str]]
    ) -> Generator[tuple[str, str], None, None]:
        """New text as it comes: ("content" | "reasoning", text). Closing it ends the answer."""
        body = {**self._body, "messages": [dict(one) for one in messages]}
        with closing(self._server.events("/chat/completions", body, _ANSWER_S)) as events:
            for event in events:
                yield from _pieces(event)


def _pieces(event: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    choices = event.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    delta = choice.get("delta") if isinstance(choice, dict) else None
    if not isinstance(delta, dict):
        return
    reasoning = delta.get("reasoning_content") or delta.get("reasoning")
    for kind, text in (("reasoning", reasoning), ("content", delta.get("content"))):
        if text and isinstance(text, str):
            yield kind, text
