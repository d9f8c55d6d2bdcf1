"""A stream's tokens with their origins, and requests without drafts, over the real port."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any
from urllib.parse import urlsplit

import pytest

import dflash_trt
from dflash_trt.decoding.request import TokenOrigin
from tests.serving.served import PROMPTS, Served, fetch

Chunks = list[dict[str, Any]]
ASK: dict[str, Any] = {"model": "demo", "prompt": PROMPTS[0], "max_tokens": 64, "temperature": 0}
TOLD = {"include_tokens": True, "include_usage": True}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["fox", "owl"]}},
    "required": ["name"],
    "additionalProperties": False,
}


def stream_of(served: Served, **asked: Any) -> tuple[dict[int, Chunks], dict[str, Any]]:
    """The chunks of each choice, and the usage."""
    path = "/v1/chat/completions" if "messages" in asked else "/v1/completions"
    body = {**ASK, "stream": True, "stream_options": TOLD, **asked}
    body = {name: one for name, one in body.items() if name != "prompt" or "messages" not in asked}
    status, content, _ = fetch(urlsplit(served.openai).netloc, path, body)
    assert status == 200, content
    events = [one.removeprefix("data: ") for one in content.decode().split("\n\n") if one]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(one) for one in events]
    choices = defaultdict[int, Chunks](list)
    for chunk in chunks:
        for one in chunk["choices"]:
            choices[one["index"]].append(one)
    return choices, chunks[-1]["usage"]


def tokens_of(chunks: Chunks) -> list[dict[str, Any]]:
    return [token for chunk in chunks for token in chunk["tokens"]]


def kept_of(*choices: Chunks) -> int:
    return sum(one["origin"] != "target" for chunks in choices for one in tokens_of(chunks))


def test_origins_are_those_of_the_generator(served: Served) -> None:
    choices, usage = stream_of(served, return_token_ids=True)
    found = [TokenOrigin(one["id"], one["origin"]) for one in tokens_of(choices[0])]
    with dflash_trt.load(served.bundle, block_schedule="none") as pair:
        events = list(pair.stream(PROMPTS[0], max_tokens=64, origins=True))
        assert found == [one for event in events for one in event.origins]
        assert not any(one.origins for one in pair.stream(PROMPTS[0], max_tokens=8))
    steps = [one for event in events for one in [*["draft"] * event.accepted_tokens, "target"]]
    assert [one.origin for one in found] == steps[: len(found)]
    assert [one.token_id for one in found] == [
        id_ for one in choices[0] for id_ in one["token_ids"]
    ]
    details = usage["completion_tokens_details"]
    assert kept_of(choices[0]) == details["accepted_prediction_tokens"] > 0


@pytest.mark.parametrize("stop", [[], ["is gold: x"], [" fox gold"]], ids=["none", "held", "cut"])
def test_tokens_are_in_step_with_the_text(served: Served, stop: list[str]) -> None:
    """A token comes with the chunk that shows its beginning, and not before."""
    for index, (chunks, usage) in enumerate(
        stream_of(served, prompt=prompt, stop=stop) for prompt in PROMPTS[:4]
    ):
        text, told = b"", b""
        for chunk in chunks[0]:
            text += chunk["text"].encode()
            for token in chunk["tokens"]:
                begins, told = len(told), told + bytes(token["bytes"])
                assert begins < len(text) or chunk["finish_reason"], (index, chunk)
            assert told.startswith(text)
        assert len(tokens_of(chunks[0])) == usage["completion_tokens"]


def test_of_several_outputs_each_has_its_own(served: Served) -> None:
    drawn: dict[str, Any] = {"temperature": 0.8, "seed": 5}
    choices, usage = stream_of(served, n=3, **drawn)
    for index in range(3):
        alone, _ = stream_of(served, **drawn | {"seed": 5 + index})
        assert tokens_of(choices[index]) == tokens_of(alone[0])
    kept = usage["completion_tokens_details"]["accepted_prediction_tokens"]
    assert kept_of(*choices.values()) == kept


def test_a_grammar_s_tokens_are_told_apart(served: Served) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    asked = [{"role": "user", "content": "jobs"}]
    choices, usage = stream_of(served, messages=asked, response_format=form)
    details = usage["completion_tokens_details"]
    forced = [one for one in tokens_of(choices[0]) if one["origin"] == "grammar"]
    assert 0 < len(forced) <= details["forced_tokens"]
    assert kept_of(choices[0]) == details["accepted_prediction_tokens"]
    said = "".join(one["delta"].get("content", "") for one in choices[0])
    assert json.loads(said)["name"] in ("fox", "owl")


@pytest.mark.parametrize("drawn", [{}, {"temperature": 0.9, "seed": 3}], ids=["greedy", "drawn"])
def test_a_request_without_drafts_has_the_same_tokens(
    served: Served, drawn: dict[str, Any]
) -> None:
    drafted, _ = stream_of(served, **drawn)
    plain, usage = stream_of(served, speculate=False, **drawn)
    ids = [[one["id"] for one in tokens_of(chunks[0])] for chunks in (drafted, plain)]
    assert ids[0] == ids[1] and kept_of(drafted[0]) and not kept_of(plain[0])
    details = usage["completion_tokens_details"]
    assert details["num_verify_steps"] == len(ids[1]) - 1
    assert details["accepted_prediction_tokens"] == details["rejected_prediction_tokens"] == 0


def test_refusals_name_the_field(served: Served) -> None:
    for more, param in (
        ({"speculate": "no"}, "speculate"),
        ({"stream_options": TOLD, "stream": False}, "stream_options"),
        ({"stream_options": {"include_tokens": 2}}, "stream_options.include_tokens"),
    ):
        given = {**ASK, "stream": True, **more}
        status, content, _ = fetch(urlsplit(served.openai).netloc, "/v1/completions", given)
        assert status == 400 and json.loads(content)["error"]["param"] == param
