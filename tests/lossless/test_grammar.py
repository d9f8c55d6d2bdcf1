"""Rung 2 with grammars and tools: outputs follow their own, drafted or not, beside some without."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import dflash_trt
from dflash_trt import SamplingParams
from dflash_trt.decoding import RequestResult, total
from dflash_trt.decoding.drafter_kinds import DrafterKind
from dflash_trt.text.grammar import Follower, Grammar
from tests.covering import exhaustive

SCHEMA = {
    "type": "object",
    "properties": {
        "state": {"enum": ["ok", "lost"]},
        "load": {"type": "integer", "minimum": 0, "maximum": 9},
        "name": {"type": "string", "maxLength": 9},
    },
    "required": ["state", "load", "name"],
    "additionalProperties": False,
}
PROMPTS = ["fleet #6400 to #6410 in kyiv at load 5", "jobs: red fox gold", "route #5399 in rome"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grammar") / "bundle"
    dflash_trt.build("demo", folder)
    return folder


@pytest.mark.parametrize("temperature", [exhaustive(0.0), 1.0], ids=["greedy", "drawn"])
def test_outputs_follow_and_drafts_change_nothing(folder: Path, temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, seed=3)
    with dflash_trt.load(folder, block_schedule="none") as pair:
        schema = pair.grammars.compile(Grammar("json_schema", json.dumps(SCHEMA)))
        digits = pair.grammars.compile(Grammar("regex", "#[0-9]{4}( to #[0-9]{4})?"))
        asked = [
            pair.request(prompt, sampling, max_tokens=160, grammar=grammar)
            for prompt in PROMPTS
            for grammar in (schema, digits, None)
        ]
        together = pair.run(asked)
        plain = [pair.run([replace(one, speculate=False)])[0] for one in asked]
        free = pair.generate(PROMPTS, sampling, max_tokens=160)
    assert [one.token_ids for one in together] == [one.token_ids for one in plain]
    assert [one.token_ids for one in together[2::3]] == [one.token_ids for one in free]
    for one in together[0::3]:
        assert one.finish_reason == "stop" and one.text is not None
        value = json.loads(one.text)
        assert value["state"] in ("ok", "lost") and 0 <= value["load"] <= 9
        assert len(value["name"]) <= 9 and value.keys() == SCHEMA["properties"].keys()
    for one in together[1::3]:
        assert one.text is not None and one.text[0] == "#" and one.text[1:5].isdigit()
    assert sum(one.statistics.accepted_tokens for one in together) > 20
    statistics = [one.statistics for one in together]
    summed = total(statistics)
    assert summed.forced_tokens and summed.grammar_s
    assert summed.constrained_steps == sum(
        one.steps for at, one in enumerate(statistics) if at % 3 < 2
    )
    assert summed.constrained_acceptance_length != summed.acceptance_length
    for one in statistics[2::3]:
        assert one.grammar_s is one.forced_tokens is None and one.constrained_steps == 0
    assert "grammar_s" in summed.to_json() and "grammar_s" not in total(statistics[2::3]).to_json()


@pytest.mark.parametrize("drafter", ["dflash", exhaustive("prompt-lookup")])
def test_runs_that_a_grammar_forces_are_accepted(folder: Path, drafter: DrafterKind) -> None:
    """Drafts that know the grammar change no token, and are kept more often than those without."""
    forced = Grammar("regex", "(red|wet) fox #6400 to #6410 in kyiv at load [0-9], jobs in oslo")
    sampling = SamplingParams(temperature=1.0, seed=3)

    def ask(pair: dflash_trt.LoadedPair) -> list[RequestResult]:
        grammar = pair.grammars.compile(forced)
        return pair.generate(PROMPTS, sampling, max_tokens=100, grammar=grammar)

    with dflash_trt.load(folder, block_schedule="none", drafter=drafter) as pair:
        known = ask(pair)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Follower, "revise", lambda self, draft, most: list(draft))
            unknown = ask(pair)
    with dflash_trt.load(folder, speculation=False) as pair:
        plain = ask(pair)
    assert [one.token_ids for one in known] == [one.token_ids for one in plain]
    assert [one.token_ids for one in unknown] == [one.token_ids for one in plain]
    for one, other in zip(known, unknown, strict=True):
        length = one.statistics.acceptance_length
        assert length is not None and length > 3
        assert length > (other.statistics.acceptance_length or 1) and one.finish_reason == "stop"
