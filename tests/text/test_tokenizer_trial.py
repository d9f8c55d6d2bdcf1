"""Tokenizers are code: what hostile ones try is stopped before this process loads them."""

from __future__ import annotations

import base64
import json
import signal
import struct
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from dflash_trt.errors import DflashError
from dflash_trt.text import tokenizer_calls
from dflash_trt.text.detokenise import UNDECODED, Detokenizer
from dflash_trt.text.sandbox import Sandbox, SandboxLimits, SandboxLostError
from dflash_trt.text.tokenizer import BundleTokenizer
from dflash_trt.text.tokenizer_calls import GPT_OSS, QWEN2, check_tokenizer
from tests.text.tokenizers import make_plain

Json = dict[str, Any]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _replace(pattern: Json, content: str) -> Json:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _split(pattern: str) -> Json:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    return {"pre_tokenizer": {**split, "invert": False}}


def _precompiled(table: bytes) -> Json:
    encoded = base64.b64encode(table).decode()
    return {"normalizer": {"type": "Precompiled", "precompiled_charsmap": encoded}}


def _sequence(part: str, steps: list[Json]) -> Json:
    return {part: {"type": "Sequence", f"{part}s": steps}}


def _template(*tokens: str) -> Json:
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    special = [{"SpecialToken": {"id": one, "type_id": 0}} for one in tokens]
    processor = {"type": "TemplateProcessing", "single": [*special, sequence], "pair": [sequence]}
    return {"post_processor": {**processor, "special_tokens": {}}}


DOUBLE = [_replace({"String": "a"}, "aa")] * 40
HOSTILE: dict[str, tuple[Json, str]] = {
    "a pattern that backtracks": (_split("(a+)+$"), "retry-limit"),
    "a replacement that backtracks": (
        {"normalizer": _replace({"Regex": r"(.*)*\d{9}Z"}, "b")},
        "retry-limit",
    ),
    "a table that ends before its length": (_precompiled(struct.pack("<I", 8) + b"abc"), "panic"),
    "a table of 4 GiB by its length": (
        _precompiled(struct.pack("<I", (1 << 32) - 16) + b"abcd"),
        "crashes",
    ),
    "a table with a text of a megabyte": (
        _precompiled(struct.pack("<I", 4) + bytes(4) + b"x" * (1 << 20)),
        "1,000 times as long",
    ),
    "pieces of no length": ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "panic"),
    "a template without its token": (_template("<none>"), "panic"),
    "a normalizer that doubles": (_sequence("normalizer", DOUBLE), "1,000 times as long"),
    "a decoder that doubles": (_sequence("decoder", DOUBLE), "1,000 times as long"),
    "one that says its growth twice": (
        {"normalizer": [_replace({"String": "a"}, "b" * 2000), {"type": "NFC"}]},
        'gives "normalizer" twice',
    ),
    "3 GB for one letter": (
        _sequence("normalizer", [_replace({"String": "a"}, "a" * 1450)] * 3),
        "1,000 times as long",
    ),
    "a decoder that strips what is not there": (
        {"decoder": {"type": "Strip", "content": "a", "start": 0, "stop": 1 << 40}},
        "panic",
    ),
    "dropout": ({"model": {"dropout": 0.5}}, 'dropout of 0.5.*set "dropout" to null'),
    "a decoder that may go on": (
        {"decoder": _replace({"Regex": "(x+x+)+y"}, "b")},
        "its decoder has a regular expression",
    ),
    "no tokenizer": ({"model": {"type": "none"}}, "is not a readable tokenizer"),
}


def _text(parts: Json) -> bytes:
    """tokenizer.json of a plain tokenizer with other parts; a list gives its key several times."""
    whole: Json = json.loads(make_plain().to_str())
    whole["model"] |= parts.get("model", {})
    rest = {key: value for key, value in parts.items() if key != "model"}
    several = [
        (key, one)
        for key, value in (whole | rest).items()
        for one in (value if key in rest and isinstance(value, list) else [value])
    ]
    inside = ",".join(f"{json.dumps(key)}:{json.dumps(one)}" for key, one in several)
    return f"{{{inside}}}".encode()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_tokenizers(name: str, tmp_path: Path) -> None:
    parts, reason = HOSTILE[name]
    path = tmp_path / "tokenizer.json"
    path.write_bytes(_text(parts))
    with pytest.raises(DflashError, match=reason) as caught:
        BundleTokenizer(tmp_path)
    message = caught.value.message
    assert message.startswith(f"{path}: ") and message.isprintable() and len(message) < 500


def test_limits_of_time_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = replace(tokenizer_calls.TRIAL_LIMITS, max_seconds=1)
    monkeypatch.setattr(tokenizer_calls, "TRIAL_LIMITS", limits)
    slow = _sequence("normalizer", [_replace({"String": "q"}, "r")] * 20000)
    with pytest.raises(DflashError, match="takes more than 1 s or 1024 MiB"):
        check_tokenizer(_text(slow), "slow")
    limits = replace(limits, max_bytes=256 << 20)
    monkeypatch.setattr(tokenizer_calls, "TRIAL_LIMITS", limits)
    large = {"normalizer": {"type": "Prepend", "prepend": "a" * (10 << 20)}}
    with pytest.raises(DflashError, match="256 MiB"):
        check_tokenizer(_text(large), "large")


def test_what_published_tokenizers_need() -> None:
    """Llama's, T5's and Qwen's steps; growing to 33 bytes is what U+FDFA does in T5's table."""
    space = {"String": "\u2581"}
    for parts in (
        _sequence(
            "normalizer",
            [{"type": "Prepend", "prepend": "\u2581"}, _replace({"String": " "}, "\u2581")],
        )
        | _sequence(
            "decoder",
            [
                _replace(space, " "),
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        ),
        _sequence(
            "normalizer",
            [
                {"type": "NFKC"},
                _replace({"String": "x"}, "x" * 33),
                _replace({"Regex": " {2,}"}, "\u2581"),
            ],
        ),
        _split(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
            r"|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
    ):
        assert check_tokenizer(_text(parts), "published")


def test_each_content_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = _text({})
    check_tokenizer(data, "here")
    monkeypatch.setattr(tokenizer_calls, "Sandbox", None)
    check_tokenizer(data, "here")
    with pytest.raises(TypeError):
        check_tokenizer(data + b"\n", "here")
    (record,) = (tmp_path / "cache" / "dflash-trt" / "tokenizers").iterdir()
    record.write_bytes(b"")  # what a full disk leaves
    with pytest.raises(TypeError):
        check_tokenizer(data, "here")


def test_a_prompt_that_panics_is_an_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A pattern that waits for what no trial thinks of: the library ends its match by a panic.

    Its note of that stays in the process that encodes.
    """
    (tmp_path / "tokenizer.json").write_bytes(_text(_split(WAITING)))
    tokenizer = BundleTokenizer(tmp_path)
    assert tokenizer.encode("a" * 50)
    for _ in range(2):
        with pytest.raises(DflashError, match=r"cannot encode .*retry-limit"):
            tokenizer.encode("☃" + "a" * 50)
    assert tokenizer.encode("a" * 50)
    assert capfd.readouterr().err == ""


WAITING = "\\x{2603}(\\w\\w?)+!"
"""What no trial stumbles over: a snowman, and then letters."""


@pytest.mark.parametrize("expressions", [["x+y"], [QWEN2] * 16 + ["x+y"], [GPT_OSS + "|(a|a)*b"]])
def test_expressions_of_its_own_are_told(expressions: list[str]) -> None:
    """However many known ones stand before them; twice, for the cache says so too."""
    steps = [_split(one)["pre_tokenizer"] for one in expressions]
    several = {"type": "Sequence", "pretokenizers": steps}
    for parts in ({"pre_tokenizer": several}, {"normalizer": _replace({"Regex": "x+y"}, "z")}):
        assert not check_tokenizer(_text(parts), "here")
        assert not check_tokenizer(_text(parts), "here")


def test_a_text_that_goes_on_is_an_error_of_that_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each snowman costs a part of a second that no limit of the library's counts."""
    limits = replace(tokenizer_calls.ENCODING_LIMITS, max_seconds=1)
    monkeypatch.setattr(tokenizer_calls, "ENCODING_LIMITS", limits)
    (tmp_path / "tokenizer.json").write_bytes(_text(_split(WAITING)))
    tokenizer = BundleTokenizer(tmp_path)
    good = tokenizer.encode("é☃", special=False)
    assert good == Tokenizer.from_buffer(_text(_split(WAITING))).encode("é☃").ids
    with pytest.raises(DflashError, match=r"cannot encode .*: takes more than 1 s"):
        tokenizer.encode(("☃" + "a" * 28) * 500)
    assert tokenizer.encode("é☃") == good


def test_a_token_that_panics_is_an_error() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.decoder = decoders.Strip("b", 0, 1 << 40)
    stream = Detokenizer(tokenizer)
    with pytest.raises(DflashError, match=r"cannot decode .* index out of bounds"):
        stream.push(1)
    assert stream.flush() == UNDECODED


LIMITS = SandboxLimits(max_seconds=1, max_bytes=512 << 20, max_answer_bytes=1000)


@pytest.fixture
def process() -> Iterator[Sandbox]:
    with closing(Sandbox("template")) as opened:
        yield opened


def _ask(process: Sandbox, template: str) -> dict[str, str]:
    job = {"template": template, "variables": {}, "max_characters": 1 << 20}
    return process.ask(job, LIMITS)


def test_an_answer_that_is_too_long_is_not_read(process: Sandbox) -> None:
    answer = _ask(process, "{{ 'x' * 900000 }}")
    assert answer == {"error": "answers with more than 1,000 bytes"}
    assert _ask(process, "fine") == {"text": "fine"}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_is_killed_at_work_is_started_again(
    process: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Once; then whoever asks hears that nothing is wrong with what was asked."""
    deaths = tmp_path / "deaths"
    deaths.mkdir()
    interpreter = tmp_path / "python"
    interpreter.write_text(
        f"#!/bin/sh\nrmdir {deaths}/1 2>/dev/null || rmdir {deaths}/2 2>/dev/null ||"
        f' exec {sys.executable} "$@"\nread -r job\nkill -{int(number)} $$\n'
    )
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    (deaths / "1").mkdir()
    assert _ask(process, "fine") == {"text": "fine"}
    process.close()
    for name in "12":
        (deaths / name).mkdir()
    with pytest.raises(SandboxLostError, match="killed, twice"):
        _ask(process, "fine")
    assert not list(deaths.iterdir())
    assert _ask(process, "fine") == {"text": "fine"}
