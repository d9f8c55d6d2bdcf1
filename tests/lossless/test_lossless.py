"""Rung 2: through the whole runtime, whoever drafts changes no bit of any logit and no token.

One table: drafters over every kind of cache, and families of targets over those they have. Linear
caches decode `target_only` alone; everything else says the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_trt.backends.base import Executor
from dflash_trt.backends.registry import open_executor
from dflash_trt.building.spec import BuildSpec
from dflash_trt.bundle.bundle import Bundle
from dflash_trt.decoding import Generator, GeneratorOptions, Request, SamplingParams, TokenLogprob
from dflash_trt.decoding.drafter_kinds import DFLASH, PROMPT_LOOKUP
from dflash_trt.decoding.drafters import NgramIndex
from dflash_trt.decoding.logprobs import score_token
from dflash_trt.decoding.replay import Answer, Replay
from dflash_trt.decoding.request import check_request
from dflash_trt.errors import DflashError
from dflash_trt.graph.bindings import Owner
from tests.covering import exhaustive
from tests.inspection import poison_all_free_pages
from tests.lossless.runs import (
    OUTPUT,
    assert_same,
    check_copied_prefix,
    check_groups,
    check_shared_prefix,
    count_tokens,
    make_requests,
    run,
    run_baseline,
    run_traffic,
    write_fitted_eagle,
    write_fitted_mtp,
)
from tests.pairs import FIT_PROMPTS, TWO_KINDS, PairFactory, bundle_pair
from tests.pairs import caches as cache_options
from tests.reference.deepspec import write_deepspec, write_speculators
from tests.reference.dflash2 import write_dflash2
from tests.standins.executor import FakeExecutor

VOCAB, SLOTS = 64, 8
SAMPLED = SamplingParams(temperature=0.8, top_k=20, top_p=0.95, seed=2**63 + 5)
LIMITS = {"max_seq_len": 192, "max_batch": SLOTS}
LAYERS: dict[str, Any] = {"vocab": VOCAB, "num_layers": 4}
DRAFT: dict[str, Any] = {**TWO_KINDS, "target_layer_ids": [0, 1, 3]}
FITTED = {"target": LAYERS, "draft": DRAFT, "fit_steps": 60}
CACHES = ("linear", "paged", "fp8", "fp8 paged")
CHAINS = ("DSpark", "EAGLE-3", "speculators")
DRAFTERS = ("DFlash", "prompt lookup", "DFlash 2", *CHAINS)

HYBRID = FITTED | {
    "target": LAYERS | {"head_dim": 32},
    "draft": DRAFT | {"block_size": 16},
}
# Windows of 24 and the draft's 40, and layers that see everything; chunks that windows have.
WINDOWED = FITTED | {"draft": DRAFT | {"sliding_window": 40}, "prefill_chunk": 16}
TIED = LAYERS | {"tie": True}
FEW_EXPERTS = {"experts": 4, "chosen": 2}
UNCHOSEN = ["lm_head", "mtp*", "*.experts.*"]
NVFP4 = {owner: {"algorithm": "NVFP4"} for owner in ("target", "draft")}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"} | FITTED,
    "qwen2": {"family": "qwen2"} | FITTED,
    "as many KV heads": FITTED | {"target": LAYERS | {"kv_heads": 4}},
    "mistral": {"family": "mistral"} | FITTED,
    "gemma3": {"family": "gemma3"} | FITTED,
    "gemma4": {"family": "gemma4"} | WINDOWED | {"target": TIED},
    "gemma4_moe": {"family": "gemma4_moe"}
    | WINDOWED
    | {"target": TIED | FEW_EXPERTS | {"dtype": "bfloat16"}},
    "gpt_oss": {"family": "gpt_oss"}
    | FITTED
    | {"target": LAYERS | FEW_EXPERTS | {"mxfp4": True, "rope": "yarn"}},
    "nvfp4": FITTED | {"quantize": NVFP4},
    # Scales of 0.01 in the target's checkpoint, which clip its largest keys; the draft's are 1.
    "scaled": FITTED | {"quantize": {"target": {"algorithm": "FP8", "kv_cache": True}}},
    "hybrid": {"family": "qwen3_5"} | HYBRID,
    "hybrid mixture": {"family": "qwen3_5_moe"} | HYBRID,
    "hybrid nvfp4": {"family": "qwen3_5"}
    | HYBRID
    | {"quantize": {"target": {"algorithm": "NVFP4", "exclude": ["lm_head", "mtp*"]}}},
    "hybrid mixture fp8": {"family": "qwen3_5_moe"}
    | HYBRID
    | {"quantize": {"target": {"algorithm": "FP8", "exclude": UNCHOSEN}}},
    "gemma4_moe fp8": {"family": "gemma4_moe"}
    | FITTED
    | {
        "target": TIED | {"experts": 4},
        "quantize": {"target": {"algorithm": "FP8", "exclude": UNCHOSEN}},
    },
}
WALKS = {"DFlash 2": {"family": "qwen3"} | FITTED, "hybrid DFlash 2": FAMILIES["hybrid"]}
"""Pairs whose fitted drafts get additions that are too small to forget what they know."""
OWN_LAYERS = {"MTP": FAMILIES["hybrid"], "mixture MTP": FAMILIES["hybrid mixture"]}
"""Targets that get a layer which is fitted to their own answers."""
INT8: tuple[Owner, ...] = ("target", "draft")
DAILY_FAMILIES = (
    ("gpt_oss", "fp8"),
    ("gemma4", "paged"),
    ("hybrid", "paged"),
    ("MTP", "paged"),
    ("gpt_oss", "int8 fp8"),
    ("hybrid", "int8 paged"),
    ("EAGLE-3", "int8"),
)
MORE_FAMILIES = (
    ("gemma4_moe", "int8 paged"),
    ("mixture MTP", "int8"),
    ("speculators", "int8 fp8 paged"),
    ("DFlash 2", "int8"),
    ("as many KV heads", "int8"),
    ("MTP", "linear"),
    ("llama", "linear"),
    ("qwen2", "linear"),
    ("mistral", "linear"),
    ("gemma3", "linear"),
    ("nvfp4", "linear"),
    ("gemma4_moe fp8", "linear"),
    ("hybrid", "linear"),
    ("gpt_oss", "paged"),
    ("gemma4_moe", "paged"),
    ("hybrid mixture", "paged"),
    ("hybrid nvfp4", "paged"),
    ("hybrid mixture fp8", "paged"),
    ("hybrid DFlash 2", "paged"),
    ("mixture MTP", "paged"),
    ("scaled", "fp8 paged"),
)
PAGES = {"gemma4": 61, "gemma4_moe": 61}
"""Of a pool that holds one whole sequence and few of the eight that may run, where not 30."""

Make = Callable[[str], Bundle]


@dataclass(frozen=True, slots=True)
class Case:
    """A bundle, and the one with linear caches that says what is expected of it."""

    bundle: Bundle
    reference: Bundle
    drafter: str = DFLASH

    def open(self) -> tuple[Executor, Executor]:
        return tuple(open_executor(one, threads=1) for one in (self.bundle, self.reference))  # type: ignore[return-value]


def mixed_requests() -> list[Request]:
    """Greedy and drawn ones in turn; of the first two, drafts are accepted in runs."""
    fitted = [
        Request(prompt_ids=tuple(prompt), max_tokens=OUTPUT, ignore_eos=True)
        for prompt in FIT_PROMPTS
    ]
    requests = [*fitted, *make_requests(VOCAB, SLOTS - 2)]
    return [replace(one, sampling=SAMPLED) if at % 2 else one for at, one in enumerate(requests)]


def _family(make_pair: PairFactory, name: str, caches: str) -> Bundle:
    pair = {**LIMITS, **(FAMILIES[name] if name in FAMILIES else {"family": "qwen3"} | FITTED)}
    if "paged" in caches:
        pair["paging"] = {"page_size": 8, "pages": PAGES.get(name, 30)}
    if "fp8" in caches:
        pair["kv_dtype"] = "fp8"
    pair["int8"] = INT8 if "int8" in caches else ()
    return make_pair(**pair).bundle


@pytest.fixture(scope="module")
def chains(make_pair: PairFactory, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints whose chains know what followed what in the target's own answers."""
    base = make_pair("qwen3", {"vocab": VOCAB}, {"target_layer_ids": [1, 3]}, max_seq_len=192)
    followed = torch.zeros(VOCAB, VOCAB)
    for one in run_baseline(base.open(), make_requests(VOCAB, SLOTS)):
        for before, token in zip(one.token_ids, one.token_ids[1:], strict=False):
            followed[token, before] += 20
    folders = {name: tmp_path_factory.mktemp("chain") for name in CHAINS}
    markov, source = torch.eye(VOCAB), (base.folder / "draft", base.folder / "target")
    for name in ("DSpark", "speculators"):
        (folders[name] / "target").symlink_to(base.folder / "target")
    write_deepspec(folders["DSpark"] / "draft", *source, (markov, followed))
    # Some tokens, a head of its own, and a context that ends before the answers do.
    own: dict[str, Any] = {"tokens": range(3, VOCAB), "markov": (markov, followed[3:]), "ends": 48}
    write_speculators(folders["speculators"] / "draft", *source, kind="dspark", **own)
    write_fitted_eagle(folders["EAGLE-3"], base, (1, 2, 4), SLOTS)
    return folders


def _walk(make_pair: PairFactory, name: str) -> Path:
    fitted = make_pair(**WALKS[name], **LIMITS).folder
    folder = fitted / "walk"
    if not folder.exists():
        write_dflash2(folder / "draft", fitted / "draft", gain=0.1)
        (folder / "target").symlink_to(fitted / "target")
    return folder


def _own_layer(make_pair: PairFactory, name: str) -> Path:
    base = make_pair(**OWN_LAYERS[name], **LIMITS)
    folder = base.folder / "mtp"
    if not folder.exists():
        greedy = [replace(one, sampling=SamplingParams()) for one in mixed_requests()]
        write_fitted_mtp(folder, base, greedy)
    return folder


def _chain(folder: Path, caches: str) -> Bundle:
    place = folder / caches
    if not place.exists():
        place.mkdir()
        for owner in ("target", "draft"):
            (place / owner).symlink_to(folder / owner)
    paging = {"page_size": 8, "pages": 30} if "paged" in caches else None
    own = cache_options(paging, "fp8" if "fp8" in caches else "auto")
    int8 = INT8 if "int8" in caches else ()
    return bundle_pair(place, BuildSpec(overwrite=True, caches=own), int8, **LIMITS).bundle


@pytest.fixture
def make_case(make_pair: PairFactory, request: pytest.FixtureRequest) -> Callable[..., Case]:
    def make(name: str, caches: str) -> Case:
        build: Make = partial(_family, make_pair, name)
        if name in WALKS:
            build = partial(_chain, _walk(make_pair, name))
        elif name in OWN_LAYERS:
            build = partial(_chain, _own_layer(make_pair, name))
        elif name in CHAINS:
            build = partial(_chain, request.getfixturevalue("chains")[name])
        linear = caches.replace("paged", "").strip() or "linear"
        drafter = PROMPT_LOOKUP if name == "prompt lookup" else DFLASH
        return Case(build(caches), build(linear), drafter)

    return make


def check_case(case: Case, seed: int) -> None:
    """Alone and batched, drafted, adaptively or not at all, and in traffic that comes and goes."""
    executor, reference = case.open()
    requests = mixed_requests()
    expected = run_baseline(reference, requests)
    drafter = {"drafter": case.drafter}
    rng = random.Random(seed)
    for count, batch, options in (
        (4, 1, drafter),
        (SLOTS, SLOTS, {"block_size": rng.choice([3, 5]), "prefill_chunk": 5, **drafter}),
        (SLOTS, SLOTS, {"live": True, **drafter}),
        (4, 4, {"speculation": False, "prefill_chunk": 13}),
    ):
        check_groups(executor, requests[:count], expected[:count], batch, **options)
    settings = GeneratorOptions(record_logits=True, prefill_chunk=17, **drafter)  # type: ignore[arg-type]
    generator = Generator(executor, options=settings)
    is_paged = executor.limits.page_pool is not None

    def poison() -> None:
        if is_paged:
            poison_all_free_pages(generator, executor)

    results = run_traffic(generator, requests, expected, rng, before_step=poison)
    assert count_tokens(results) > 5 * OUTPUT
    assert bool(sum(one.statistics.preemptions or 0 for one in results)) is is_paged
    accepted = sum(one.statistics.accepted_tokens for one in results)
    assert accepted > 0, "drafts are taken"
    greedy = run_baseline(reference, [replace(requests[1], sampling=SamplingParams())])
    assert greedy[0].token_ids != expected[1].token_ids, "draws are not the greedy tokens"


@pytest.mark.covering(1)
@pytest.mark.parametrize("caches", CACHES)
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafters_keep_every_bit(make_case: Callable[..., Case], name: str, caches: str) -> None:
    check_case(make_case(name, caches), len(name) + len(caches))


@pytest.mark.parametrize(
    ("name", "caches"), [*DAILY_FAMILIES, *(exhaustive(*one) for one in MORE_FAMILIES)]
)
def test_families_keep_every_bit(make_case: Callable[..., Case], name: str, caches: str) -> None:
    check_case(make_case(name, caches), len(name) + len(caches))


@pytest.mark.parametrize(
    ("name", "caches"),
    [
        ("EAGLE-3", "paged"),
        ("gemma4", "paged"),
        ("hybrid", "paged"),
        ("MTP", "paged"),
        exhaustive("DFlash", "paged"),
        exhaustive("hybrid DFlash 2", "paged"),
        exhaustive("EAGLE-3", "fp8 paged"),
        exhaustive("gpt_oss", "fp8 paged"),
        exhaustive("hybrid mixture", "paged"),
        exhaustive("mixture MTP", "paged"),
    ],
)
def test_a_shared_prefix_changes_neither_bits_nor_acceptance(
    make_case: Callable[..., Case], name: str, caches: str
) -> None:
    """Prompts part right behind a page: its last row depends on no token behind it."""
    paged, linear = make_case(name, caches).open()
    chunk = {"prefill_chunk": 24} if "hybrid" in name or name in OWN_LAYERS else {}

    def poison(generator: Generator) -> None:
        poison_all_free_pages(generator, paged)

    check_shared_prefix(linear, paged, (1, 8, 9), poison, **chunk)


@pytest.mark.parametrize("name", ["DFlash", exhaustive("EAGLE-3")])
def test_a_prefix_is_copied_not_computed(make_case: Callable[..., Case], name: str) -> None:
    check_copied_prefix(make_case(name, "linear").open()[0])


@pytest.mark.parametrize("name", ["DFlash 2", "DSpark", "EAGLE-3", "MTP", "hybrid", "speculators"])
def test_a_replay_counts_what_the_loop_counted(make_case: Callable[..., Case], name: str) -> None:
    """`diagnose` and `train-draft` measure with it: chunks of a prompt, states in between."""
    case = make_case(name, "linear")
    asked = [replace(one, sampling=SamplingParams()) for one in mixed_requests()]
    found = run(open_executor(case.bundle, threads=1), asked)
    answers = [Answer(a.prompt_ids, b.token_ids) for a, b in zip(asked, found, strict=True)]
    with Replay(case.bundle) as replay:
        result = replay.measure(answers)
    counts = [one.statistics.acceptance_histogram for one in found]
    assert [one.acceptance_histogram for one in result.per_answer] == counts
    pairs = zip(result.table.rank, result.table.accepted, strict=True)
    taken = [int(rank) for ranks, accepted in pairs for rank in ranks[:accepted]]
    assert taken and set(taken) == {0}, "an accepted draft is the highest of its own logits"


def test_a_text_that_repeats_is_drafted_and_one_without_is_not(make_pair: PairFactory) -> None:
    executor = make_pair("qwen3", {"vocab": 64}, max_seq_len=192).open()
    generator = Generator(executor, options=GeneratorOptions(drafter=PROMPT_LOOKUP))
    (new,) = generator.generate([Request(prompt_ids=(5,), max_tokens=2, ignore_eos=True)])
    assert new.statistics.steps == 1 and new.statistics.drafted_tokens == 0
    prompt = [random.Random(1).randrange(2, 60) for _ in range(20)]
    (plain,) = generator.generate([Request(prompt_ids=tuple(prompt), max_tokens=2)])
    # The same prompt behind itself and its answer ends in an n-gram that was followed.
    ids = (*prompt, *plain.token_ids, *range(2, 60), *prompt)
    (again,) = generator.generate([Request(prompt_ids=ids, max_tokens=60, ignore_eos=True)])
    assert again.statistics.drafted_tokens > 0


def test_the_longest_and_latest_match_goes_on() -> None:
    index = NgramIndex()
    index.extend([1, 2, 3, 9, 2, 3, 8, 1, 2, 3])
    assert index.propose(3) == [9, 2, 3], "1 2 3 is longer than the later 2 3"
    index.extend([4, 5, 2, 3])
    assert index.propose(2) == [4, 5], "the latest of three"
    index.extend([7, 2, 3])
    assert index.propose(5) == [7, 2, 3, 7, 2], "what ends goes round"
    index.extend([6])
    assert index.propose(5) == []


PAGING = {"linear": None, "paged": {"page_size": 8, "pages": 24}}


def score_by_steps(executor: Executor, request: Request, top: int) -> tuple[TokenLogprob, ...]:
    """What each beginning of the prompt says of the token behind it."""
    ids, scores = request.prompt_ids, []
    for end in range(1, len(ids)):
        (result,) = run(executor, [replace(request, prompt_ids=ids[:end], max_tokens=1)])
        assert result.logits is not None
        scores.append(score_token(result.logits[0], ids[end], top))
    return tuple(scores)


@pytest.mark.parametrize("layout", [exhaustive("linear"), "paged"])
def test_they_are_those_of_single_tokens(layout: str, make_pair: PairFactory) -> None:
    built = make_pair(
        "qwen3", {"vocab": 64}, fit_steps=60, max_batch=8, max_seq_len=192, paging=PAGING[layout]
    )
    executor = open_executor(built.bundle, threads=1)
    plain = make_requests(64, 5)
    plain.append(plain[2])  # the same 90 tokens again, by then cached by another
    asked = [replace(one, prompt_logprobs=3 if at else None) for at, one in enumerate(plain)]
    expected, new = run(executor, plain), run(executor, asked, prefill_chunk=64)
    for want, got in zip(expected, new, strict=True):
        assert_same(want, got, "a scored prompt")
    assert new[0].prompt_logprobs is None and new[1].prompt_logprobs is not None
    assert new[5].prompt_logprobs == new[2].prompt_logprobs == score_by_steps(executor, plain[2], 3)
    if layout == "paged":  # some were preempted and computed again
        lost = [one.statistics.preemptions or 0 for one in new]
        assert sum(lost) > 0 and [len(one.token_ids) for one in new] == [OUTPUT] * 6


def test_engines_refuse_them() -> None:
    limits = replace(FakeExecutor().limits, takes_any_chunk=False)
    with pytest.raises(DflashError, match="prompt_logprobs: engines hand out the logits of a"):
        check_request(Request(prompt_ids=(3, 4), prompt_logprobs=0), limits, True)
