"""The longest prefix of drafts that equal the target's own tokens, and the bonus token.

Program b handles sequence b. The rule is `accept_block` in dflash_trt/sampling/acceptance.py.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def accept(
    token_ids,  # int64 [B,S]: the anchor, then the drafts
    choice_ids,  # int64 [B,S]: the target's token after each of them
    cache_start,  # int64 [B]
    rows,  # S
    accepted,  # int32 [B]: how many drafts are accepted
    new_tokens,  # int64 [B,S]: accepted drafts, the bonus token, then -1
    bonus,  # int64 [B]: the target's token after the accepted drafts
    new_start,  # int64 [B]: cache_start + accepted + 1
    BLOCK: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BLOCK)
    first = sequence * rows
    choice = tl.load(choice_ids + first + row, mask=row < rows, other=-1)
    draft = tl.load(token_ids + first + row + 1, mask=row < rows - 1, other=-1)
    # The last row has no draft and counts as a mismatch, so there always is a first mismatch.
    differs = (row >= rows - 1) | (choice != draft)
    count = tl.min(tl.where(differs, row, BLOCK), axis=0)
    tokens = tl.where(row <= count, choice, -1)
    tl.store(new_tokens + first + row, tokens, mask=row < rows)
    tl.store(accepted + sequence, count)
    tl.store(bonus + sequence, tl.max(tl.where(row == count, choice, -1), axis=0))
    tl.store(new_start + sequence, tl.load(cache_start + sequence) + count + 1)
