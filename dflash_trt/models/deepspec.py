"""DeepSpec's drafts: DFlash moved by one slot, and DSpark, which adds a Markov head.

A block of N slots is the anchor and N - 1 masks, and slot j drafts the token at position j + 1:
the anchor's slot drafts too. DSpark's Markov head adds W2 W1[token before] to a slot's logits, so
that slots are chosen one after another. Sources: arXiv 2607.05147, deepseek-ai/DeepSpec.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dflash_trt.core.limits import MAX_BLOCK
from dflash_trt.models.config_fields import ConfigFields
from dflash_trt.models.safetensors_header import TensorEntry
from dflash_trt.models.weight_names import HEAD_NAME, Rules

ARCHITECTURE = "Qwen3DSparkModel"

MARKOV_WEIGHTS: Rules = {
    "markov_w1": ("markov_head.markov_w1.weight", ("vocab", "rank")),
    "markov_w2": ("markov_head.markov_w2.weight", ("tokens", "rank")),
}

COPIES = {"embed_tokens": "embed_tokens.weight", "lm_head": HEAD_NAME}
"""The target's matrices, which every checkpoint repeats, by their roles."""

UNUSED = (*COPIES.values(), "confidence_head.proj.weight", "confidence_head.proj.bias")
"""What a checkpoint holds and no graph reads. The confidence head says where to cut a block."""

DRAFTS_ANCHOR = "sample_from_anchor"
"""A key of speculators' alone: DeepSpec's drafts all do."""

_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
# Training may leave rare tokens as they were, so rows all over the vocabulary are compared.
_ROWS_COMPARED = 512
_MAX_RANK = 1 << 14


def read_block(config: ConfigFields) -> int:
    """Rows that a step verifies: the anchor and what the `block_size` slots draft."""
    first = int(drafts_anchor(config))
    return first + config.integer("block_size", low=2 - first, high=MAX_BLOCK - first)


def drafts_anchor(config: ConfigFields) -> bool:
    """Whether the anchor's slot drafts too, and each slot the token behind its own."""
    return config.flag(DRAFTS_ANCHOR, True)


def read_markov_rank(config: ConfigFields) -> int:
    """The Markov head's rank; 0 where there is none.

    Raises:
        DflashError: a head that looks at more than the token before.
    """
    rank = config.integer("markov_rank", low=0, high=_MAX_RANK)
    if rank and config.text("markov_head_type", "vanilla").lower() != "vanilla":
        raise config.unsupported("markov_head_type", 'only "vanilla" Markov heads are')
    return rank


def differing_copies(
    draft: Mapping[str, TensorEntry],
    target: Mapping[str, TensorEntry],
    roles: Iterable[str] = COPIES,
    token_id: int = 0,
) -> list[str]:
    """Which of the draft's copies of the target's `roles` are other matrices than the target's.

    `draft` has tensors by name, `target` by role. Graphs read the target's, so a draft that was
    trained with matrices of its own would draft nonsense. A quantised matrix is not compared, and
    of others rows all over the vocabulary are, with that of `token_id`.
    """
    found: list[str] = []
    for role in roles:
        name = COPIES[role]
        copy = draft.get(name)
        own = target.get(role, target["embed_tokens"])
        if copy is None or not {copy.dtype, own.dtype} <= set(_DTYPES):
            continue
        if copy.shape != own.shape:
            found.append(f"{name} is {list(copy.shape)}, the target's {list(own.shape)}")
        elif not np.array_equal(
            _some_rows(copy, token_id), _some_rows(own, token_id).astype(_DTYPES[copy.dtype])
        ):
            found.append(f"{name} differs from the target's")
    return found


def _some_rows(entry: TensorEntry, token_id: int) -> NDArray[np.generic]:
    rows = np.memmap(entry.file, _DTYPES[entry.dtype], "r", entry.offset, entry.shape)
    chosen = [*range(0, len(rows), max(1, len(rows) // _ROWS_COMPARED)), token_id]
    return np.array(rows[[one for one in chosen if one < len(rows)]])
