"""Chat templates and tokenizers that go on, behind the OpenAI port: one 4xx each, and counted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from dflash_trt.config import data_folder
from dflash_trt.serving.server.tritonserver import TritonServerBinary
from dflash_trt.text import chat, tokenizer_calls
from tests.cli.bigram import write_tokenizer
from tests.serving.fronts import ScriptedModel, post, switching_front
from tests.serving.served import build_demo, fetch, serving

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}"
    "{% if m.content == 'on' %}{{ (9 + messages | length) ** (10 ** 8) }}{% endif %}{% endfor %}"
)
SNOWMEN = ("☃" + "a" * 30) * 240
"""Each costs a tenth of a second, just below what the library's own limit counts."""


def _go_on(path: Path) -> dict[str, Any]:
    """Gives a tokenizer.json a pattern that backtracks after a snowman, which no trial tries."""
    whole: dict[str, Any] = json.loads(path.read_bytes())
    pattern = {"type": "Split", "pattern": {"Regex": "\\x{2603}(\\w\\w?)+!"}}
    pattern |= {"behavior": "Isolated", "invert": False}
    steps = [one for one in (pattern, whole["pre_tokenizer"]) if one is not None]
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}


def _chat(content: str) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": content}], "max_tokens": 4}


def _check(url: str, asked: tuple[tuple[str, dict[str, Any], dict[str, Any], str], ...]) -> None:
    """Each: path, a body that goes on, a good one, and what a client is told."""
    for path, bad, good, piece in asked:
        for body, code in ((good, 200), (bad, 400), (good, 200)):
            status, content, _ = post(url, path, body)
            assert status == code, content
            if code == 400:
                error = json.loads(content)["error"]
                assert piece in error["message"] and error["type"] == "invalid_request_error"
        figures = fetch(urlsplit(url).netloc, "/metrics", b"", "GET")[1].decode().splitlines()
        assert f'dflash_http_requests_total{{path="{path}",code="400"}} 1' in figures
        assert f'dflash_http_requests_total{{path="{path}",code="200"}} 2' in figures


def test_of_the_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its own process asks: templates of chats, and /tokenize."""
    monkeypatch.setattr(chat, "LIMITS", replace(chat.LIMITS, max_seconds=1))
    limits = replace(tokenizer_calls.ENCODING_LIMITS, max_seconds=1)
    monkeypatch.setattr(tokenizer_calls, "ENCODING_LIMITS", limits)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_tokenizer(tmp_path, TEMPLATE)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | _go_on(path)))
    with switching_front(tmp_path) as front:
        url = front(ScriptedModel())
        _check(
            url,
            (
                ("/v1/chat/completions", _chat("on"), _chat("off"), "takes more than 1 s"),
                ("/tokenize", {"prompt": SNOWMEN}, {"prompt": "cab"}, "takes more than 1 s"),
            ),
        )


@pytest.mark.exhaustive
def test_of_a_served_pair(tritonserver: TritonServerBinary, tmp_path: Path) -> None:
    """And what the model's process asks: the prompts of completions."""
    tokenizer = data_folder("demo_pair") / "target" / "tokenizer.json"
    changes = {
        "target/tokenizer.json": _go_on(tokenizer),
        "target/tokenizer_config.json": {"chat_template": TEMPLATE},
    }
    bundle = build_demo(tmp_path, changes)
    good = {"model": "demo", "prompt": "host", "max_tokens": 4}
    with serving(bundle, bundle) as served:
        _check(
            served.openai.removesuffix("/v1"),
            (
                ("/v1/chat/completions", _chat("on"), _chat("off"), "takes more than 10 s"),
                ("/v1/completions", good | {"prompt": SNOWMEN}, good, "takes more than 5 s"),
            ),
        )
