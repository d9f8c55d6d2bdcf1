"""Rung 2 with tools: a call that a grammar binds has the same tokens, drafted or not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import dflash_trt
from dflash_trt import SamplingParams
from dflash_trt.text.tool_calls import HERMES, CallStream
from dflash_trt.text.tool_grammars import bind_answer
from dflash_trt.text.tools import Tool, ToolFormat, ToolUse

PROPERTIES = {"load": {"type": "integer", "minimum": 10, "maximum": 99}}
SCHEMA = {
    "type": "object",
    "properties": PROPERTIES,
    "required": [*PROPERTIES],
    "additionalProperties": False,
}
PROMPTS = ["fleet #6400 to #6410 in kyiv at load 5", "jobs: red fox gold"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tools") / "bundle"
    dflash_trt.build("demo", folder)
    return folder


@pytest.mark.parametrize(
    "temperature",
    [pytest.param(0.0, id="greedy", marks=pytest.mark.exhaustive), pytest.param(1.0, id="drawn")],
)
def test_calls_are_bound_and_drafts_change_nothing(folder: Path, temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, seed=6)
    use = ToolUse((Tool("run", parameters=SCHEMA, strict=True),), must=True, parallel=False)
    free = replace(use, must=False, parallel=True)
    with dflash_trt.load(folder, block_schedule="none") as pair:
        form = ToolFormat.find("", pair.tokenizer.core, harmony=False)
        bounds = [bind_answer(form, one, None, harmony=False) for one in (use, free)]
        grammars = [pair.grammars.compile(one) for one in bounds if one is not None]
        assert len(grammars) == 2
        asked = [
            pair.request(prompt, sampling, max_tokens=most, grammar=grammar)
            for prompt in PROMPTS
            for grammar, most in ((grammars[0], 200), (grammars[1], 24), (None, 24))
        ]
        together = pair.run(asked)
        plain = [pair.run([replace(one, speculate=False)])[0] for one in asked]
    assert [one.token_ids for one in together] == [one.token_ids for one in plain]
    for one in together[0::3]:
        stream = CallStream(HERMES, ["run"])
        piece = stream.push(one.text or "") + stream.flush()
        assert piece.content == "" and {call.index for call in piece.calls} == {0}
        assert 10 <= json.loads("".join(call.arguments for call in piece.calls))["load"] <= 99
    # Text in front of a call is free: as long as there is none, it is what is said unbound.
    assert [one.text for one in together[1::3]] == [one.text for one in together[2::3]]
    assert sum(one.statistics.accepted_tokens for one in together) > 0
