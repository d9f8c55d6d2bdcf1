"""How a layer's graph writes to its KV caches, in every layout and type that they have."""

from __future__ import annotations

from typing import Any

from dflash_trt.checkpoints.kv_scales import read_kv_scales
from dflash_trt.graph.bindings import KV, PAGE_TABLE, Owner, cache_input, cache_output
from dflash_trt.graph.decoder import Decoder
from dflash_trt.graph.form import GraphForm, Precision
from dflash_trt.graph.kv_cache_update import kv_cache_update_function
from dflash_trt.graph.model import GraphBuilder


def update_caches(
    b: GraphBuilder,
    owner: Owner,
    spec: Decoder,
    layer: int,
    kv: tuple[str, str],
    start: str,
    positions: str,
) -> tuple[str, str]:
    """Writes K and V rows [B,kv heads,S,D] at their positions; returns the caches after.

    start [B] is where they begin, positions [B,S] where each is.
    """
    if not b.form.is_paged and not b.form.is_fp8:
        k, v = (
            b.node(
                "TensorScatter",
                [cache_input(owner, kind, layer), value, start],
                f"{kind}_cache_update",
                output=cache_output(cache_input(owner, kind, layer)),
                axis=2,
            )
            for kind, value in zip(KV, kv, strict=True)
        )
        return k, v
    operands, outputs = cache_values(b, owner, spec, layer)
    k, v = b.call(
        kv_cache_update_function(b.form),
        [*kv, positions, *operands],
        "cache_update",
        outputs=outputs,
        **paging(b.form),
    )
    return k, v


def cache_values(
    b: GraphBuilder, owner: Owner, spec: Decoder, layer: int
) -> tuple[list[str], list[str]]:
    """Operands of what writes one layer's caches, from the page table on, and its outputs."""
    caches = [cache_input(owner, kind, layer) for kind in KV]
    operands = [PAGE_TABLE] * b.form.is_paged + caches
    if b.form.is_fp8:
        operands.append(kv_scales(b, owner, spec, layer))
    return operands, [cache_output(name) for name in caches]


def kv_scales(b: GraphBuilder, owner: Owner, spec: Decoder, layer: int) -> str:
    """float32 [2]: the scales of one layer's K and V."""
    scales = read_kv_scales(spec.checkpoint.tensors, spec.weights, spec.quantization, layer)
    return b.constant(f"{owner}_kv_scales_{layer}", [2], scales, Precision.FLOAT32)


def paging(form: GraphForm) -> dict[str, Any]:
    """The attribute of an operation that finds rows by the page table."""
    return {} if form.page_size is None else {"page_size": form.page_size}
