"""Names of the graphs' inputs and outputs (see tensors.py), and the legend of all shapes.

B sequences in a call, S rows each, T = B·S rows flattened, R logit rows per sequence,
H hidden size, D head size, V vocabulary, M cache length, P positions in a RoPE table,
C columns of a page table, N drafts of a block (S - 1),
K tokens that a draft chooses among.
"""

from __future__ import annotations

from typing import Literal

Dim = int | str

GraphName = Literal["target", "draft", "target_only"]
GRAPH_NAMES: tuple[GraphName, ...] = ("target", "draft", "target_only")

TOKEN_IDS = "token_ids"
BLOCK_IDS = "block_ids"
CACHE_START = "cache_start"
PAGE_TABLE = "page_table"
LOGIT_ROWS = "logit_rows"
STATE_START = "state_start"
ROWS_END = "rows_end"
ROWS_SIDE = "rows_side"
SAMPLING = "sampling"
CHOICE_IDS = "choice_ids"
LOGITS = "logits"
CANDIDATE_IDS = "candidate_ids"
CANDIDATE_LOGITS = "candidate_logits"
ACCEPTED = "accepted"
NEW_TOKENS = "new_tokens"
NEW_START = "new_start"
NEXT_BLOCK_IDS = "next_block_ids"
DRAFT_TOKEN_IDS = "token_ids"

OBSERVED_PREFIX = "amax/"
# Twice the largest top-k that they serve: narrow logits often tie, and a tie of the k-th and the
# last candidate needs the whole row.
CANDIDATES = 128

Owner = Literal["target", "draft"]
CacheKind = Literal["k", "v", "state", "rows"]
KV: tuple[CacheKind, ...] = ("k", "v")
RECURRENT: tuple[CacheKind, ...] = ("state", "rows")


def cache_input(owner: Owner, kv: CacheKind, layer: int) -> str:
    """Name of one layer's K or V cache as a graph input, or of a recurrent layer's.

    [B, kv heads, M, D], or a pool [pages, page_size, kv heads, D] in the paged layout. A state is
    [B, heads, D, D], and rows are [B, kept rows, elements], in engines [B, 1 or 2, kept rows, …].
    """
    return f"{owner}_{kv}_{layer}"


def page_table_input(window: int | None) -> str:
    """Name of the page table of layers that see `window` positions; None: all."""
    return PAGE_TABLE if window is None else f"{PAGE_TABLE}_{window}"


def cache_output(cache: str) -> str:
    """Name of the cache called `cache` after the update; both have the same memory."""
    return f"{cache}_out"


def observed_output(value: str) -> str:
    """Name of the output that holds the largest magnitude of a graph's inner value, a scalar."""
    return f"{OBSERVED_PREFIX}{value}"
