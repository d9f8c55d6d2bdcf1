"""What a build computes and stores beside the weights: RoPE tables, rows of a draft's head."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dflash_trt.core.arrays import FloatArray
from dflash_trt.graph.bindings import Owner
from dflash_trt.graph.model import GraphBuilder
from dflash_trt.models.decoder import DecoderSpec
from dflash_trt.models.draft import DraftSpec
from dflash_trt.models.pair_check import Pair
from dflash_trt.models.rope import Proportional, RopeSpec, tables
from dflash_trt.models.safetensors_header import TensorEntry
from dflash_trt.models.sizes import LayerSizes
from dflash_trt.models.target import UNSCALED, TargetSpec

TABLE_KINDS = ("cos", "sin", "q_cos", "q_sin")
LOCAL = "local"
MAX_STORED_SCALED = 1 << 16
"""Positions beyond which a graph scales the tables itself, which halves a bundle's own bytes."""

HEAD_ROWS, HEAD_TOKENS = "draft_head.rows", "draft_head.token_ids"
_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def compute_tables(
    target: TargetSpec, draft: DraftSpec | None, positions: int
) -> dict[str, FloatArray]:
    """Every table that the graphs need, [positions, D/2] float32, by name.

    `q_cos` and `q_sin` are `cos` and `sin` times 1/sqrt(D), so that rotating a query also scales
    it for attention. Tables of more than `MAX_STORED_SCALED` positions have none, those of a part
    of each head, which cannot scale the rest, and those of queries that nothing scales. Of the
    latter columns that do not turn are not stored either: a graph adds them (cos 1, sin 0).
    """
    computed = _compute("target", target, target.rope, target.sizes.full_layer, positions)
    if draft is not None and draft_tables(target, draft) == "draft":
        computed |= _compute("draft", draft, draft.rope, draft.sizes.layer, positions)
    if target.local_rope is not None:
        slides = target.sizes.layer
        computed |= _compute(f"target.{LOCAL}", target, target.local_rope, slides, positions)
    return computed


def draft_head(pair: Pair) -> dict[str, NDArray[Any]]:
    """Rows [K,H] of the target's head and the tokens [K] that a draft chooses among; empty for all.

    A head of the draft's own has its rows in the draft's checkpoint.
    """
    ids, entry = pair.draft_token_ids, pair.head
    if ids is None:
        return {}
    if pair.has_own_head:
        return {HEAD_TOKENS: np.array(ids, np.int64)}
    head = np.memmap(entry.file, _DTYPES[entry.dtype], "r", entry.offset, entry.shape)
    chosen = np.array(ids, np.int64)
    return {HEAD_ROWS: np.array(head[chosen]), HEAD_TOKENS: chosen}


def draft_tables(target: TargetSpec, draft: DraftSpec) -> Owner:
    """Whose tables the draft reads: the target's where both would be equal."""
    return "target" if _rope(draft) == _rope(target) else "draft"


@dataclass(frozen=True, slots=True)
class RopeTables:
    """The stored tables of one owner, as graph values on demand."""

    owner: str
    entries: Mapping[str, TensorEntry]
    query_scale: float | None = None
    still: int = 0
    """Columns that are not stored."""

    def local(self) -> RopeTables:
        """Those of layers with a window, of a model that has others for them."""
        return replace(self, owner=f"{self.owner}.{LOCAL}", still=0)

    def keys(self, b: GraphBuilder) -> list[str]:
        """cos and sin [P,D/2] for keys."""
        return [self._stored(b, kind) for kind in TABLE_KINDS[:2]]

    def queries(self, b: GraphBuilder) -> list[str]:
        """cos and sin [P,D/2] for queries, which they scale as well."""
        if self.query_scale == UNSCALED:
            return self.keys(b)
        return [self._stored(b, kind) for kind in TABLE_KINDS[2:]]

    def _stored(self, b: GraphBuilder, kind: str) -> str:
        name = f"rope.{self.owner}.{kind}"
        if name in self.entries:
            stored = b.weight(name, self.entries[name])
            if not self.still:
                return stored
            return b.once(f"{name}.whole", lambda: self._whole(b, stored, kind))
        return b.once(name, lambda: self._scaled(b, kind))

    def _whole(self, b: GraphBuilder, stored: str, kind: str) -> str:
        """A table with its columns that do not turn."""
        rest = b.constant(f"rope.still.{kind}", [], [1.0 if kind == "cos" else 0.0])
        return b.node("Pad", [stored, b.integers(0, 0, 0, self.still), rest], f"{kind}_whole")

    def _scaled(self, b: GraphBuilder, kind: str) -> str:
        """A table of queries, in float32 before it is narrowed, as a stored one is."""
        base = f"rope.{self.owner}.{kind.removeprefix('q_')}"
        entry = self.entries[base]
        factor = _scale(2 * entry.shape[1], self.query_scale)
        scale = b.node("Constant", [], f"{kind}_scale", value_float=factor)
        return b.narrow(b.node("Mul", [b.stored(base, entry), scale], f"{kind}_wide"), kind)


def _compute(
    owner: str, spec: DecoderSpec, rope: RopeSpec, layer: LayerSizes, positions: int
) -> dict[str, FloatArray]:
    cos, sin = tables(rope, spec.rotary_dim or layer.head_dim, positions)
    if rope is spec.rope and (still := still_columns(spec)):
        cos, sin = (np.ascontiguousarray(one[:, :-still]) for one in (cos, sin))
    arrays, scale = [cos, sin], np.float32(_scale(layer.head_dim, spec.query_scale))
    if positions <= MAX_STORED_SCALED and spec.rotary_dim is None and scale != UNSCALED:
        arrays += [cos * scale, sin * scale]
    return {f"rope.{owner}.{kind}": a for kind, a in zip(TABLE_KINDS, arrays, strict=False)}


def still_columns(spec: DecoderSpec) -> int:
    """Columns of a model's tables that do not turn, at their end, and are not stored."""
    scaling, half = spec.rope.scaling, spec.sizes.full_layer.head_dim // 2
    if spec.query_scale != UNSCALED or not isinstance(scaling, Proportional):
        return 0
    return half - max(1, scaling.count_turned(2 * half))


def query_scale(spec: DecoderSpec) -> float:
    """What queries are multiplied by before attention."""
    return _scale(spec.sizes.full_layer.head_dim, spec.query_scale)


def _scale(head_dim: int, stated: float | None) -> float:
    return 1 / math.sqrt(head_dim) if stated is None else stated


def _rope(spec: DecoderSpec) -> tuple[RopeSpec, int, int | None, float]:
    return spec.rope, spec.sizes.full_layer.head_dim, spec.rotary_dim, query_scale(spec)
