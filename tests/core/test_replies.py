"""Servers are strangers too: what of a reply is read."""

from __future__ import annotations

import io
from http.client import HTTPException, HTTPResponse, IncompleteRead
from typing import cast

import pytest

from dflash_trt.core.replies import MAX_BYTES, read_reply
from dflash_trt.errors import DflashError


class Reply(io.BytesIO):
    def __init__(self, content: bytes | HTTPException) -> None:
        super().__init__(content if isinstance(content, bytes) else b"")
        self._content = content
        self.read_bytes = 0

    def read(self, size: int | None = -1) -> bytes:
        if not isinstance(self._content, bytes):
            raise self._content
        data = super().read(size)
        self.read_bytes += len(data)
        return data


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"[" * 200_000, "more than 200,000 JSON values"),
        (b'{"a":' * 90_000 + b"1" + b"}" * 90_000, "nested too deeply"),
        (b'{"data": [' + b"{}," * 300_000 + b"{}]}", "more than 200,000 JSON values"),
        (b'{"a": "' + b"x" * (MAX_BYTES + 100) + b'"}', "answers with more than 16 MiB"),
        (b"[]", "no JSON object"),
        (b"\xff", "not UTF-8"),
        (b"", "not valid JSON"),
        (IncompleteRead(b"ab", 9), "breaks off"),
    ],
)
def test_what_no_reply_may_be(content: bytes | HTTPException, what: str) -> None:
    reply = Reply(content)
    with pytest.raises(DflashError, match=what) as caught:
        read_reply(cast(HTTPResponse, reply), "http://a/v1")
    assert caught.value.where == "http://a/v1" and "download" not in caught.value.message
    assert reply.read_bytes <= MAX_BYTES + 1


def test_a_reply() -> None:
    assert read_reply(cast(HTTPResponse, Reply(b'{"data": [{"id": "m"}]}')), "a") == {
        "data": [{"id": "m"}]
    }
