"""A conversation with an OpenAI-compatible server, streamed; the standard library is enough."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from http.client import HTTPException, HTTPResponse
from typing import Any

from dflash_trt.core.replies import parse_object
from dflash_trt.errors import DflashError, one_line
from dflash_trt.sampling.params import SamplingParams
from dflash_trt.serving.client.openai_connection import OpenAiConnection

_QUESTION_S, _ANSWER_S = 20.0, 600.0
_MAX_LINE = 1 << 20
_MAX_ANSWER = 256 << 20
"""Bytes of a stream: an event for each of a million tokens."""
_MAX_NAME = 500


class OpenAiChat:
    """The server at `url`, with or without /v1, and the one model that it lists first.

    Args:
        url: begins with http:// or https://.
        options: more keys of each request's body.

    Raises:
        DflashError: another kind of address (usage), no server, or one without models.
    """

    def __init__(
        self, url: str, sampling: SamplingParams, options: Mapping[str, Any] | None = None
    ) -> None:
        self._server = OpenAiConnection(url, "--url", "is the server there?")
        self.base = self._server.base
        self.model = _first_model(self._server.read("/models", None, _QUESTION_S), self.base)
        self._body: dict[str, Any] = {
            "model": self.model,
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
        """New text as it comes: ("content" | "reasoning", text). Closing it ends the answer.

        Raises:
            DflashError: the server refuses, or its stream breaks off.
        """
        body = {**self._body, "messages": [dict(one) for one in messages]}
        with closing(self._server.open("/chat/completions", body, _ANSWER_S)) as reply:
            is_whole = False
            for event in self._events(reply):
                if event is None:
                    is_whole = True
                    break
                yield from _pieces(event, self.base)
        if not is_whole:
            raise DflashError("the answer broke off", where=self.base, fix="ask again")

    def _events(self, reply: HTTPResponse) -> Iterator[dict[str, Any] | None]:
        """Server-sent events; None is the last."""
        left = _MAX_ANSWER
        try:
            while line := reply.readline(_MAX_LINE):
                left -= len(line)
                if left < 0:
                    what = f"answers with more than {_MAX_ANSWER >> 20} MiB"
                    raise DflashError(what, where=self.base)
                field, _, data = line.decode("utf-8", "replace").strip().partition(":")
                if field != "data":
                    continue
                if data.strip() == "[DONE]":
                    yield None
                    return
                yield parse_object(data.encode(), self.base)
        except (OSError, HTTPException, ValueError) as error:
            what = f"the answer broke off ({one_line(error, 100)})"
            raise DflashError(what, where=self.base, fix="ask again") from error


def _first_model(listed: dict[str, Any], base: str) -> str:
    try:
        name = listed["data"][0]["id"]
    except (LookupError, TypeError) as error:
        raise DflashError("lists no model", where=base) from error
    if not isinstance(name, str) or not name or len(name) > _MAX_NAME:
        raise DflashError(f"lists a model by the name {one_line(repr(name), 60)}", where=base)
    return name


def _pieces(event: Mapping[str, Any], base: str) -> Iterator[tuple[str, str]]:
    if "error" in event:
        raise DflashError(f"failed: {one_line(event['error'], 200)}", where=base)
    choices = event.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    delta = choice.get("delta") if isinstance(choice, dict) else None
    if not isinstance(delta, dict):
        return
    for kind, keys in (
        ("reasoning", ("reasoning_content", "reasoning")),
        ("content", ("content",)),
    ):
        text = next((delta[key] for key in keys if isinstance(delta.get(key), str)), "")
        if text:
            yield kind, text
