"""The rows of the target's output head that a draft reads, where it chooses among some tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dflash_trt.checkpoints.pair import Pair
from dflash_trt.checkpoints.safetensors_header import TensorEntry
from dflash_trt.graph.layers import cap_logits, lm_head
from dflash_trt.graph.model_builder import ModelBuilder

ROWS, TOKEN_IDS = "draft_head.rows", "draft_head.token_ids"
_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def draft_head(pair: Pair) -> dict[str, NDArray[Any]]:
    """The head's rows [K,H] as stored and the tokens [K] that they stand for; empty for all.

    A head of the draft's own has its rows in the draft's checkpoint.
    """
    ids, entry = pair.draft_token_ids, pair.head
    if ids is None:
        return {}
    if pair.has_own_head:
        return {TOKEN_IDS: np.array(ids, np.int64)}
    head = np.memmap(entry.file, _DTYPES[entry.dtype], "r", entry.offset, entry.shape)
    chosen = np.array(ids, np.int64)
    return {ROWS: np.array(head[chosen]), TOKEN_IDS: chosen}


def choose_among(
    model: ModelBuilder, stored: Mapping[str, TensorEntry], normed: str
) -> tuple[str, str | None]:
    """Logits [T,K] of rows [T,H], and the value that holds the K tokens; None where K is all."""
    if ROWS not in stored:
        return lm_head(model, normed), None
    b = model.b
    logits = b.node("Gemm", [normed, b.weight(ROWS, stored[ROWS])], "lm_head", transB=1)
    return cap_logits(model, logits), b.stored(TOKEN_IDS, stored[TOKEN_IDS])
