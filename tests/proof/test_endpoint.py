"""A server that others run, asked by its URL: are answers kept, and what is told of drafts?"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.proof.endpoint import asked_server, endpoint_proof
from dflash_trt.proof.endpoint.told_answer import read_answer
from dflash_trt.serving.client import draft_counts
from tests.cli.conftest import Outcome, Run
from tests.cli.conftest import bigram_config as bigram_config
from tests.cli.conftest import bundle as bundle
from tests.cli.conftest import run as run
from tests.standins.openai_server import InventedServer, invented

PROMPTS = [f"prompt {letter}" for letter in "abcdefgh"]
TOKENS = 125


class Ask:
    """Runs a command with --url, and --against-url, of servers that it starts."""

    def __init__(self, run: Run, stack: ExitStack, prompts: Path) -> None:
        self._run, self._stack, self._prompts = run, stack, prompts

    def __call__(
        self, command: str, *servers: InventedServer, more: tuple[object, ...] = ()
    ) -> Outcome:
        urls = [self._stack.enter_context(invented(one)) for one in servers]
        pairs = zip(("--url", "--against-url"), urls, strict=False)
        options = [word for pair in pairs for word in pair]
        given = ["--prompts", f"set={self._prompts}", "--max-tokens", TOKENS, *more]
        return self._run(command, *options, *given)


@pytest.fixture
def ask(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ask]:
    monkeypatch.setattr(endpoint_proof, "SETTLE_S", 0)
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in PROMPTS))
    with ExitStack() as stack:
        yield Ask(run, stack, path)


def test_equal_servers_are_identical(ask: Ask) -> None:
    plain = InventedServer(owner="llamacpp", ids=False)
    outcome = ask("verify", InventedServer(ids=False), plain)
    assert outcome.code == 0, outcome.err
    assert "A: vllm 9.9, Qwen/Qwen3-8B" in outcome.out
    assert "B against A: 8 of 8 answers identical; 1,000 equal" in outcome.out
    assert outcome.out.endswith("verdict: identical\n")
    assert {(one["temperature"], one["max_tokens"]) for one in plain.bodies} == {(0.0, TOKENS)}
    assert sorted({one["seed"] for one in plain.bodies}) == [*range(8)]


def test_drawn_answers_keep_their_seeds_over_sets(ask: Ask, tmp_path: Path) -> None:
    more = ("--prompts", f"other={tmp_path / 'prompts.jsonl'}", "--temperature", 0.8)
    outcome = ask("verify", InventedServer(seeded=True, thinks=True), more=more)
    assert outcome.code == 0 and "A again: 16 of 16 answers identical" in outcome.out
    assert "2,000 equal" in outcome.out
    tied = InventedServer(seeded=True, own_noise=0.03, gap=0.05)
    other = InventedServer(seeded=True, gap=0.05, changed={PROMPTS[2]: 40})
    outcome = ask("verify", tied, other, more=more[2:])
    assert "0.05 nats apart: changed" in outcome.out and "(ties:" not in outcome.out


@pytest.mark.parametrize("seed", range(3))
def test_a_token_in_a_thousand_is_found(ask: Ask, seed: int) -> None:
    prompt, place = divmod(random.Random(seed).randrange(len(PROMPTS) * TOKENS), TOKENS)
    outcome = ask("verify", InventedServer(), InventedServer(changed={PROMPTS[prompt]: place}))
    assert outcome.code == 1
    assert f"set, prompt {prompt + 1}, output token {place}: ' w" in outcome.out
    assert "2 nats less likely: changed" in outcome.out
    assert "B against A: 7 of 8 answers identical, 1 CHANGED (12.5%)" in outcome.out


def test_a_tie_within_the_servers_own_noise_is_no_change(ask: Ask) -> None:
    """Of a gap of 0.05 nats, to a server whose log-probabilities move by 0.03 of their own."""
    other = InventedServer(changed={PROMPTS[2]: 40}, gap=0.05)
    noisy = ask("verify", InventedServer(own_noise=0.03, gap=0.05), other, more=("--json",))
    assert (noisy.code, noisy.json["verdict"]) == (0, "ties only")
    assert noisy.json["tie_limit"] == pytest.approx(0.06)
    (tie,) = noisy.json["between"][0]["partings"]
    assert (tie["prompt"], tie["position"], tie["is_tie"]) == (2, 40, True)
    assert tie["gap"] == pytest.approx(0.05)
    assert noisy.json["servers"][0]["noise"] == pytest.approx(0.03)
    steady = ask("verify", InventedServer(gap=0.05), other, more=("--json",))
    assert (steady.code, steady.json["verdict"]) == (1, "changed")


def test_a_server_that_changes_its_own_answers_is_told(ask: Ask) -> None:
    outcome = ask("verify", InventedServer(forgetful=True))
    assert outcome.code == 1 and outcome.out.endswith("verdict: changed\n")
    assert "A again: 0 of 8 answers identical, 8 CHANGED (100.0%)" in outcome.out
    assert "set, prompt 1, output token 10: " in outcome.out
    other = ask("verify", InventedServer(), InventedServer(forgetful=True))
    assert other.code == 1 and other.out.endswith("verdict: changed\n")
    assert "B against A: 8 of 8 answers identical" in other.out
    assert "B again against A: 0 of 8 answers identical, 8 CHANGED" in other.out


def test_servers_that_tell_little_are_compared_by_what_they_tell(ask: Ask) -> None:
    """By tokens without ids, by characters without log-probabilities, refusing what is strange."""
    strict = InventedServer(owner="tensorrt_llm", strict=True)
    mute = InventedServer(logprobs=False, ids=False, changed={PROMPTS[1]: 3})
    outcome = ask("verify", strict, strict)
    assert outcome.code == 0 and "log-probabilities 0 apart" in outcome.out
    outcome = ask("verify", mute, strict)
    assert outcome.code == 1
    assert "set, prompt 2, output character 1" in outcome.out
    assert "no log-probability is told: changed" in outcome.out
    outcome = ask("verify", strict, mute)
    assert outcome.code == 1 and "set, prompt 2, output token 3: " in outcome.out
    assert "2 nats less likely: changed" in outcome.out


@pytest.mark.parametrize(
    ("server", "told"),
    [
        ({}, "τ 2.48 (its metrics, 400 steps, 592 accepted of 1,200 drafts; by position 100% 75%"),
        ({"owner": "llamacpp"}, "τ 2.48 (its answers, 400 steps, 592 accepted of 1,200 drafts; by"),
        ({"owner": "tensorrt_llm"}, "τ 2.48 (its metrics, 400 steps"),
        ({"owner": "sglang"}, "τ 2.48 (its metrics, 400 steps, 592 accepted)"),
        (
            {"owner": "sglang", "counts": False},
            "τ 2.50 (its gauge, of whatever the server did last",
        ),
        ({"tells": False}, "ESTIMATED τ 2.48 (tokens a chunk, 400 steps, 592 accepted; a chunk"),
    ],
)
def test_acceptance_is_what_the_server_tells(ask: Ask, server: dict[str, Any], told: str) -> None:
    outcome = ask("verify", InventedServer(**server))
    assert f"A acceptance, all: {told}" in outcome.out


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ("html", "answers /chat/completions with text/html, not a stream"),
        ("failing", "answers 500 to /chat/completions: <html>busy</html>"),
        ("empty", "answers with no choice"),
        ("early", "the answer broke off"),
        ("wordless", "never says why its answer ended"),
        ("silent", "the answer broke off (timed out)"),
        ("endless", "takes over 2 s to answer"),
    ],
)
def test_wrong_servers_are_one_line(
    ask: Ask, monkeypatch: pytest.MonkeyPatch, trouble: str, said: str
) -> None:
    monkeypatch.setattr(asked_server, "ANSWER_S", 2 if trouble in ("silent", "endless") else 60)
    for command in ("verify", "diagnose"):
        ask(command, InventedServer(trouble=trouble)).fails(1, said)


def test_other_ids_than_the_bundles_are_one_line(ask: Ask, bundle: Path) -> None:
    for command in ("verify", "diagnose"):
        server = InventedServer()
        ask(command, server, more=(bundle,)).fails(1, "token ids", "are not the bundle's")
        assert len(server.bodies) == len(PROMPTS)


def test_strange_answers_are_read(ask: Ask) -> None:
    outcome = ask("verify", InventedServer(strange=True, ids=False), InventedServer(strange=True))
    assert outcome.code == 0, outcome.err
    assert read_tops([["x"]]) == read_tops([5]) == read_tops(7) == {}
    assert read_tops([{" a": -0.1}]) == {b" a": -0.1}


def read_tops(told: object) -> object:
    logprobs = {"tokens": [" a"], "token_logprobs": [-0.1], "top_logprobs": told}
    choice = {"index": 0, "text": " a", "finish_reason": "stop", "logprobs": logprobs}
    return read_answer([{"choices": [choice]}], "here").tokens[0].likeliest


def test_what_does_not_go_together_is_refused(run: Run, bundle: Path) -> None:
    url = "http://127.0.0.1:9"
    run("verify").fails(2, "name a BUNDLE, or the --url of a server")
    run("diagnose").fails(2, "name a BUNDLE, or the --url of a server")
    run("verify", bundle, "--against-url", url).fails(2, "--against-url: needs --url")
    run("verify", "--url", url, "--repeats", 1).fails(2, "--repeats: does not go with --url")
    run("verify", "--url", url).fails(2, "no prompt")
    run("diagnose", bundle, "--url", url, "--thinking", "on").fails(2, "--thinking: is the server")
    run("verify", "--url", "ftp://x", "--prompt", "a").fails(2, "--url", "is no http://")
    run("diagnose", "--url", url, "--prompt", "a").fails(1, "does not answer /models")


def test_diagnosis_names_what_moves_acceptance(ask: Ask) -> None:
    """The chat template, where a step of a chat gives less; published τ stands beside."""
    outcome = ask("diagnose", InventedServer(chat_steps=(1, 2)))
    assert outcome.code == 0, outcome.err
    assert "published of qwen3-8b: average 6.49, GSM8K 6.54" in outcome.out
    assert "verdict: without chat template +66.0% (+66.0% to +66.0%): the draft" in outcome.out
    outcome = ask("diagnose", InventedServer(chat_steps=(1,)))
    assert "verdict: hardly a draft is accepted" in outcome.out
    found = ask("diagnose", InventedServer(), more=("--json",)).json
    assert found["gains"]["thinking on"] == "the same answers"
    assert found["drafts"]["as served"]["acceptance_length"] == pytest.approx(2.48)
    assert "below all that is published of qwen3-8b" in found["advice"]
    assert found["is_estimated"]
    whole = ask("diagnose", InventedServer(whole=True)).out
    assert "without chat template     2.48  its stream shows no steps: compare τ\n" in whole
    assert "verdict: no gain can be told" in whole and "the same answers" not in whole


def test_gauges_and_counters_are_read_as_prometheus_writes_them() -> None:
    text = (
        "# HELP vllm:spec_decode_num_drafts_total x\n"
        'vllm:spec_decode_num_drafts_total{engine="0"} 4.0\n'
        'vllm:spec_decode_num_drafts_total{engine="1"} 6e+00\n'
        'vllm:spec_decode_num_drafts_created{engine="0"} 1.7e+09\n'
        "vllm:spec_decode_num_draft_tokens_total 30\n"
        "vllm:spec_decode_num_accepted_tokens_total 15\n"
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 5\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 10\nother nan\n'
    )
    counts = draft_counts.count_between({}, draft_counts.read_metrics(text.encode()), 0)
    assert counts is not None and counts.length == 2.5
    assert (counts.steps, counts.drafted, counts.by_position) == (10, 30, (10, 5))


def test_positions_of_tensorrt_llm_count_its_steps() -> None:
    """Over workers; its other counters know no steps, and are not read where these are."""
    family = "trtllm_spec_decode_{}_tokens_total"
    text = "\n".join(
        f'{family.format(kind)}{{token_position="{place}",worker="{worker}"}} {count}'
        for kind, counts in (("drafted", (5, 5, 4)), ("accepted", (4, 2, 0)))
        for worker in range(2)
        for place, count in enumerate(counts)
    )
    text += "\ntrtllm_spec_decode_num_draft_tokens_total 99"
    counts = draft_counts.count_between({}, draft_counts.read_metrics(text.encode()), 0)
    assert counts is not None and (counts.steps, counts.accepted, counts.drafted) == (10, 12, 28)
    assert counts.length == 2.2 and counts.by_position == (8, 4, 0)


STEPS = {"num_spec_steps": 4, "acceptance_histogram": [1, 1, 1, 1]}
VLLM = STEPS | {"num_accepted_draft_tokens": 6, "num_draft_tokens": 12}
TENSORRT_LLM = STEPS | {"total_accepted_draft_tokens": 6, "total_draft_tokens": 12}
OPENAI = {"accepted_prediction_tokens": 6, "rejected_prediction_tokens": 6}


@pytest.mark.parametrize(
    "told",
    [
        {"metrics": {"speculative_decoding": VLLM}},
        {"speculative_decoding": TENSORRT_LLM},
        {"usage": {"completion_tokens_details": OPENAI}},
    ],
)
def test_counts_of_an_answer(told: dict[str, Any]) -> None:
    """Of 11 tokens in 4 steps."""
    counts = draft_counts.read_answer_counts(told, 11)
    assert counts is not None and counts.length == 2.5
    assert (counts.steps, counts.accepted, counts.drafted) == (4, 6, 12)
    assert counts.by_position in ((3, 2, 1), ())
    other = draft_counts.DraftCounts(source="its metrics", steps=2, by_position=(2, 1))
    bare = dataclasses.replace(counts, by_position=())
    assert bare.with_positions(other).by_position == (4, 2)  # six are accepted
    assert bare.with_positions(dataclasses.replace(other, by_position=())) == bare
