"""Chat templates and tokenizers that go on, behind the OpenAI port: one 4xx each, and counted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from dflash_trt.text import chat, tokenizer_calls
from tests.cli.bigram import write_tokenizer
from tests.covering import exhaustive
from tests.serving.fronts import ScriptedModel, post, switching_front
from tests.serving.served import fetch

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}"
    "{% if m.content == 'on' %}{{ (9 + messages | length) ** (10 ** 8) }}{% endif %}{% endfor %}"
)
SNOWMEN = ("☃" + "a" * 30) * 240
"""Each costs a tenth of a second, just below what the library's own limit counts."""


def _chat(content: str) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": content}], "max_tokens": 4}


@pytest.mark.parametrize(
    ("path", "bad", "good"),
    [
        ("/v1/chat/completions", _chat("on"), _chat("off")),
        exhaustive("/tokenize", {"prompt": SNOWMEN}, {"prompt": "cab"}),
    ],
)
def test_what_goes_on_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, bad: Any, good: Any
) -> None:
    """Of the front's process: templates of chats, and /tokenize."""
    monkeypatch.setattr(chat, "LIMITS", replace(chat.LIMITS, max_seconds=1))
    limits = replace(tokenizer_calls.ENCODING_LIMITS, max_seconds=1)
    monkeypatch.setattr(tokenizer_calls, "ENCODING_LIMITS", limits)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_tokenizer(tmp_path, TEMPLATE)
    if path == "/tokenize":  # a pattern that backtracks after a snowman, which no trial tries
        file = tmp_path / "tokenizer.json"
        whole = json.loads(file.read_bytes())
        pattern = {"type": "Split", "pattern": {"Regex": "\\x{2603}(\\w\\w?)+!"}}
        pattern |= {"behavior": "Isolated", "invert": False}
        steps = [one for one in (pattern, whole["pre_tokenizer"]) if one is not None]
        whole["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
        file.write_text(json.dumps(whole))
    with switching_front(tmp_path) as front:
        url = front(ScriptedModel())
        for body, code in ((good, 200), (bad, 400), (good, 200)):
            status, content, _ = post(url, path, body)
            assert status == code, content
            if code == 400:
                error = json.loads(content)["error"]
                assert "takes more than 1 s" in error["message"]
                assert error["type"] == "invalid_request_error"
        figures = fetch(urlsplit(url).netloc, "/metrics", b"", "GET")[1].decode().splitlines()
        assert f'dflash_http_requests_total{{path="{path}",code="400"}} 1' in figures
        assert f'dflash_http_requests_total{{path="{path}",code="200"}} 2' in figures
