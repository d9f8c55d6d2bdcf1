"""Requests of /tokenize and /detokenize, as vLLM has them: texts to token ids, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from dflash_trt.serving.openai.errors import ApiError
from dflash_trt.serving.openai.fields import AnyText, Body, read_body
from dflash_trt.serving.openai.messages import (
    EFFORT,
    VARIABLES,
    Conversation,
    Messages,
    TemplateBody,
    read_messages,
    read_variables,
)
from dflash_trt.serving.openai.tools import read_tools
from dflash_trt.text.tokenizer import BundleTokenizer
from dflash_trt.text.tokenizer_calls import decode

MAX_CHARACTERS = 1 << 20
"""Of a text: one thread makes the tokens of all who ask."""


class _TokenizeBody(TemplateBody):
    model: str | None = None
    prompt: AnyText | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    # An unfinished chat is refused.
    add_generation_prompt: Literal[True] = True
    continue_final_message: Literal[False] = False


class DetokenizeRequest(Body):
    """Token ids of which the text is asked."""

    model: str | None = None
    tokens: list[int] = Field(fail_fast=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeRequest:
    """A text, or a chat, of which the token ids are asked.

    Args:
        model: None where the client named none.
        special: the tokenizer adds its own special tokens; a chat's template writes them itself.
        strings: each token as the vocabulary spells it is asked too.
    """

    model: str | None
    prompt: str
    chat: Conversation | None
    special: bool
    strings: bool


def read_tokenize(raw: Any) -> TokenizeRequest:
    """Reads the body of POST /tokenize.

    Raises:
        ApiError: a parameter that is missing, wrong or not supported.
    """
    body = read_body(_TokenizeBody, raw)
    if (body.messages is None) == (body.prompt is None):
        what = "is required, or messages" if body.prompt is None else "goes without messages"
        raise ApiError(what, param="prompt")
    chat = None
    if body.messages is not None:
        chat = Conversation(
            messages=read_messages(body.messages),
            variables=read_variables(body),
            tools=read_tools(body.tools),
        )
    for name in ("tools", VARIABLES, EFFORT):
        if chat is None and getattr(body, name):
            raise ApiError("goes with messages only", param=name)
    special = chat is None if body.add_special_tokens is None else body.add_special_tokens
    return TokenizeRequest(
        model=body.model,
        prompt=body.prompt or "",
        chat=chat,
        special=special,
        strings=body.return_token_strs,
    )


def read_detokenize(raw: Any) -> DetokenizeRequest:
    """Reads the body of POST /detokenize.

    Raises:
        ApiError: a parameter that is missing, wrong or not supported.
    """
    return read_body(DetokenizeRequest, raw)


def tokenize(
    tokenizer: BundleTokenizer, asked: TokenizeRequest, text: str, max_seq_len: int
) -> dict[str, Any]:
    """The reply: the ids of `text`, which is the prompt or the rendered chat.

    Raises:
        ApiError: the text is too long.
        DflashError: the tokenizer fails.
    """
    if len(text) > MAX_CHARACTERS:
        what = f"a text of {len(text):,} characters; {MAX_CHARACTERS:,} are the most"
        raise ApiError(what, param="messages" if asked.chat else "prompt")
    ids = tokenizer.encode(text, special=asked.special)
    strings = [tokenizer.core.id_to_token(token) for token in ids] if asked.strings else None
    return {"count": len(ids), "max_model_len": max_seq_len, "tokens": ids, "token_strs": strings}


def detokenize(tokenizer: BundleTokenizer, asked: DetokenizeRequest) -> dict[str, Any]:
    """The reply: the text, special tokens included.

    Raises:
        ApiError: an id that is no token's.
        DflashError: the tokenizer fails.
    """
    for place, token in enumerate(asked.tokens):
        if not 0 <= token < 1 << 32 or tokenizer.core.id_to_token(token) is None:
            raise ApiError("is no token of this model", param=f"tokens[{place}]")
    return {"prompt": decode(tokenizer.core, asked.tokens)}
