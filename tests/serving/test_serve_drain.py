"""`serve` ends with requests in flight, before the real server."""

from __future__ import annotations

import http.client
import json
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from dflash_trt.serving.server.tritonserver import TritonServerBinary
from tests.serving.served import FREE_PORTS, LONG_CONTEXT, fetch, starting, wait_ready
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.exhaustive


@pytest.fixture
def serve_bundle(
    tritonserver: TritonServerBinary, long_bundle: Path
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`serve` on a bundle with the real server, and its OpenAI front's URL."""
    packaged = set(long_bundle.parent.glob(".dflash-trt-serve-*"))
    names = ("--served-model-name", "demo", "--served-model-name", "gpt-4o")
    with starting(long_bundle, *FREE_PORTS, "--drain-seconds", 3, *names) as process:
        url = wait_ready(process)["OpenAI"]
        (mine,) = set(long_bundle.parent.glob(".dflash-trt-serve-*")) - packaged
        yield process, url
        assert process.poll() is None or not mine.exists()


def _open_stream(url: str, max_tokens: int) -> http.client.HTTPResponse:
    body = {"model": "demo", "prompt": "host", "max_tokens": max_tokens, "ignore_eos": True}
    data = json.dumps(body | {"stream": True}).encode()
    answer = urllib.request.urlopen(f"{url}/completions", data, timeout=PATIENCE_S)
    assert isinstance(answer, http.client.HTTPResponse)
    assert answer.readline().startswith(b"data: ")
    return answer


def test_requests_in_flight_end_before_the_server(
    serve_bundle: tuple[subprocess.Popen[str], str],
) -> None:
    """What is short ends, nothing more is taken, and what is too long ends with one error."""
    process, url = serve_bundle
    host = urlsplit(url).netloc
    assert b"dflash_output_tokens_total" in fetch(host, "/metrics", b"", "GET")[1]
    whole: list[tuple[int, bytes]] = []
    asked = {
        "model": "gpt-4o",
        "prompt": "host",
        "ignore_eos": True,
        "max_tokens": LONG_CONTEXT // 2,
    }

    def ask_whole() -> None:
        whole.append(fetch(host, "/v1/completions", asked)[:2])

    thread = threading.Thread(target=ask_whole)
    thread.start()
    # Few enough for the seconds that they may go on, on a machine with much else to do.
    with _open_stream(url, LONG_CONTEXT // 2) as endless, _open_stream(url, 64) as answer:
        process.terminate()
        wait_until(lambda: fetch(host, "/health", b"", "GET")[0] == 503)
        status, content, _ = fetch(host, "/v1/completions", asked)
        assert status == 503 and b"the server is shutting down" in content
        assert answer.read().endswith(b"data: [DONE]\n\n")
        *_, last = endless.read().split(b"\n\n")[:-1]
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "unavailable"
    thread.join()
    ((status, content),) = whole
    assert status == 503 and json.loads(content)["error"]["code"] == "unavailable"
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode != 0, "requests were cut off"
    assert "Traceback" not in err and "500" not in err
