"""Variables of a chat's template, and whether its reasoning is told apart."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dflash_trt.core.strict_json import quoted
from dflash_trt.serving.openai.errors import ApiError
from dflash_trt.text.chat import ChatRenderer
from dflash_trt.text.tokenizer import SPECIAL_TOKENS

VARIABLES, EFFORT = "chat_template_kwargs", "reasoning_effort"
EFFORTS = ("low", "medium", "high")
MOST_VARIABLES = 32
_TAKEN = {"messages", "tools", "documents", "add_generation_prompt", *SPECIAL_TOKENS}
_NAME = re.compile(r"[A-Za-z_]\w{0,63}", re.ASCII)


def read_variables(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What a request gives its template beside the messages and tools, the effort included.

    Raises:
        ApiError: no object, or a name that is none or is filled from elsewhere.
    """
    effort = fields.get(EFFORT)
    if effort is not None and effort not in EFFORTS:
        raise ApiError(f"must be one of {', '.join(EFFORTS)}", param=EFFORT)
    given = fields.get(VARIABLES, {})
    if not isinstance(given, dict) or len(given) > MOST_VARIABLES:
        raise ApiError(f"must be an object of at most {MOST_VARIABLES}", param=VARIABLES)
    for name in given:
        if not _NAME.fullmatch(name) or name in _TAKEN:
            what = f"{quoted(name)} is no variable that a request may fill"
            raise ApiError(what, param=VARIABLES)
    if effort is None:
        return dict(given)
    if given.get(EFFORT, effort) != effort:
        raise ApiError(f"differs from {VARIABLES}", param=EFFORT)
    return {**given, EFFORT: effort}


def check_variables(model: str, renderer: ChatRenderer, variables: Mapping[str, Any]) -> None:
    """Raises ApiError for one that the template of `model` does not use."""
    for name in variables:
        if renderer.knows(name):
            continue
        if name == EFFORT:
            raise ApiError(f"{model} reasons at no given effort", param=EFFORT)
        what = f"the chat template of {model} has no such variable"
        raise ApiError(what, param=f"{VARIABLES}.{name}")
