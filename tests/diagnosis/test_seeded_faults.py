"""Eleven faults, each seeded into a pair that is good without it, and pairs with none at all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from demo_pair.recipe.corpus import HELD_OUT_STREAM, documents
from dflash_trt.bundle.bundle import Bundle, open_bundle
from dflash_trt.core.progress import SilentProgress
from dflash_trt.models.build_config import data_folder
from dflash_trt.proof.diagnosis.cause import Cause
from dflash_trt.proof.diagnosis.diagnose import (
    Diagnosis,
    Form,
    Serving,
    answer_questions,
    diagnose,
)
from dflash_trt.proof.diagnosis.verdict import VerdictKind
from dflash_trt.text.prompts import read_prompts
from tests.diagnosis.pairs import build, edit_graph, shift_slots
from tests.shared import Shared

pytestmark = pytest.mark.exhaustive

SERVICE = Serving(max_tokens=96)
BREAK = " ¶ "
TEMPLATES = {
    "lines": "{{ messages[0]['content'] | replace(' ¶ ', '\n') }}",
    "thinking": "{{ messages[0]['content'] }}{% if enable_thinking %}\n<think>zzz qqq\n{% endif %}",
}
CHINESE = (
    "你好世界今天天气很好",
    "从前有一座山",
    "我喜欢学习数学",
    "请告诉我答案",
    "北京是中国的首都",
    "他昨天去了图书馆",
    "这本书非常有趣",
    "明天我们去公园玩",
)
LONG = {"max_position_embeddings": 4096}
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 256}
CUT = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 16}


@cache
def own_prompts() -> list[str]:
    return read_prompts(data_folder("demo_pair") / "prompts.jsonl")


class Case:
    """A bundle made once, and how it is asked."""

    def __init__(self, shared: Shared, folder: Path) -> None:
        self._shared, self._folder = shared, folder

    def pair(self, name: str, **changes: Any) -> Bundle:
        return open_bundle(self._shared.folder(_build, name, **changes) / "bundle")

    def edited(self, name: str, graph: str, edit: Any) -> Bundle:
        return edit_graph(self.pair(name), self._folder / "bundle", graph, edit)


def _build(folder: Path, name: str, **changes: Any) -> None:
    build(folder, name, *changes.pop("options", []), **changes)


@pytest.fixture
def case(shared: Shared, tmp_path: Path) -> Case:
    return Case(shared, tmp_path)


def run(
    bundle: Bundle, texts: Sequence[str] = (), service: Serving = SERVICE, **more: Any
) -> Diagnosis:
    texts = texts or own_prompts()[:16]
    answers = answer_questions(bundle, texts, service, SilentProgress())
    return diagnose(bundle, answers, service, SilentProgress(), questions=texts, **more)


def blames(diagnosis: Diagnosis, cause: Cause, kind: VerdictKind = VerdictKind.WRONG) -> None:
    verdict = diagnosis.verdict
    assert (verdict.kind, verdict.cause) == (kind, cause), json.dumps(verdict.to_json(), indent=1)
    assert verdict.findings[0].evidence


def test_taps_off_by_one(case: Case) -> None:
    blames(run(case.pair("gpt-oss", dflash={"target_layer_ids": [1, 2, 3, 4, 5]})), Cause.TAPS)


def test_slots_off_by_one(case: Case) -> None:
    blames(run(case.edited("demo", "draft", shift_slots)), Cause.SLOTS)


def test_template_missing(case: Case) -> None:
    """Its users write ¶ where the pair knows line ends; only the template makes them of it."""
    bundle = case.pair("demo", tokenizer={"chat_template": TEMPLATES["lines"]})
    questions = [text.replace("\n", BREAK) for text in own_prompts()[:12]]
    blames(run(bundle, questions, Serving(Form(raw=True), max_tokens=96)), Cause.TEMPLATE)
    good = run(bundle, questions).verdict
    assert good.kind is VerdictKind.HEALTHY, good.to_json()


def test_thinking_flipped(case: Case) -> None:
    bundle = case.pair("demo", tokenizer={"chat_template": TEMPLATES["thinking"]})
    questions = own_prompts()[:12]
    blames(run(bundle, questions, Serving(Form(thinking=True), max_tokens=96)), Cause.THINKING)
    good = run(bundle, questions, Serving(Form(thinking=False), max_tokens=96)).verdict
    assert good.kind is VerdictKind.HEALTHY, good.to_json()


@pytest.mark.parametrize("name", ["demo", "gpt-oss"])
def test_wrong_mask_token(name: str, case: Case) -> None:
    blames(run(case.pair(name, dflash={"mask_token_id": 0})), Cause.MASK_TOKEN)


def test_wrong_rope_base(case: Case) -> None:
    blames(run(case.pair("demo", draft={"rope_theta": 1e6})), Cause.ROPE)


def long_questions() -> list[str]:
    """Prompts of some 1400 tokens: fragments of several documents, one after the other."""
    own = own_prompts()
    return ["\n".join([*(own[(5 * i + j) % 32] for j in range(18)), own[i]]) for i in range(8)]


def test_sliding_layers_run_full(case: Case) -> None:
    """The draft knows distances of up to 1024 positions; a window keeps it to those."""
    options = {"target": LONG, "options": ["--max-seq-len", "4096"]}
    good = case.pair("gpt-oss", draft=LONG | SLIDING, **options)
    faulty = case.pair("gpt-oss", draft=LONG, **options)
    blames(run(faulty, long_questions()), Cause.WINDOW)
    assert run(good, long_questions()).verdict.kind is VerdictKind.HEALTHY


def test_context_cut(case: Case) -> None:
    blames(run(case.pair("demo", draft=CUT)), Cause.CONTEXT)


@pytest.mark.parametrize(("name", "other"), [("demo", "gpt-oss"), ("gpt-oss", "demo")])
def test_draft_of_another_training(name: str, other: str, case: Case) -> None:
    blames(run(case.pair(name, draft_weights=other)), Cause.DRAFT_WEIGHTS)


def test_quantised_features(case: Case) -> None:
    """The target's linears in 3 bits, the draft as it was trained."""
    rounded = case.pair("demo", target_bits=3)
    blames(run(rounded, twin=case.pair("demo")), Cause.QUANTISED_TARGET)


def test_tokens_of_another_language(case: Case) -> None:
    """Told by its set."""
    bundle, texts = case.pair("demo"), [*own_prompts()[:8], *CHINESE]
    answers = [
        replace(answer, set_name="own" if number < 8 else "chinese")
        for number, answer in enumerate(answer_questions(bundle, texts, SERVICE, SilentProgress()))
    ]
    sets = diagnose(bundle, answers, SERVICE, SilentProgress(), questions=texts)
    blames(sets, Cause.DATA, VerdictKind.DATA)
    assert sets.verdict.findings[0].evidence.startswith("chinese")


def new_documents() -> list[str]:
    """Beginnings of documents that neither training nor the shipped prompts had."""
    return [text[:200] for text in documents(7, HELD_OUT_STREAM, 16)]


HEALTHY: dict[str, tuple[str, dict[str, Any], Any]] = {
    "demo, first prompts": ("demo", {}, lambda: own_prompts()[:16]),
    "demo, new documents": ("demo", {}, new_documents),
    "demo, paged": ("demo", {"options": ["--kv-layout", "paged"]}, lambda: own_prompts()[8:20]),
    "gpt-oss, first prompts": ("gpt-oss", {}, lambda: own_prompts()[:16]),
    "gpt-oss, new documents": ("gpt-oss", {}, new_documents),
    "demo, FP8": ("demo", {"options": ["--precision", "fp8"]}, lambda: own_prompts()[:16]),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_pairs_are_not_blamed(name: str, case: Case) -> None:
    pair, changes, texts = HEALTHY[name]
    verdict = run(case.pair(pair, **changes), texts()).verdict
    assert verdict.kind is VerdictKind.HEALTHY and not verdict.findings, verdict.to_json()
