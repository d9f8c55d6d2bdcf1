"""Whether an executor can run a request, said before anything runs."""

from __future__ import annotations

from dflash_trt.backends.base import ExecutorLimits
from dflash_trt.errors import DflashError
from dflash_trt.runtime.request import Request


def check_request(request: Request, limits: ExecutorLimits, has_tokenizer: bool) -> None:
    """Raises DflashError (usage) naming the first thing about `request` that cannot run."""
    length, longest = len(request.prompt_ids), limits.max_seq_len - 1
    if length > longest:
        raise DflashError(
            f"{length} tokens do not fit: the context of {limits.max_seq_len} holds a prompt of "
            f"at most {longest} and one output token",
            where="prompt",
            fix="shorten it, or build with a larger --max-seq-len",
            usage=True,
        )
    _check_ids("prompt", request.prompt_ids, limits)
    _check_ids("stop_token_ids", request.stop_token_ids, limits)
    _check_ids("logit_bias", tuple(one for one, _ in request.penalties.bias), limits)
    for where, ids in request.rules.named():
        _check_ids(where, ids, limits)
    if request.prompt_logprobs is not None and not limits.takes_any_chunk:
        what = "engines hand out the logits of a prompt's last token alone"
        raise DflashError(what, where="prompt_logprobs", fix="leave it out", usage=True)
    if request.stop_strings and not has_tokenizer:
        raise DflashError(
            "the generator has no tokenizer to find them with", where="stop_strings", usage=True
        )
    check_block_size(request.block_size, limits)


def check_block_size(block_size: int | None, limits: ExecutorLimits) -> None:
    """Raises DflashError (usage) unless `block_size` is None or 2 … the trained block."""
    if block_size is not None and not 2 <= block_size <= limits.block_size:
        raise DflashError(
            f"{block_size} is not between 2 and {limits.block_size}, the drafter's trained block",
            where="block_size",
            usage=True,
        )


def _check_ids(where: str, token_ids: tuple[int, ...], limits: ExecutorLimits) -> None:
    outside = next((one for one in token_ids if not 0 <= one < limits.vocab_size), None)
    if outside is not None:
        raise DflashError(
            f"token id {outside} is outside the vocabulary of {limits.vocab_size}",
            where=where,
            usage=True,
        )
