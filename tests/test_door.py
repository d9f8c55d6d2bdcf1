"""`import dflash_trt`: the names it promises, and that all of it is what the commands do."""

from __future__ import annotations

import asyncio
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import aclosing
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pytest

import dflash_trt
from dflash_trt import (
    CacheOptions,
    DflashError,
    LoadedPair,
    RequestFailedError,
    SamplingParams,
    TokenRules,
)
from dflash_trt.cli.main import main
from dflash_trt.decoding import TokenEvent
from tests.cli.bigram import END, token, write_bigram_pair
from tests.inspection import loaded_graphs

SAMPLED = SamplingParams(temperature=6, top_p=0.9, seed=7)
PROMPTS = ["cab", "x", "9", "zq", "3", "cé"]  # more than max_batch, some end early
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{{ eos_token }}{% endfor %}"
TEMPLATE += "{{ last or 9 }}"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bigram_pair(tmp_path_factory.mktemp("door"), template=TEMPLATE)


@pytest.fixture(scope="module")
def folder(config: Path) -> Path:
    """A bundle that the interface built."""
    return dflash_trt.build(str(config), config.parent / "bundle").folder


@pytest.fixture
def pair(folder: Path) -> Iterator[LoadedPair]:
    with dflash_trt.load(folder) as loaded:
        yield loaded


def test_the_interface_is_what_was_written_down() -> None:
    # A change here is a change for everyone who imports this: make it knowingly.
    import dflash_trt.api as api

    shown: dict[str, str] = {}
    for name in api.__all__:
        found = getattr(dflash_trt, name)
        shown[name] = str(inspect.signature(found))
        for member, value in inspect.getmembers_static(found):  # inherited ones too
            if member.startswith("_"):
                continue
            if inspect.isfunction(value):
                shown[f"{name}.{member}"] = str(inspect.signature(value))
            elif isinstance(value, property | cached_property):
                shown[f"{name}.{member}"] = "property"
    text = json.dumps(shown, indent=1) + "\n"
    assert text == Path(__file__).with_name("door.json").read_text(), text
    assert not hasattr(dflash_trt, "generate")
    assert dir(dflash_trt) == sorted([*api.__all__, "__version__"])


def test_importing_costs_nothing() -> None:
    heavy = {"numpy", "onnx", "onnxruntime", "tokenizers", "pydantic", "click"}
    script = (
        "import sys, dflash_trt; m = sys.modules; a = {*m}; from dflash_trt import *; b = {*m};"
        f"load; print(sorted({heavy!r} & a), sorted({{'torch', 'onnxruntime', 'click'}} & b))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "[] []\n", done.stderr


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED])
def test_results_are_the_commands(
    folder: Path,
    sampling: SamplingParams,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    arguments = ["--prompt-file", str(file), "--raw", "--max-tokens", "12", "--json"]
    arguments += ["--temperature", str(sampling.temperature), "--top-p", str(sampling.top_p)]
    arguments += ["--block-schedule", "none"]  # else a step's time has a say in the figures
    capsys.readouterr()
    assert main(["generate", str(folder), *arguments, "--seed", str(sampling.seed)]) == 0
    answers = json.loads(capsys.readouterr().out)["requests"]
    with dflash_trt.load(folder, block_schedule="none") as pair:
        results = pair.generate(PROMPTS, sampling, max_tokens=12)
        ids = [pair.tokenizer.encode(text) for text in PROMPTS]
        again = pair.generate(ids, sampling, max_tokens=12)
    for result, answer in zip(results, answers, strict=True):
        assert (result.text, list(result.token_ids)) == (answer["text"], answer["token_ids"])
        assert result.finish_reason == answer["finish_reason"]
        figures = result.statistics
        assert list(figures.acceptance_histogram) == answer["acceptance_histogram"]
        assert figures.acceptance_length == answer["acceptance_length"]
        assert figures.time_to_first_token_s is not None
    assert [one.token_ids for one in again] == [one.token_ids for one in results]


def test_a_request_that_can_say_nothing_fails_alone(pair: LoadedPair) -> None:
    rules = TokenRules(allowed=(5, 6), bad=((5, 5), (5, 6), (6, 5), (6, 6)))
    asked = [pair.request(one, max_tokens=4) for one in PROMPTS]
    alone = [one.token_ids for one in pair.run(asked)]
    with pytest.raises(RequestFailedError, match="no token may come next") as caught:
        pair.run([*asked, pair.request("3", max_tokens=4, rules=rules)])
    assert caught.value.usage
    assert [one and one.token_ids for one in caught.value.results] == [*alone, None]


def test_without_speculation_only_the_baseline_graph_opens(folder: Path, pair: LoadedPair) -> None:
    with dflash_trt.load(folder, speculation=False) as baseline:
        plain = baseline.generate(PROMPTS, SAMPLED, max_tokens=20)
        assert loaded_graphs(baseline.executor) == {"target_only"}
    assert all(one.statistics.drafted_tokens == 0 for one in plain)
    drafted = pair.generate(PROMPTS, SAMPLED, max_tokens=20)
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]


def test_a_listener_ends_a_request_and_not_its_neighbours(pair: LoadedPair) -> None:
    """What it has said by then is a beginning of what it would have said."""
    requests = [pair.request(prompt, max_tokens=9) for prompt in ("cab", "9")]
    whole = pair.run(requests)
    said: list[int] = []

    def hear(index: int, event: TokenEvent) -> bool:
        said.extend(event.token_ids if index == 0 else ())
        return index == 0 and len(said) >= 4

    ended, neighbour = pair.run(requests, hear)
    assert ended.finish_reason == "cancelled" and len(ended.token_ids) < 9
    assert list(ended.token_ids) == said == list(whole[0].token_ids[: len(said)])
    assert neighbour.text == whole[1].text == "012345678"
    assert pair.used_slots == 0


def test_asynchronous_streams_are_batched_and_equal(pair: LoadedPair) -> None:
    expected = [one.text for one in pair.generate(PROMPTS, SAMPLED, max_tokens=12)]

    async def read(text: str) -> str:
        async with aclosing(pair.astream(text, SAMPLED, max_tokens=12)) as events:
            return "".join([event.text async for event in events])

    async def read_all() -> list[str]:
        return await asyncio.gather(*map(read, PROMPTS))

    assert asyncio.run(read_all()) == expected
    # Its thread has the generator now, and serves calls that are not asynchronous too.
    assert [one.text for one in pair.generate(PROMPTS, SAMPLED, max_tokens=12)] == expected
    assert [event.text for event in pair.stream("9", max_tokens=1)] == ["0"]


def test_chat(pair: LoadedPair) -> None:
    messages = [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    answer = pair.chat(messages, max_tokens=3)
    assert (answer.text, answer.reasoning) == ("012", None)
    ids = [token(char) if char != "." else END for char in "uab.ac.ud.9"]
    assert list(pair.request(messages).prompt_ids) == ids
    assert answer.result.statistics.prompt_tokens == len(ids)
    other = pair.request(messages, template_options={"last": 8})
    assert list(other.prompt_ids) == [*ids[:-1], token("8")]
    assert "".join(event.text for event in pair.stream(messages, max_tokens=3)) == "012"
    for wrong in (lambda: pair.chat("cab"), lambda: pair.chat([5, 6])):
        with pytest.raises(DflashError, match="messages: "):
            wrong()


@pytest.mark.parametrize(
    ("prompts", "options", "pieces"),
    [
        ("cab", {}, ["prompts", "not a list"]),
        ([""], {}, ["prompt", "no token"]),
        ([[]], {}, ["prompt", "no token"]),
        ([None], {}, ["prompt", "neither a text"]),
        ([b"a"], {}, ["prompt", "neither a text"]),
        ([["a", "b"]], {}, ["prompt", "role"]),
        ([[{"role": "user"}]], {}, ["prompt", "content"]),
        ([[{"role": "user", "content": "a"}, 3]], {}, ["prompt", "role"]),
        (["a", [1, 300]], {}, ["prompt 2", "outside the vocabulary"]),
        (["a" * 64], {}, ["prompt", "do not fit"]),
        (["a"], {"max_tokens": 0}, ["max_tokens", "0"]),
        (["a"], {"block_size": 9}, ["block_size", "between 2 and 8"]),
        (["a"], {"stop_strings": [""]}, ["stop_strings", "empty"]),
        (["a"], {"max_token": 3}, ["max_token: ", "'max_tokens'"]),
    ],
)
def test_what_cannot_run_is_refused(
    pair: LoadedPair, prompts: Any, options: Any, pieces: list[str]
) -> None:
    with pytest.raises(DflashError) as refusal:
        pair.generate(prompts, **options)
    assert refusal.value.usage and all(piece in refusal.value.message for piece in pieces)
    assert pair.used_slots == 0


def test_a_closed_pair_says_so(folder: Path) -> None:
    with dflash_trt.load(folder) as pair:
        stream = pair.stream("cab")
        next(stream)
    for use in (lambda: next(stream), lambda: pair.generate(["a"])):
        with pytest.raises(DflashError, match="closed"):
            use()
    pair.close()

    async def begin() -> None:
        await anext(pair.astream("a"))

    with pytest.raises(DflashError, match="closed"):
        asyncio.run(begin())


def test_build(config: Path, tmp_path: Path) -> None:
    limits = dflash_trt.LimitOptions(max_batch=2)
    caches = CacheOptions(kv_layout="paged")
    built = dflash_trt.build(str(config), tmp_path / "b", limits=limits, caches=caches)
    assert built.manifest.limits.max_batch == 2 and built.manifest.page_pool is not None
    with pytest.raises(DflashError, match="exists"):
        dflash_trt.build(str(config), tmp_path / "b")
    with dflash_trt.load(built.folder) as pair:
        assert pair.generate(["cab"], max_tokens=5)[0].text == "ababa"
        assert pair.generate(["cab"], max_tokens=5)[0].statistics.preemptions == 0
    with pytest.raises(DflashError, match="dflash-trt build"):
        dflash_trt.build(str(config), tmp_path / "c", executor="trtllm")
    assert dflash_trt.PrecisionOptions(calibration="a").calibration == Path("a")
    for call, wrong in (
        (dflash_trt.LimitOptions, {"max_batch": 0}),
        (dflash_trt.PrecisionOptions, {"precision": "fp9", "calibration": 3, "exclude": "*.mlp"}),
        (CacheOptions, {"kv_layout": "x", "kv_dtype": 8, "page_size": "64", "kv_pages": "7"}),
        (partial(dflash_trt.build, str(config)), {"limits": {"max_batch": 2}, "output": 3}),
    ):
        for name, value in wrong.items():
            with pytest.raises(DflashError, match=f"^{name}: Input should be"):
                call(**{name: value})
