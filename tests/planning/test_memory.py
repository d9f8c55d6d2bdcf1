"""Memory: figures worked out by hand, and laws that hold for any layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.building.build import BuiltBundle, build
from dflash_trt.building.on_gpu import _engine_bytes
from dflash_trt.building.spec import BuildSpec
from dflash_trt.bundle.manifest import BundleFile, EngineFile, EngineSet
from dflash_trt.bundle.memory.cache_bytes import (
    dense_draft_context_bytes,
    engine_cache_length,
    kv_bytes,
    planned_state_bytes,
)
from dflash_trt.bundle.memory.gpu_layout import ONE_GPU, GpuLayout
from dflash_trt.bundle.memory.memory import (
    RUNTIME_BYTES,
    Memory,
    bundle_memory,
    engine_memory,
    mask_bytes,
    split_scratch,
)
from dflash_trt.bundle.memory.served import fit_memory, plan_memory
from dflash_trt.bundle.memory.weight_bytes import (
    draft_weight_bytes,
    engine_weight_bytes,
    shape_weight_bytes,
    target_weight_bytes,
    vocab_bytes,
)
from dflash_trt.core.formats import Format
from dflash_trt.core.limits import Limits
from dflash_trt.core.progress import SilentProgress
from dflash_trt.deploy.planning.known_pairs import find_pair, pair_names
from dflash_trt.deploy.planning.read_shapes import read_pair_shape
from dflash_trt.graph.form import GraphForm, Precision
from dflash_trt.hardware.gpus import find_gpu, gpu_names
from dflash_trt.models.build_config import data_folder, load_config
from dflash_trt.models.draft import read_draft
from dflash_trt.models.target import read_target

PAIRS = st.sampled_from(pair_names()).map(find_pair)
GPUS = st.sampled_from(gpu_names()).map(find_gpu)


def test_gpt_oss_120b_by_hand() -> None:
    pair = find_pair("gpt-oss-120b")
    assert kv_bytes(pair.target.sizes, 1) == 36 * 2 * 8 * 64 * 2
    # Half of the layers hold a window of 128.
    assert kv_bytes(pair.target.sizes, 1000) == (18 * 128 + 18 * 1000) * 2 * 8 * 64 * 2
    assert kv_bytes(pair.draft.sizes, 1) == 16 * 1024
    # 65 sequences of 131,072 + 10 tokens, 16 KiB each.
    assert dense_draft_context_bytes(pair.draft, 64, 131072) == 65 * 131082 * 16 * 1024


def test_tensor_parallelism_splits_all_but_the_router() -> None:
    target = find_pair("gpt-oss-120b").target
    router = 36 * 2 * 2880 * 128
    whole = target_weight_bytes(target) - router
    assert target_weight_bytes(target, GpuLayout(8)) == pytest.approx(whole / 8 + router)


def test_expert_parallelism_splits_experts_alone() -> None:
    target = find_pair("gpt-oss-120b").target
    experts = 36 * 128 * target.mlp_weights * 4.25 / 8
    whole = target_weight_bytes(target)
    assert target_weight_bytes(target, GpuLayout(8, "data")) == pytest.approx(
        whole - experts * 7 / 8
    )


def test_kv_heads_are_copied_beyond_their_number() -> None:
    target = find_pair("qwen3-coder-30b-a3b").target
    assert target.sizes.layer.kv_heads == 4
    assert GpuLayout(8).kv_ways(target.sizes.layer) == 4
    by_eight = fit_memory(find_gpu("h200"), target, None, context=4096, layout=GpuLayout(8))
    by_four = fit_memory(find_gpu("h200"), target, None, context=4096, layout=GpuLayout(4))
    assert by_eight.target_kv == by_four.target_kv


@given(
    PAIRS, GPUS, st.integers(16, 100_000), st.integers(1, 100_000), st.sampled_from([1, 2, 4, 8])
)
def test_longer_contexts_never_hold_more_users(
    pair, gpu, context: int, more: int, size: int
) -> None:  # type: ignore[no-untyped-def]
    layout = GpuLayout(size)
    short, long = (
        fit_memory(gpu, pair.target, pair.draft, context=length, layout=layout, rows=8)
        for length in (context, context + more)
    )
    assert long.users <= short.users
    for fit in (short, long):
        assert fit.users == 0 or fit.total <= gpu.memory_bytes


@given(PAIRS, GPUS, st.integers(16, 100_000))
def test_a_draft_costs_users(pair, gpu, context: int) -> None:  # type: ignore[no-untyped-def]
    alone = fit_memory(gpu, pair.target, None, context=context)
    drafted = fit_memory(gpu, pair.target, pair.draft, context=context)
    assert drafted.users <= alone.users
    assert drafted.draft_weights == draft_weight_bytes(pair.draft)


@pytest.mark.parametrize("folder", ["", "gpt_oss"])
def test_engines_weigh_by_shape_what_they_weigh_by_their_tensors(folder: str) -> None:
    """Norms and biases apart."""
    root = data_folder("demo_pair")
    target, draft = root / folder / "target", root / folder / "draft"
    tensors = [read_target(target).weights, read_draft(draft).weights]
    shape = read_pair_shape(target, draft)
    own_head = vocab_bytes(shape.target, ONE_GPU)
    stored = sum(engine_weight_bytes(weights, 2, {}) for weights in tensors) + own_head
    assert 0.97 * stored < sum(shape_weight_bytes(shape.target, shape.draft)) <= stored


def test_what_a_gpu_does_not_multiply_becomes_bf16() -> None:
    native = {
        gpu: [form for form in Format if find_gpu(gpu).multiplies(form)]
        for gpu in ("a100", "h100", "b200")
    }
    assert native == {"a100": ["bf16"], "h100": ["bf16", "fp8"], "b200": list(Format)}
    for gpu in map(find_gpu, native):
        for form in Format:
            expected = form.math if form in native[gpu.name] else "bf16"
            assert gpu.math(form) == expected and gpu.flops(form) == getattr(gpu, expected)


@pytest.mark.parametrize("name", pair_names())
def test_plans_deployments_and_targets_count_the_same_bytes(name: str) -> None:
    pair, gpu, config = find_pair(name), find_gpu("b300"), load_config(name)[0]
    target, draft = pair.target, pair.draft
    block = config.block_size or draft.block_size
    form = GraphForm(Precision.BFLOAT16, replay=block if target.sizes.has_state else None)
    limits = Limits(2, config.max_seq_len, block, config.prefill_chunk)
    took = _engines(target, draft, limits, form)
    assert took.total == _engine_bytes(config, pair, 2, None, plugins=False)  # `targets`
    fit = fit_memory(gpu, target, draft, context=4096, layout=GpuLayout(8))
    budget = plan_memory(
        target,
        draft,
        gpu,
        GpuLayout(8),
        kv_item_bytes=2,
        page_tokens=None,
        max_batch=1,
        max_seq_len=4096,
        max_draft_len=block - 1,
        where=name,
    )
    assert (budget.weights, budget.workspace) == (fit.weights, RUNTIME_BYTES)
    assert budget.target_kv == int(kv_bytes(target.sizes, 4096, GpuLayout(8)))
    assert max(budget.total, fit.total) <= gpu.memory_bytes
    tokens = [kv_bytes(one.sizes, 1) for one in (target, draft)]
    if target.sizes.needs_sink_room:  # TensorRT's own attention has eight elements more for them
        tokens[0] *= 1 + 8 / target.sizes.layer.head_dim
    positions = 2 * engine_cache_length(limits, target.sizes, form)
    assert (took.target_cache, took.draft_cache) == tuple(positions * one for one in tokens)
    assert took.states >= planned_state_bytes(target.sizes)
    if target.mlp_format is Format.BF16:
        whole = fit_memory(gpu, target, draft, context=4096)
        assert took.weights == int(whole.target_weights) + int(
            whole.draft_weights + vocab_bytes(target)
        )


def _engines(target: Any, draft: Any, limits: Limits, form: GraphForm) -> Memory:
    sizes, weights = (target.sizes, draft.sizes), shape_weight_bytes(target, draft)
    return engine_memory(*sizes, weights, target.vocab_size, limits, form)


@pytest.mark.parametrize(
    ("name", "kinds", "with_plugins"), [("qwen3-8b", 1, 0), ("gpt-oss-20b", 2, 2)]
)
def test_masks_take_a_byte_for_a_row_and_a_position(
    name: str, kinds: int, with_plugins: int
) -> None:
    """One mask for all layers of a kind; by kernels none, but for layers with sinks."""
    pair, limits = find_pair(name), Limits(2, 4096, 8, 512)
    sizes, form = (pair.target.sizes, pair.draft.sizes), GraphForm(Precision.BFLOAT16)
    assert mask_bytes(*sizes, limits, form, 4112) == kinds * 512 * 4112
    assert mask_bytes(*sizes, replace(limits, max_batch=100), form, 4112) == kinds * 800 * 4112
    by_kernels = replace(form, draws=True)
    assert mask_bytes(*sizes, limits, by_kernels, 4112) == with_plugins * 512 * 4112
    assert mask_bytes(*sizes, limits, replace(form, page_size=16), 4112) == 0
    took = [
        _engines(pair.target, pair.draft, replace(limits, max_seq_len=length), form).workspace
        for length in (4096, 8192)
    ]
    assert took[1] - took[0] == kinds * 512 * 4096


def test_a_bundle_of_engines_counts_what_its_build_did(tmp_path: Path) -> None:
    """`inspect` and what `build` prints, of the manifest; what `build` refuses, of the pair."""
    built = build(BuildSpec(target="demo", output=tmp_path / "b"), SilentProgress())
    assert isinstance(built, BuiltBundle)
    manifest, root = built.manifest, data_folder("demo_pair")
    shape = read_pair_shape(root / "target", root / "draft")
    form = GraphForm(Precision.BFLOAT16)
    took = _engines(shape.target, shape.draft, manifest.limits, form)
    weights = {"target": int(took.target_weights), "draft": int(took.draft_weights)}
    engines = EngineSet(
        arch="sm_120",
        library_version="1",
        cache_length=engine_cache_length(manifest.limits, shape.target.sizes, form),
        files=[
            EngineFile(
                graph=graph, path=graph, summary="s", layers=1, fused_attentions=0, cache_updates=0
            )
            for graph in ("target", "draft")
        ],
    )
    files = [BundleFile(path=name, bytes=size) for name, size in weights.items()]
    changes = {"files": files, "engines": engines, "compute_dtype": "bfloat16"}
    assert bundle_memory(manifest.model_copy(update=changes)) == took


@pytest.mark.parametrize("folder", ["", "gpt_oss"])
def test_a_checkpoint_counts_as_its_config_does(folder: str) -> None:
    """What a build reads is itself a shape."""
    root = data_folder("demo_pair") / folder
    target, draft = read_target(root / "target"), read_draft(root / "draft")
    shape = read_pair_shape(root / "target", root / "draft")
    assert target_weight_bytes(target) == target_weight_bytes(shape.target)
    assert draft_weight_bytes(draft) == draft_weight_bytes(shape.draft)
    assert shape_weight_bytes(target, draft) == shape_weight_bytes(shape.target, shape.draft)
    assert target.sizes.layers == shape.target.sizes.layers
    assert draft.sizes == shape.draft.sizes


def test_a_chains_steps_share_a_mask_and_have_no_kernel() -> None:
    """Its caches have room for a sink, so its attention stays TensorRT's with plugins too."""
    folder = data_folder("demo_pair/trio/eagle3")
    pair, limits = find_pair("qwen3-8b"), Limits(50, 4096, 8, 64)
    draft, form = read_draft(folder).sizes, GraphForm(Precision.BFLOAT16, draws=True)
    assert draft.features and mask_bytes(pair.target.sizes, draft, limits, form, 4112) == 100 * 4112
    target = split_scratch(pair.target.sizes, pair.target.sizes, limits, form, 4112)
    assert split_scratch(pair.target.sizes, draft, limits, form, 4112) == target
