"""JSON that a server answers over HTTP: as little to be trusted as a file of a stranger's."""

from __future__ import annotations

from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from dflash_trt.core.strict_json import parse_json
from dflash_trt.errors import DflashError, one_line

MAX_BYTES = 16 << 20
MAX_VALUES = 200_000
_DETAIL_BYTES, _DETAIL_SHOWN = 2000, 200


class _NoRedirects(HTTPRedirectHandler):
    """A request has a key in it, and a redirect would give that to whom the server names."""

    def redirect_request(self, *_: object) -> None:
        return None


_opener = build_opener(_NoRedirects)


def open_reply(request: Request, timeout_s: float) -> HTTPResponse:
    """The reply to a request, its body unread; the time is that of one silence.

    Raises:
        urllib.error.HTTPError: another status than 200, a redirect's too; see `error_detail`.
        OSError, HTTPException, ValueError: no server, or one that speaks no HTTP.
    """
    reply: HTTPResponse = _opener.open(request, timeout=timeout_s)
    return reply


def error_detail(error: HTTPError) -> str:
    """What a server says of its refusal, on one line."""
    try:
        with error:
            said = error.read(_DETAIL_BYTES)
    except (OSError, HTTPException, ValueError):
        return "and breaks off"
    return one_line(said.decode(errors="replace"), _DETAIL_SHOWN)


def read_reply(response: HTTPResponse, where: str) -> dict[str, Any]:
    """The object that a server answers.

    Raises:
        DflashError: it breaks off, is too large, or is no JSON object.
    """
    try:
        data = response.read(MAX_BYTES + 1)
    except (OSError, HTTPException, ValueError) as error:
        raise DflashError(f"breaks off ({one_line(error, 120)})", where=where) from error
    if len(data) > MAX_BYTES:
        raise DflashError(f"answers with more than {MAX_BYTES >> 20} MiB", where=where)
    return parse_object(data, where)


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """The object in an answer, or in an event of one.

    Raises:
        DflashError: it holds too much, or is none.
    """
    try:
        reply = parse_json(data, where, MAX_VALUES)
    except DflashError as error:
        raise DflashError(f"answers {error.what}", where=where) from error  # no file's advice
    if not isinstance(reply, dict):
        raise DflashError("answers with no JSON object", where=where)
    return reply
