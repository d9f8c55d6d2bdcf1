"""Log-probabilities as a served model sends them: columns, those of the alternatives flat."""

from __future__ import annotations

import math

from dflash_trt.runtime import TokenLogprob
from dflash_trt.serving.client.errors import ServedModelError
from dflash_trt.serving.client.wire import MODEL, Response


def read_logprobs(response: Response, top: int) -> tuple[TokenLogprob, ...]:
    """Those of the output that came with a response, `top` alternatives each.

    Raises:
        ServedModelError: its columns do not fit together.
    """
    return _join(response, response.numbers("logprob_ids"), "", top)


def read_prompt_logprobs(response: Response, top: int) -> tuple[TokenLogprob, ...] | None:
    """Those of the prompt, if the response has them; of the first, before which nothing is, NaN.

    Raises:
        ServedModelError: its columns do not fit together.
    """
    ids = response.numbers("prompt_logprob_ids")
    if not ids:
        return None
    return (TokenLogprob(ids[0], math.nan), *_join(response, ids[1:], "prompt_", top))


def _join(
    response: Response, ids: tuple[int, ...], prefix: str, top: int
) -> tuple[TokenLogprob, ...]:
    values = response.reals(f"{prefix}logprobs")
    # Repositories of earlier releases send no ranks.
    ranks = response.numbers(f"{prefix}logprob_ranks") or (None,) * len(ids)
    top_ids = response.numbers(f"{prefix}top_logprob_ids")
    top_values = response.reals(f"{prefix}top_logprobs")
    most = len(top_ids) // len(ids) if ids else 0  # a vocabulary may have fewer than `top`
    fits = len(values) == len(ranks) == len(ids)
    if not (fits and len(ids) * most == len(top_ids) == len(top_values)) or most > top:
        raise ServedModelError("sends what are no log-probabilities", "failed", where=MODEL)
    return tuple(
        TokenLogprob(
            token_id,
            value,
            top_ids[place * most : (place + 1) * most],
            top_values[place * most : (place + 1) * most],
            rank,
        )
        for place, (token_id, value, rank) in enumerate(zip(ids, values, ranks, strict=True))
    )
