"""Plain decoding of one request, token by token, for the fake executor's model."""

from __future__ import annotations

import numpy as np

from dflash_trt.backends.base import FloatArray
from dflash_trt.runtime import FinishReason, Request, choose_tokens
from tests.standins.executor import FakeExecutor, score_next


def decode_plainly(
    request: Request, executor: FakeExecutor, eos_token_ids: tuple[int, ...] = ()
) -> tuple[tuple[int, ...], FinishReason, FloatArray]:
    """Output ids, finish reason and logits [n,V], without caches, batches or drafts."""
    limits = executor.limits
    stops = set(request.stop_token_ids) | (set() if request.ignore_eos else set(eos_token_ids))
    tokens = list(request.prompt_ids)
    rows: list[FloatArray] = []
    while True:
        rows.append(score_next(tuple(tokens), limits.vocab_size))
        position = np.array([len(tokens)], dtype=np.int64)
        tokens.append(int(choose_tokens(rows[-1][None], position, request.sampling)[0]))
        output = tuple(tokens[len(request.prompt_ids) :])
        if output[-1] in stops:
            return output, "stop", np.stack(rows)
        if len(output) == request.max_tokens or len(tokens) == limits.max_seq_len:
            return output, "length", np.stack(rows)
