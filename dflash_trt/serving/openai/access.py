"""Middleware before the OpenAI front: keys, request ids and a log."""

from __future__ import annotations

import json
import re
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_trt.serving.openai.errors import ApiError
from dflash_trt.serving.openai.figures import FrontFigures
from dflash_trt.serving.openai.front_options import FrontOptions
from dflash_trt.serving.openai.json_log import now

REQUEST_ID = "X-Request-Id"
_GUARDED = ("/v1/", "/tokenize", "/detokenize", "/version", "/load")
GOOD_ID = "^[A-Za-z0-9._:-]{1,128}$"


@dataclass(slots=True)
class AccessRecord:
    """A request, as it is written down: neither its text nor its key, but that one's name.

    It has no status where the client left before an answer, and tokens of ended outputs alone.
    """

    time: str
    request_id: str
    method: str
    path: str
    key: str | None = None
    status: int | None = None
    seconds: float = 0.0
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    warnings: int | None = None  # keywords of schemas that are not enforced


class Gate:
    """Middleware that lets HTTP requests through to `app`, with an id each.

    A request's state has its "record", and "take_places" for its outputs; `figures` count it."""

    def __init__(self, app: ASGIApp, options: FrontOptions, figures: FrontFigures) -> None:
        self._app, self._options, self._figures = app, options, figures
        self._keys = options.open_keys()
        self._running: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started, headers = time.perf_counter(), Headers(scope=scope)
        # With a slash at its end a path is the same one: clients do not post again elsewhere.
        scope["path"] = scope["path"].rstrip("/") or "/"
        given = headers.get(REQUEST_ID, "")
        record = AccessRecord(
            time=now(),
            request_id=given if re.fullmatch(GOOD_ID, given) else uuid.uuid4().hex,
            method=scope["method"],
            path=scope["path"],
        )
        scope.setdefault("state", {})["record"] = record
        self._figures.begin(record.path)

        async def mark(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = record.request_id
                record.status = message["status"]
            await send(message)

        try:
            with self._admit(record, headers) as take_places:
                scope["state"]["take_places"] = take_places
                await self._app(scope, receive, mark)
        except ApiError as error:
            await JSONResponse(**error.to_response())(scope, receive, mark)
        finally:
            self._figures.count(record.path, record.status)
            record.seconds = round(time.perf_counter() - started, 6)
            if self._options.log_format == "json":
                with suppress(OSError, ValueError):  # a log that is full ends no request
                    print(json.dumps(asdict(record)), file=sys.stderr, flush=True)

    @contextmanager
    def _admit(self, record: AccessRecord, headers: Headers) -> Iterator[Callable[[int], None]]:
        """Holds a place of the request's key, and of all its outputs once they are known.

        Refused are only requests that have not begun.
        """
        if self._keys is None or not record.path.startswith(_GUARDED):
            yield lambda count: None
            return
        scheme, _, token = headers.get("Authorization", "").partition(" ")
        key = self._keys.find(token.strip()) if scheme.lower() == "bearer" else None
        if key is None:
            what = "no good API key in the header Authorization: Bearer KEY"
            raise ApiError(what, status=401, code="invalid_api_key")
        record.key = key
        most, held = self._options.key_requests, 0

        def take_places(count: int) -> None:
            nonlocal held
            others = self._running[key] - held
            if most is not None and count > most:
                what = f"{count} outputs are more than the {most} in flight that this key may have"
                raise ApiError(what)
            if most is not None and others + count > most:
                what = f"{others} outputs of this key are in flight, and no more than {most} may be"
                raise ApiError(what, status=429, code="rate_limit_exceeded")
            self._running[key], held = others + count, count

        take_places(1)
        try:
            yield take_places
        finally:
            self._running[key] -= held
