"""The table of inputs and outputs, where a call or an engine fixes its axes."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_trt.graph.bindings import GraphName, cache_output
from dflash_trt.graph.form import CacheDtype, GraphForm, Precision
from dflash_trt.graph.tensors import CacheLayout, CacheShape, Role, graph_tensors

LAYOUT = CacheLayout((CacheShape(2, 24), CacheShape(1, 16)), (CacheShape(4, 8),))
ENGINE = GraphForm(
    Precision.FLOAT16, 100, page_size=16, pages=9, draws=True, cache_dtype=CacheDtype.FP8
)


def test_axes_that_a_form_leaves_open_are_a_calls() -> None:
    tensors = graph_tensors("target_only", GraphForm(), LAYOUT, 50)
    axes = {"B": 3, "S": 8, "R": 2, "M": 128}
    assert {tensor.name: tensor.sized(axes) for tensor in tensors if tensor.is_input} == {
        "token_ids": (3, 8),
        "cache_start": (3,),
        "logit_rows": (3, 2),
        "target_k_0": (3, 2, 128, 24),
        "target_v_0": (3, 2, 128, 24),
        "target_k_1": (3, 1, 128, 16),
        "target_v_1": (3, 1, 128, 16),
    }
    assert tensors[-1].sized({"M": 128}) == (-1, 1, 128, 16)


def test_a_form_fixes_what_an_engine_fixes() -> None:
    tensors = {tensor.name: tensor for tensor in graph_tensors("target", ENGINE, LAYOUT, 50)}
    assert tensors["page_table"].sized({}) == (-1, 7)
    assert tensors["draft_k_0"].sized({}) == tensors["draft_k_0_out"].sized({}) == (10, 16, 4, 8)
    assert tensors["page_table"].dtype == tensors["accepted"].dtype == np.int32
    assert tensors["sampling"].dtype == tensors["new_start"].dtype == np.int64
    assert tensors["logits"].dtype == np.float32


@pytest.mark.parametrize("graph", ["target", "draft", "target_only"])
def test_every_cache_has_one_output_in_its_memory(graph: GraphName) -> None:
    tensors = graph_tensors(graph, ENGINE, LAYOUT, 50)
    caches = [tensor.name for tensor in tensors if tensor.role is Role.CACHE]
    assert caches == list(LAYOUT.of(graph))
    updated = {one.updates: one.name for one in tensors if one.role is Role.UPDATED_CACHE}
    assert list(updated.items()) == [(name, cache_output(name)) for name in LAYOUT.of(graph)]
    assert all(one.updates is None for one in tensors if one.role is not Role.UPDATED_CACHE)


def test_candidates_are_told_by_devices_that_do_not_draw() -> None:
    def names(form: GraphForm, has_candidates: bool | None = None) -> set[str]:
        tensors = graph_tensors("target", form, LAYOUT, 50, has_candidates=has_candidates)
        return {tensor.name for tensor in tensors if tensor.role is Role.OUTPUT}

    candidates = {"candidate_ids", "candidate_logits"}
    settled = {"accepted", "new_tokens", "new_start", "next_block_ids"}
    plain = names(GraphForm())
    assert names(GraphForm(Precision.BFLOAT16)) == plain | candidates
    assert names(GraphForm(), has_candidates=True) == plain | candidates
    assert names(ENGINE) == plain | settled
