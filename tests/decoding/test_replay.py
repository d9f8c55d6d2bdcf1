"""Replayed answers against the speculative loop that gave them, and features against PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dflash_trt
from dflash_trt.bundle.bundle import Bundle, open_bundle
from dflash_trt.cli.main import main
from dflash_trt.core.limits import PREFILL_CHUNK
from dflash_trt.decoding.replay import Answer, Edits, Replay
from dflash_trt.decoding.replay.edits import GraphEdit
from dflash_trt.decoding.replay.replayed_acceptance import RECALL_AT, StepTable
from dflash_trt.decoding.replay.rewire import (
    rotate_draft,
    set_windows,
    tap_layers,
)
from dflash_trt.decoding.request import RequestResult
from dflash_trt.decoding.statistics import total
from dflash_trt.models.rope import RopeSpec
from dflash_trt.sampling.params import SamplingParams
from dflash_trt.text.prompts import read_prompts
from tests.covering import exhaustive
from tests.diagnosis.pairs import build
from tests.pairs import TWO_KINDS, PairFactory, TinyPair
from tests.reference.compare import stack_error
from tests.shared import Shared

COUNTS = (
    "steps",
    "drafted_tokens",
    "accepted_tokens",
    "acceptance_histogram",
    "position_trials",
    "position_accepts",
    "prompt_tokens",
    "output_tokens",
)
BUILDS = {
    "demo": ["--target", "demo"],
    "dflash2": ["--target", "demo-dflash2"],
    "paged": ["--target", "demo", "--kv-layout", "paged", "--page-size", "32"],
    "fp8": ["--target", "demo-fp8"],
    "gpt-oss": ["--target", "demo-gpt-oss", "--max-seq-len", "224"],
}


def _build(folder: Path, *options: str) -> None:
    assert main(["build", *options, "--output", str(folder / "bundle")]) == 0


@pytest.fixture(
    scope="module",
    params=["demo", "dflash2", "gpt-oss", *map(exhaustive, ("paged", "fp8"))],
)
def pair(request: pytest.FixtureRequest, shared: Shared) -> Any:
    folder = shared.folder(_build, *BUILDS[request.param])
    with dflash_trt.load(folder / "bundle", block_schedule="none") as loaded:
        yield loaded


def decode(
    pair: dflash_trt.LoadedPair, lengths: Sequence[int | None], **options: Any
) -> tuple[list[Answer], list[RequestResult]]:
    """Answers of several lengths to the bundle's prompts, and what decoding them counted."""
    assert pair.bundle.prompts is not None
    texts = read_prompts(pair.bundle.prompts)[: len(lengths)]
    requests = [
        pair.request(text, max_tokens=length, **options)
        for text, length in zip(texts, lengths, strict=True)
    ]
    results = pair.run(requests)
    answers = [
        Answer(request.prompt_ids, result.token_ids, set_name=f"set {index % 2}")
        for index, (request, result) in enumerate(zip(requests, results, strict=True))
    ]
    return answers, results


def check_counts(measured: Any, results: Sequence[RequestResult]) -> None:
    for name in COUNTS:
        expected = [getattr(result.statistics, name) for result in results]
        assert [getattr(one, name) for one in measured.per_answer] == expected, name


def test_replay_counts_what_decoding_counted(pair: Any) -> None:
    """Ragged ends, several batches, a context that ends (None), and one that has no step."""
    answers, results = decode(pair, [70, 1, 33, 64, None, 2, 9, 150])
    with Replay(pair.bundle, sequences=3) as replay:
        measured = replay.measure(answers)
        again = replay.ask(answers, replay.inject(answers))
    check_counts(measured, results)
    check_counts(again, results)
    counted = total(result.statistics for result in results)
    assert measured.acceptance_length == counted.acceptance_length
    assert measured.acceptance_length is not None and measured.acceptance_length > 3
    assert measured.conditional_acceptance == counted.conditional_acceptance
    halves = [measured.sets["set 0"], measured.sets["set 1"]]
    assert sum(half.steps for half in halves) == measured.steps
    check_counts(halves[1], results[1::2])
    if pair.bundle.manifest.draft.kind == "DFlash 2":  # what is no candidate is behind all tokens
        ranks = measured.table.rank
        others = pair.bundle.manifest.target.vocab_size - 1
        assert set(ranks[ranks >= RECALL_AT]) == {others}


@pytest.fixture(scope="module")
def demo(shared: Shared) -> Any:
    folder = shared.folder(_build, *BUILDS["demo"])
    with dflash_trt.load(folder / "bundle", block_schedule="none") as loaded:
        yield loaded


def test_sampled_and_stopped_answers(demo: Any) -> None:
    """A sampled answer is replayed as it fell; one that a stop token ended has its cut block."""
    hot = SamplingParams(temperature=1.0, seed=5)
    stop = demo.tokenizer.encode("\n")
    for options in ({"sampling": hot}, {"stop_token_ids": stop}):
        answers, results = decode(demo, [60] * 4, **options)
        with Replay(demo.bundle) as replay:
            check_counts(replay.measure(answers), results)


VARIANTS: dict[str, dict[str, Any]] = {
    "sliding": {"draft": TWO_KINDS, "max_seq_len": 400},
    "one_tap": {"draft": {"num_layers": 1, "target_layer_ids": [3]}},
    "llama": {"family": "llama", "target": {"dtype": "bfloat16", "rope": "llama3"}},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_features_are_the_tapped_residual_streams(name: str, make_pair: PairFactory) -> None:
    """Hidden states id + 1 of transformers, over more than one chunk of a prompt."""
    import torch

    tiny: TinyPair = make_pair(**VARIANTS[name])
    ids = np.random.default_rng(2).integers(0, 256, PREFILL_CHUNK + 40).tolist()
    with Replay(tiny.bundle) as replay:
        features = replay.features(ids)
    with torch.no_grad():
        states = tiny.reference(torch.tensor([ids]), output_hidden_states=True).hidden_states
        # transformers tells the last layer's stream as its norm leaves it.
        width = states[0].shape[-1]
        last = tiny.reference.model.norm(torch.from_numpy(features[:, -width:]))
    wanted = [states[layer + 1][0] for layer in tiny.pair.draft.target_layer_ids]
    expected = torch.cat([*wanted, states[-1][0]], dim=-1).numpy()
    features = np.concatenate([features[:, :-width], last.numpy()], axis=1)
    assert features.shape == expected.shape and features.dtype == np.float32
    error = np.abs(features - expected).max() / np.abs(expected).max()
    assert error < stack_error(len(states))


WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24}
CHANGED: dict[str, Any] = {
    "draft": WINDOWS | {"rope_theta": 3e4},
    "dflash": {"target_layer_ids": [1, 2, 3, 4, 5]},
}
TOKENS = 16


def _rebuild(folder: Path, changes: dict[str, Any], *options: str) -> None:
    build(folder, "gpt-oss", *options, **changes)


def _rotate(theta: float) -> GraphEdit:
    return rotate_draft(RopeSpec(theta), 32, 1024)


@pytest.fixture(scope="module")
def good(shared: Shared) -> Bundle:
    return open_bundle(shared.folder(_rebuild, {}) / "bundle")


@pytest.fixture(scope="module")
def answers(good: Bundle) -> list[Answer]:
    assert good.prompts is not None
    texts = read_prompts(good.prompts)[:2]
    with dflash_trt.load(good.folder) as pair:
        ids = [pair.tokenizer.encode(text) for text in texts]
        results = pair.generate(ids, max_tokens=TOKENS)
    return [Answer(one, result.token_ids) for one, result in zip(ids, results, strict=True)]


def steps(bundle: Bundle, answers: list[Answer], edits: Edits | None = None) -> StepTable:
    with Replay(bundle, edits=edits) as replay:
        return replay.measure(answers).table


def same(one: StepTable, other: StepTable) -> bool:
    """Whether two replays drafted the same tokens with the same bits of confidence."""
    return all(
        np.array_equal(getattr(one, field.name), getattr(other, field.name))
        for field in fields(StepTable)
    )


def test_an_edit_is_a_build(good: Bundle, answers: list[Answer], shared: Shared) -> None:
    """Taps, rope and windows of one bundle put into the other's graphs, there and back."""
    changed = open_bundle(shared.folder(_rebuild, CHANGED) / "bundle")
    before, after = steps(good, answers), steps(changed, answers)
    assert not same(before, after)
    turned = _rotate(3e4)
    there = Edits((tap_layers([1, 2, 3, 4, 5], 6), turned), (set_windows([24, None], None), turned))
    assert same(steps(good, answers, there), after)
    for missing in (
        replace(there, target=there.target[1:]),
        replace(there, draft=there.draft[1:]),
        replace(there, target=there.target[:1], draft=there.draft[:1]),
    ):
        assert not same(steps(good, answers, missing), after)
    turned = _rotate(1e4)
    back = Edits((tap_layers([0, 1, 2, 3, 4], 6), turned), (set_windows([None] * 2, None), turned))
    assert same(steps(changed, answers, back), before)
