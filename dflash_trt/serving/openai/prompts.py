"""Prompts of a completion: texts or token ids, one or several, and how many outputs they have."""

from __future__ import annotations

from typing import Any

from dflash_trt.core.strict_json import quoted
from dflash_trt.serving.client.client import Prompt
from dflash_trt.serving.openai.errors import ApiError

MOST_CHOICES = 64
"""Outputs of one request; each takes a place of the served model."""


def read_prompts(given: Any) -> tuple[Prompt, ...]:
    """`prompt`: a text, token ids, or a list of either, at least one.

    Raises:
        ApiError: it is none of them.
    """
    if isinstance(given, str):
        return (check_text(given, "prompt"),)
    if not isinstance(given, list) or not given:
        what = "must be a text, not empty, a list of token ids, or a list of either"
        raise ApiError(what, param="prompt")
    if type(given[0]) is int:
        return (_read_ids(given, "prompt"),)
    check_choices(len(given), 1)
    return tuple(_read_prompt(one, f"prompt[{place}]") for place, one in enumerate(given))


def check_choices(prompts: int, samples: int) -> None:
    """Raises ApiError for more outputs than a request may have."""
    if prompts * samples > MOST_CHOICES:
        of = f"{samples:,}" if prompts == 1 else f"{prompts:,} prompts of {samples:,}"
        what = f"{of} outputs are more than {MOST_CHOICES} in one request"
        raise ApiError(what, param="n" if samples > 1 else "prompt")


def check_text(value: Any, where: str, *, empty: bool = False) -> str:
    """The value, a text that Unicode knows."""
    if not isinstance(value, str) or not (value or empty):
        raise ApiError("must be a text" if empty else "must be a text, not empty", param=where)
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON's \ud800
        raise ApiError(f"is not Unicode text at character {error.start}", param=where) from None
    return value


def _read_prompt(given: Any, where: str) -> Prompt:
    return _read_ids(given, where) if isinstance(given, list) else check_text(given, where)


def _read_ids(given: list[Any], where: str) -> tuple[int, ...]:
    for place, one in enumerate(given):
        if type(one) is not int or not 0 <= one < 2**31:
            raise ApiError(f"{quoted(one)} is no token id", param=f"{where}[{place}]")
    if not given:
        raise ApiError("must hold a token id", param=where)
    return tuple(given)
