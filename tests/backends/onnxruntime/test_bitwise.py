"""A row's logits depend on its tokens and position only, bit for bit, in linear and paged caches.

The baseline is always `target_only` fed one row at a time, in slot 0 of linear caches of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from dflash_trt.backends.base import Scores, TargetCall, TargetGraph
from dflash_trt.backends.onnxruntime import caches
from dflash_trt.backends.onnxruntime.executor import OnnxRuntimeExecutor
from dflash_trt.building import bundle_writer
from dflash_trt.building.spec import BuildSpec
from dflash_trt.graph.bindings import Owner
from dflash_trt.graph.model_builder import ModelBuilder
from tests.backends.steps import (
    SLIDING,
    Baseline,
    begin,
    bind_shuffled,
    decode_plainly,
    forward_rows,
    poison,
    random_ids,
    run_chunks,
    speculate_until,
)
from tests.covering import exhaustive
from tests.inspection import arrays, cache_length, pools
from tests.pairs import PairFactory, TinyPair, bundle_pair
from tests.reference.compare import assert_bitwise_equal

SLOTS = 8
PAGED_LENGTH = 384
PROMPT = 140  # past the first cache length of 128
GRAPHS: tuple[TargetGraph, ...] = ("target", "target_only")
CHUNKINGS = ((3,), (1,), (PROMPT,), (8,), (127, 2), (16,), (129,), (7, 1, 64, 2, 33, 1), (2,))
PAIRS: dict[str, dict[str, Any]] = {
    "qwen3": {
        "target": {"vocab": 64, "num_layers": 4},
        "draft": SLIDING,
        "fit_steps": 60,
    },
    "llama_bf16": {
        "family": "llama",
        "target": {
            "vocab": 97,
            "num_layers": 4,
            "hidden": 72,
            "kv_heads": 1,
            "head_dim": 40,
            "intermediate": 100,
            "dtype": "bfloat16",
            "tie": True,
            "attention_bias": True,
            "rope": "llama3",
        },
        "draft": {"dtype": "bfloat16", "rope": "llama3", "block_size": 16},
        "fit_steps": 60,
    },
    "qwen3_fp16_wide_heads": {
        "target": {
            "vocab": 300,
            "num_layers": 4,
            "hidden": 128,
            "heads": 4,
            "kv_heads": 4,
            "head_dim": 128,
            "intermediate": 257,
            "dtype": "float16",
        },
        "draft": {"heads": 2, "kv_heads": 2, "head_dim": 64},
    },
    "qwen3_nvfp4": {
        "target": {"vocab": 112, "num_layers": 2, "dtype": "bfloat16"},
        "draft": {**SLIDING, "target_layer_ids": [0, 1, 1]},
        "quantize": {
            "target": {"algorithm": "NVFP4", "exclude": ["model.embed_tokens"]},
            "draft": {"algorithm": "NVFP4", "exclude": []},
        },
    },
    "qwen3_int8": {
        "target": {"vocab": 112, "num_layers": 2, "dtype": "bfloat16", "intermediate": 96},
        "draft": {**SLIDING, "target_layer_ids": [0, 1, 1]},
        "int8": ["target", "draft"],
    },
    "gpt_oss": {
        "family": "gpt_oss",
        "target": {
            "vocab": 97,
            "num_layers": 2,
            "hidden": 96,
            "head_dim": 40,
            "intermediate": 352,
            "rope": "yarn",
            "mxfp4": True,
        },
        "draft": {"target_layer_ids": [0, 1]},
    },
    "qwen3_moe": {
        "family": "qwen3_moe",
        "target": {"vocab": 97, "num_layers": 2, "hidden": 168, "intermediate": 50, "experts": 5},
        "draft": {"target_layer_ids": [0, 1]},
    },
}


DAILY_PAIRS = {"qwen3", "qwen3_nvfp4", "qwen3_int8", "gpt_oss"}


@pytest.fixture(
    scope="module",
    params=[name if name in DAILY_PAIRS else exhaustive(name) for name in PAIRS],
)
def pair_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def built(pair_name: str, make_pair: PairFactory) -> TinyPair:
    return make_pair(**PAIRS[pair_name], max_batch=SLOTS, max_seq_len=1024)


@pytest.fixture(scope="module")
def baseline(built: TinyPair) -> Baseline:
    ids = random_ids(built.pair.target.vocab_size, PROMPT)
    logits = run_chunks(built.open(), ids.tolist(), (1,), graph="target_only")
    return Baseline(ids, logits)


@pytest.fixture
def linear(built: TinyPair) -> Iterator[OnnxRuntimeExecutor]:
    """One thread for one pair, two for the others; the baseline always has one."""
    opened = built.open(1 if built.pair.target.vocab_size == 64 else 2)
    yield opened
    opened.close()


@pytest.fixture(params=["linear", 8, 64], ids=lambda size: f"{size} pages")
def executor(
    request: pytest.FixtureRequest,
    pair_name: str,
    linear: OnnxRuntimeExecutor,
    make_pair: PairFactory,
) -> Iterator[OnnxRuntimeExecutor]:
    """Linear caches, or pages in no order, which all start with NaN in every row."""
    if request.param == "linear":
        yield linear
        return
    paging = {"page_size": request.param}
    limits = {"max_batch": SLOTS, "max_seq_len": PAGED_LENGTH}
    opened = make_pair(**PAIRS[pair_name], **limits, paging=paging).open()
    poison(opened)
    bind_shuffled(opened)
    yield opened
    opened.close()


@pytest.mark.covering(1)
def test_logits_do_not_depend_on_rows_per_call_or_chunking(
    executor: OnnxRuntimeExecutor, baseline: Baseline
) -> None:
    for number, sizes in enumerate(CHUNKINGS):
        graph = GRAPHS[number % 2]
        logits = run_chunks(executor, baseline.ids.tolist(), sizes, graph=graph, slot=2)
        assert_bitwise_equal(logits, baseline.logits, f"{graph} in chunks {sizes}")


@pytest.mark.covering(1)
def test_logits_do_not_depend_on_batch_or_neighbours(
    executor: OnnxRuntimeExecutor, baseline: Baseline
) -> None:
    for number, (batch, rows) in enumerate(((1, 4), (3, 1), (8, 8), (8, 1))):
        starts = [(29 * slot + 5) % 250 for slot in range(batch)]
        baseline.check_among_others(executor, starts, rows, GRAPHS[number % 2])


def test_logits_do_not_depend_on_growth_and_shrinking(
    linear: OnnxRuntimeExecutor, baseline: Baseline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caches, "SPARE_CALLS", 0)
    lengths = []
    parts = []
    other = baseline.others(3).tolist()
    for start in range(0, PROMPT, 10):
        # A neighbour comes and goes, so that M moves under the sequence in slot 0.
        held = (0, 130, 300, 600, 0, 0, 250)[start // 10 % 7]
        if held:
            run_chunks(linear, (other * 5)[:held], (64,), slot=1, graph="target_only")
        else:
            linear.release_slots(1)
        chunk = baseline.ids[start : start + 10].tolist()
        parts.append(run_chunks(linear, chunk, (10,), start=start))
        lengths.append(cache_length(linear))
    assert {128, 256, 512, 1024} == {*lengths} and 128 in lengths[lengths.index(1024) :]
    assert_bitwise_equal(np.concatenate(parts), baseline.logits, "while M moves")


@pytest.mark.covering(1)
def test_logits_do_not_depend_on_what_an_earlier_sequence_left(
    executor: OnnxRuntimeExecutor, baseline: Baseline
) -> None:
    """Large numbers in linear caches; NaN in the very pages that the slot is bound to again."""
    run_chunks(executor, baseline.others(9).tolist(), (64,), slot=2)
    if executor.limits.page_pool is None:
        generator = np.random.default_rng(0)
        for array in arrays(executor).values():
            array[2] += 1e4 * generator.standard_normal(array[2].shape).astype(np.float32)
    else:
        poison(executor)
        executor.bind_pages(2, [])
        bind_shuffled(executor)
    logits = run_chunks(executor, baseline.ids.tolist(), (33, 1, 8), slot=2)
    assert_bitwise_equal(logits, baseline.logits, "reused slot")


@pytest.mark.covering(1)
def test_logits_do_not_depend_on_a_move_to_another_slot(
    executor: OnnxRuntimeExecutor, baseline: Baseline
) -> None:
    ids = baseline.ids.tolist()
    run_chunks(executor, baseline.others(4).tolist(), (64,), slot=1)
    first = run_chunks(executor, ids[:90], (64,), slot=5)
    is_paged = executor.limits.page_pool is not None
    before = {name: pool.copy() for name, pool in pools(executor).items()} if is_paged else {}
    executor.move_slot(5, 1, 90)
    executor.release_slots(2)
    for name, copy in before.items():
        assert_bitwise_equal(pools(executor)[name], copy, f"{name}: pages move, rows do not")
    if is_paged:
        with pytest.raises(ValueError, match="slot 5 has pages for 0 positions, not 1"):
            forward_rows(executor, [[1]], [0], first_slot=5)
    else:
        run_chunks(executor, baseline.others(5).tolist(), (64,), slot=5)
    rest = run_chunks(executor, ids[90:], (8,), slot=1, start=90)
    assert_bitwise_equal(np.concatenate([first, rest]), baseline.logits, "moved")


def test_a_rows_logits_do_not_depend_on_which_rows_are_picked(
    linear: OnnxRuntimeExecutor, baseline: Baseline
) -> None:
    """Of two sequences each its own, in any order, some twice."""
    ids, starts = np.tile(baseline.ids[:40], (2, 1)), np.zeros(2, np.int64)
    for rows, graph in product(([39], [0, 39], [5, 5, 7], list(range(0, 40, 3))), GRAPHS):
        picked = np.array([rows, [39 - row for row in rows]])
        logits = linear.forward(TargetCall(graph, 0, ids, starts, picked, Scores.LOGITS)).logits
        assert_bitwise_equal(logits, baseline.logits[picked], f"{graph}, rows {rows}")


def test_the_drafts_context_does_not_depend_on_chunking_batch_or_slot(
    linear: OnnxRuntimeExecutor, built: TinyPair, baseline: Baseline
) -> None:
    """So the drafter proposes the same whatever the schedule was."""
    ids = baseline.ids.tolist()
    whole = built.open()
    run_chunks(whole, ids, (PROMPT,))
    run_chunks(linear, ids, (1, 7, 50, 1), slot=3)
    for start in range(0, PROMPT, 20):
        rows = np.stack([baseline.others(1), baseline.ids, baseline.others(2)])
        forward_rows(linear, rows[:, start : start + 20], [start] * 3, first_slot=4)
    for name, expected in arrays(whole).items():
        for slot in (3, 5):
            got = arrays(linear)[name][slot, :, :PROMPT]
            assert_bitwise_equal(got, expected[0, :, :PROMPT], f"{name} of slot {slot}")


@pytest.mark.covering(1)
@pytest.mark.parametrize("batch", [1, 8])
def test_speculative_logits_and_tokens_equal_the_baselines(
    executor: OnnxRuntimeExecutor, built: TinyPair, batch: int
) -> None:
    """Ragged prompts, odd chunks, every block size in turn; linear caches bring equal drafts."""
    vocab, tokens = built.pair.target.vocab_size, 40
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8]]
    prompts += [random_ids(vocab, 5 + 17 * b, seed=b).tolist() for b in range(batch)]
    blocks, chunks = range(2, built.pair.draft.block_size + 1), ((3, 8, 1), (50,), (1,))
    plain = built.open()
    runs = []
    for opened in (executor, plain):
        sequences = [begin(opened, prompts[b], b, chunks[b % 3]) for b in range(batch)]
        speculate_until(opened, sequences, tokens, blocks)
        runs.append(sequences)
    for b, (sequence, other) in enumerate(zip(*runs, strict=True)):
        assert sequence.accepted == other.accepted
        output, logits = decode_plainly(plain, prompts[b], len(sequence.output))
        assert sequence.output == output, f"sequence {b}"
        assert_bitwise_equal(np.stack(sequence.logits), logits, f"sequence {b} of {batch}")
    if vocab == 64:  # its draft is fitted to the first prompt: else no draft would be committed
        assert len(set(runs[0][0].accepted)) >= 3
        assert max(runs[0][0].accepted) >= 3


INT8_PAIRS: dict[str, dict[str, Any]] = {
    "qwen2": {"family": "qwen2", "target": {"dtype": "bfloat16"}},
    "hybrid": {"family": "qwen3_5", "target": {"head_dim": 32}, "draft": SLIDING},
    "one KV head": {"target": {"kv_heads": 1}, "draft": {"heads": 2, "kv_heads": 2}},
}


@pytest.mark.parametrize("name", ["qwen2", *map(exhaustive, ("hybrid", "one KV head"))])
def test_int8_products_and_heads_taken_together_keep_every_bit(
    name: str, make_pair: PairFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One product of q, k and v, one of gate and up; the queries of a KV head as rows of one."""
    owners: tuple[Owner, ...] = ("target", "draft")
    together = make_pair(**INT8_PAIRS[name], int8=owners)
    model = onnx.load(together.bundle.folder / "target.onnx", load_external_data=False)
    stacks = {one.name.split(".")[-2] for one in model.graph.initializer if "+" in one.name}
    wanted = {"q_proj+k_proj+v_proj", "gate_proj+up_proj", "k_proj+v_proj"}
    wanted |= {"in_proj_qkv+in_proj_z"} if name == "hybrid" else set()
    assert stacks - {"rows"} == wanted
    assert any("_by_" in node.overload for node in model.graph.node)
    known = {"", *(one.name for one in (*model.graph.input, *model.graph.initializer))}
    for node in model.graph.node:  # biases are cast before they are put together
        assert {*node.input} <= known, node.name
        known |= {*node.output}
    for owner in owners:
        (tmp_path / owner).symlink_to(together.folder / owner)
    monkeypatch.setattr(bundle_writer, "stack_products", lambda model: None)
    monkeypatch.setattr(ModelBuilder, "is_int8", False)
    apart = bundle_pair(tmp_path, BuildSpec(), owners)
    # Long, and by more threads than heads: products that share a head would add in another order.
    ids = random_ids(together.pair.target.vocab_size, 330)
    runs = []
    for pair, threads in ((together, 5), (apart, 1)):
        executor = pair.open(threads)
        logits = run_chunks(executor, ids.tolist(), (7, 1, 270, 9))
        sequences = [begin(executor, ids[:40].tolist(), 0, (40,))]
        speculate_until(executor, sequences, 12, (4,))
        runs.append((logits, sequences[0].accepted, np.stack(sequences[0].logits)))
    (logits, accepted, verified), (other, *rest) = runs
    assert_bitwise_equal(logits, other, "prompt")
    assert accepted == rest[0]
    assert_bitwise_equal(verified, rest[1], "steps")
