"""What a step did for one request."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_trt.runtime.request import FinishReason, RequestResult, RequestState


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """New tokens, new text, or the end of a request.

    Of `token_ids`, the first `accepted_tokens` were drafted; the rest is the prefill's first
    token or a step's bonus. `text` is what became visible and `pieces` the same per token
    (what was held back until the end belongs to the last). `result` comes with the finish
    reason, in the request's last event.
    """

    request_id: int
    token_ids: tuple[int, ...]
    accepted_tokens: int
    text: str
    pieces: tuple[str, ...]
    finish_reason: FinishReason | None = None
    result: RequestResult | None = None


def make_event(
    state: RequestState, taken: int, accepted_tokens: int, finished_at: float
) -> TokenEvent:
    """The event for the newest `taken` tokens of `state`; closes it if it has finished.

    `finished_at` is the time to record in that case.
    """
    newest = slice(len(state.token_ids) - taken, None)
    token_ids = tuple(state.token_ids[newest])
    pieces = state.pieces[newest] if state.stream is not None else []
    text = "".join(pieces)
    result: RequestResult | None = None
    if state.finish_reason is not None:
        tail = state.flush_text()
        text += tail
        if pieces:
            pieces[-1] += tail
        state.recorder.finished_at = finished_at
        result = state.to_result()
    return TokenEvent(
        request_id=state.request_id,
        token_ids=token_ids,
        accepted_tokens=accepted_tokens,
        text=text,
        pieces=tuple(pieces),
        finish_reason=state.finish_reason,
        result=result,
    )
