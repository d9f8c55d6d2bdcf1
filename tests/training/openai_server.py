"""A stand-in for an OpenAI-compatible server: a function makes each reply of its request."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[str, dict[str, Any]], dict[str, Any]]
"""Path below /v1 and body to the reply; one with a "status" is an error."""


def completion(text: str, prompt_tokens: int, reason: str = "length") -> dict[str, Any]:
    """A reply of /completions."""
    return {
        "choices": [{"text": text, "finish_reason": reason}],
        "usage": {"prompt_tokens": prompt_tokens},
    }


@contextmanager
def openai_server(
    answer: Answer, models: tuple[str, ...] = ("target",), key: str | None = None
) -> Iterator[str]:
    """Its address; without the `key` it answers 401."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply({"data": [{"id": name} for name in models]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._reply(answer(self.path.removeprefix("/v1"), body))

        def log_message(self, *words: object) -> None:
            pass

        def _reply(self, value: dict[str, Any]) -> None:
            if key is not None and self.headers["Authorization"] != f"Bearer {key}":
                value = {"status": 401, "error": {"message": "no such key"}}
            content = json.dumps(value).encode()
            self.send_response(value.get("status", 200))
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
