"""A paged demo pair behind Dynamo's own frontend: the same tokens, whatever ends meanwhile."""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import dflash_trt
from dflash_trt import CacheOptions, LoadedPair, SamplingParams
from dflash_trt.models.build_config import data_folder
from dflash_trt.sampling.penalties import Penalties
from tests.dynamo.served import INSTALLED, WORKERS, Answer, Dynamo, serving
from tests.waiting import PATIENCE_S, wait_until

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.xdist_group("dynamo"),
    pytest.mark.skipif(
        not INSTALLED.exists(),
        reason="Dynamo's packages are not here: `make .venv-dynamo/.installed` brings them",
    ),
]
LENGTH = 96
SEEDED: dict[str, Any] = {"temperature": 0.75, "top_p": 0.9375, "top_k": 40}
LONGEST = 900
"""So long that an answer is under way for as long as it takes to look at a figure."""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dynamo") / "bundle"
    caches = CacheOptions(kv_layout="paged", page_size=16)
    return dflash_trt.build("demo", folder, caches=caches).folder


@pytest.fixture(scope="module")
def pair(bundle: Path) -> Iterator[LoadedPair]:
    with dflash_trt.load(bundle, threads=1, block_schedule="none") as pair:
        yield pair


@pytest.fixture(scope="module")
def prompts(pair: LoadedPair) -> list[tuple[int, ...]]:
    lines = (data_folder("demo_pair") / "prompts.jsonl").read_text("utf-8").splitlines()
    return [tuple(pair.tokenizer.encode(json.loads(one)["prompt"])) for one in lines[:32]]


@pytest.fixture(scope="module")
def dynamo(bundle: Path) -> Iterator[Dynamo]:
    options = ["--block-schedule", "none", "--threads", "1", "--max-restarts", "50"]
    with serving(bundle, *options) as dynamo:
        yield dynamo


@pytest.fixture(autouse=True)
def _whole(dynamo: Dynamo) -> None:
    if dynamo.process.poll() is None:
        dynamo.wait_whole()


def sampling(seed: int) -> SamplingParams:
    return SamplingParams(seed=seed, **SEEDED)


def ask_all(
    dynamo: Dynamo, prompts: list[tuple[int, ...]], count: int = LENGTH, **options: Any
) -> list[Answer]:
    """The answers of twice as many at once as two workers have slots; each has its own seed."""

    def ask(place: int) -> Answer:
        return dynamo.ask(prompts[place], max_tokens=count, seed=place, **options)

    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(ask, range(len(prompts))))


def join(*chunks: dict[str, Any]) -> tuple[int, ...]:
    """The tokens of a stream."""
    told = [one.get("nvext") or {} for one in chunks]
    return tuple(token for one in told for token in one.get("completion_token_ids") or ())


def expect(
    pair: LoadedPair, prompts: list[tuple[int, ...]], count: int = LENGTH, **options: Any
) -> list[tuple[int, ...]]:
    """The same tokens, drawn by the seeds of `ask_all`, of this process."""
    asked = [
        pair.request(prompt, sampling(seed), max_tokens=count, **options)
        for seed, prompt in enumerate(prompts)
    ]
    return [one.token_ids for one in pair.run(asked)]


def test_tokens_are_those_of_this_process(
    dynamo: Dynamo, pair: LoadedPair, prompts: list[tuple[int, ...]]
) -> None:
    greedy = [one.token_ids for one in pair.generate(prompts, max_tokens=LENGTH)]
    assert [one.tokens for one in ask_all(dynamo, prompts)] == greedy
    answers = ask_all(dynamo, prompts, **SEEDED)
    assert [one.tokens for one in answers] == expect(pair, prompts)
    told = [one.body["nvext"]["engine_data"]["dflash"] for one in answers]
    for answer, own in zip(answers, told, strict=True):
        details = answer.usage["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] == own["accepted_tokens"]
        assert answer.usage["completion_tokens"] == own["output_tokens"] == len(answer.tokens)
    assert sum(one["accepted_tokens"] for one in told) > 0


def test_requests_choose_how_they_are_decoded(
    dynamo: Dynamo, pair: LoadedPair, prompts: list[tuple[int, ...]]
) -> None:
    def steps(*annotations: str) -> tuple[tuple[int, ...], dict[str, Any]]:
        fields = {"extra_fields": ["completion_token_ids", "engine_data"]}
        extra = fields | {"annotations": [*annotations]}
        answer = dynamo.ask(prompts[0], max_tokens=32, nvext=extra)
        return answer.tokens, answer.body["nvext"]["engine_data"]["dflash"]

    whole, plain, small = steps(), steps("dflash.speculate:false"), steps("dflash.block_size:3")
    assert whole[0] == plain[0] == small[0]
    assert plain[1]["drafted_tokens"] == 0
    assert small[1]["drafted_tokens"] == 2 * small[1]["steps"]
    refused = dynamo.ask(prompts[0], nvext={"annotations": ["dflash.block:3"]})
    assert refused.status == 400
    assert "block_size" in refused.body["message"]

    chosen = dynamo.ask(prompts[0], max_tokens=8, guided_choice=["red", "blue"])
    assert chosen.body["choices"][0]["text"] in ("red", "blue")
    only = dynamo.ask(prompts[0], max_tokens=4, allowed_token_ids=[20, 21], ignore_eos=True)
    assert set(only.tokens) <= {20, 21}
    extra = {"extra_fields": ["engine_data"]}
    several = dynamo.ask(prompts[0], max_tokens=16, n=3, seed=7, nvext=extra, **SEEDED)
    texts = [
        pair.run([pair.request(prompts[0], sampling(seed), max_tokens=16)])[0].text
        for seed in (7, 8, 9)
    ]
    assert [one["text"] for one in several.body["choices"]] == texts
    assert several.usage["completion_tokens"] == 48


def test_the_router_finds_shared_prefixes(dynamo: Dynamo, prompts: list[tuple[int, ...]]) -> None:
    heads = [(*prompt, *reversed(prompt))[:64] for prompt in prompts[:6]]
    first = [dynamo.ask(one, max_tokens=4) for one in heads]
    hits = []
    for turn in range(2):
        for head, before in zip(heads, first, strict=True):
            again = dynamo.ask((*head, 20 + turn), max_tokens=4)
            workers = [one.body["nvext"]["worker_id"] for one in (again, before)]
            cached = again.usage["prompt_tokens_details"]["cached_tokens"]
            hits.append(workers[0] == workers[1] and cached == len(head))
    assert sum(hits) >= 0.8 * len(hits), hits


def test_a_client_that_leaves_frees_its_slot(
    dynamo: Dynamo, prompts: list[tuple[int, ...]]
) -> None:
    def cancelled() -> float:
        name = r'dflash_requests_total\{.*outcome="cancelled".*\}'
        return sum(dynamo.figure(worker, name) for worker in range(WORKERS))

    before = cancelled()
    streams = [dynamo.stream(one, max_tokens=LONGEST, ignore_eos=True) for one in prompts[:8]]
    for one in streams:
        next(one)
    for one in streams:
        one.close()
    wait_until(lambda: cancelled() > before, "the cancelled requests")
    wait_until(lambda: not any(map(dynamo.active, range(WORKERS))), "free slots")


@pytest.fixture(scope="module")
def long_answers(pair: LoadedPair, prompts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return expect(pair, prompts[:16], 3 * LENGTH)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1])
def test_a_worker_that_ends_changes_no_token(
    dynamo: Dynamo,
    prompts: list[tuple[int, ...]],
    long_answers: list[tuple[int, ...]],
    end: signal.Signals,
) -> None:
    """Killed, told to end, or with a generator that hangs, which ends the process by itself."""
    ends = dynamo.count_restarts()
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask_all, dynamo, prompts[:16], 3 * LENGTH, **SEEDED)
        victim = dynamo.end_busy(end, 2)
        answers = asking.result()
    assert [one.status for one in answers] == [200] * len(answers)
    assert [one.tokens for one in answers] == long_answers
    wait_until(lambda: dynamo.count_restarts() == ends + 1, "another worker")
    assert victim not in dynamo.worker_pids().values()


def move(
    dynamo: Dynamo, prompts: list[tuple[int, ...]], **options: Any
) -> tuple[tuple[int, ...], list[dict[str, Any]], int]:
    """A prompt whose worker was killed, its chunks, and how many tokens came before that."""
    fields = {"max_tokens": LONGEST, "ignore_eos": True, **SEEDED, **options}
    for prompt in prompts:  # one that had ended too early to be moved is followed by another
        dynamo.wait_whole()
        chunks = dynamo.stream(prompt, **fields)
        got = [next(chunks)]
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(list, chunks)
            dynamo.end_busy()
            got += reading.result()
        assert len(join(*got)) == LONGEST
        if begun := got[-1]["usage"]["prompt_tokens"] - len(prompt):
            return prompt, got, begun
    raise AssertionError("no request was moved")


@pytest.mark.parametrize(
    ("options", "penalties"),
    [
        (
            {"frequency_penalty": 0.5, "presence_penalty": 0.25},
            Penalties(frequency=0.5, presence=0.25),
        ),
        ({"repetition_penalty": 1.25}, Penalties(repetition=1.25)),
    ],
)
def test_penalties_of_a_request_that_moved(
    dynamo: Dynamo,
    pair: LoadedPair,
    prompts: list[tuple[int, ...]],
    options: dict[str, float],
    penalties: Penalties,
) -> None:
    """The worker that goes on cannot tell output from prompt: two of them count from there."""
    whole: dict[str, Any] = {"ignore_eos": True, "penalties": penalties}

    def run(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
        request = pair.request(prompt, sampling(5), max_tokens=count, **whole)
        return pair.run([request])[0].token_ids

    prompt, got, begun = move(dynamo, prompts, seed=5, **options)
    tokens, alone = join(*got), run(prompt, LONGEST)
    assert tokens[:begun] == alone[:begun]
    assert tokens[begun:] == run((*prompt, *tokens[:begun]), LONGEST - begun)
    if penalties.repetition != 1:  # which counts prompt and output alike
        assert tokens == alone


def test_a_move_keeps_the_noise_of_a_request_without_a_seed(
    dynamo: Dynamo, pair: LoadedPair, prompts: list[tuple[int, ...]]
) -> None:
    """Its id gives one, and stays."""
    prompt, got, _ = move(dynamo, prompts)
    digest = hashlib.blake2b(got[0]["id"].removeprefix("cmpl-").encode(), digest_size=8)
    seed = int.from_bytes(digest.digest(), "little") >> 1
    request = pair.request(prompt, sampling(seed), max_tokens=LONGEST, ignore_eos=True)
    assert join(*got) == pair.run([request])[0].token_ids


@pytest.mark.parametrize("options", [{"guided_regex": "[a-z ]{200}"}, {"n": 2}])
def test_what_is_not_moved(
    dynamo: Dynamo, prompts: list[tuple[int, ...]], options: dict[str, Any]
) -> None:
    """A guided answer, and several choices."""

    def read(answer: Answer) -> list[str]:
        return [one["text"] for one in answer.body["choices"]]

    fields = {"ignore_eos": "n" in options, "nvext": {"extra_fields": ["worker_id"]}}
    options = {**fields, **SEEDED, **options}
    whole = [read(one) for one in ask_all(dynamo, prompts, **options)]
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask_all, dynamo, prompts, **options)
        dynamo.end_busy(least=3)
        answers = asking.result()
    statuses = {one.status for one in answers}
    assert 503 in statuses and statuses <= {200, 503}
    for answer, texts in zip(answers, whole, strict=True):
        assert answer.status == 503 or read(answer) == texts


def test_the_end_waits_for_what_is_in_flight(
    dynamo: Dynamo, pair: LoadedPair, prompts: list[tuple[int, ...]]
) -> None:
    some = prompts[:4]
    results = pair.generate(some, max_tokens=LONGEST, ignore_eos=True)
    expected = [one.token_ids for one in results]
    streams = [dynamo.stream(one, max_tokens=LONGEST, ignore_eos=True) for one in some]
    first = [next(one) for one in streams]
    dynamo.process.send_signal(signal.SIGTERM)
    with ThreadPoolExecutor(len(some)) as pool:
        rests = list(pool.map(list, streams))
    assert [join(one, *rest) for one, rest in zip(first, rests, strict=True)] == expected
    assert dynamo.process.wait(PATIENCE_S) == 0
    assert not dynamo.worker_pids()


def test_limits_of_a_worker_cost_nobody_else(bundle: Path, prompts: list[tuple[int, ...]]) -> None:
    """Dynamo keeps requests away from a worker that says it was too slow: ours says it is busy."""
    whole: dict[str, Any] = {"ignore_eos": True, "nvext": {}, **SEEDED}
    with serving(bundle, "--request-seconds", "1", "--max-queue-size", "64") as dynamo:
        dynamo.wait_whole()
        for _ in range(WORKERS):  # 57,600 tokens in 8 slots take any machine longer
            assert dynamo.ask(prompts[0], max_tokens=LONGEST, n=64, **whole).status == 503
        for prompt in prompts[:4]:
            assert dynamo.ask(prompt, max_tokens=1).status == 200
        many = dynamo.ask(prompts[0], max_tokens=1, n=73, **whole)
        assert many.status == 400 and "more than the 72" in many.body["message"]
