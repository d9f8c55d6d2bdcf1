"""Requests of /tokenize and /detokenize, as vLLM has them: texts to token ids, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from dflash_trt.serving.client.client import Prompt
from dflash_trt.serving.openai.body import AnyText, Body, read_body
from dflash_trt.serving.openai.errors import TOO_LONG_CODE, ApiError
from dflash_trt.serving.openai.messages import (
    CONTINUES,
    EFFORT,
    VARIABLES,
    Messages,
    TemplateBody,
)
from dflash_trt.text.tokenizer import BundleTokenizer
from dflash_trt.text.tokenizer_calls import decode

MAX_CHARACTERS = 1 << 20
"""Of a text: one thread makes the tokens of all who ask."""


class TokenizeRequest(TemplateBody):
    """A text, or a chat, of which the token ids are asked; the model may be left out."""

    model: str | None = None
    prompt: AnyText | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    """Token ids of which the text is asked."""

    model: str | None = None
    tokens: list[int] = Field(fail_fast=True)


def read_tokenize(raw: Any) -> TokenizeRequest:
    """Reads the body of POST /tokenize."""
    asked = read_body(TokenizeRequest, raw)
    if (asked.messages is None) == (asked.prompt is None):
        what = "is required, or messages" if asked.prompt is None else "goes without messages"
        raise ApiError(what, param="prompt")
    for name in ("tools", VARIABLES, EFFORT, CONTINUES):
        if asked.messages is None and getattr(asked, name):
            raise ApiError("goes with messages only", param=name)
    return asked


def encode_prompts(
    tokenizer: BundleTokenizer, prompts: Sequence[Prompt], *, special: bool
) -> list[tuple[int, ...]]:
    """Token ids of prompts, those that are ids already as they are."""
    for one in prompts:
        if len(one) > MAX_CHARACTERS:
            what = f"a prompt of {len(one):,} characters; {MAX_CHARACTERS:,} are the most"
            raise ApiError(what, code=TOO_LONG_CODE)
    return [
        tuple(tokenizer.encode(one, special=special)) if isinstance(one, str) else one
        for one in prompts
    ]


def tokenize(
    tokenizer: BundleTokenizer, asked: TokenizeRequest, text: str, max_seq_len: int
) -> dict[str, Any]:
    """The reply: the ids of `text`, which is the prompt or the rendered chat."""
    if len(text) > MAX_CHARACTERS:
        what = f"a text of {len(text):,} characters; {MAX_CHARACTERS:,} are the most"
        raise ApiError(what, param="messages" if asked.messages else "prompt")
    # A chat's template writes special tokens itself.
    given, core = asked.add_special_tokens, tokenizer.core
    ids = tokenizer.encode(text, special=asked.messages is None if given is None else given)
    strings = [*map(core.id_to_token, ids)] if asked.return_token_strs else None
    return {"count": len(ids), "max_model_len": max_seq_len, "tokens": ids, "token_strs": strings}


def detokenize(tokenizer: BundleTokenizer, asked: DetokenizeRequest) -> dict[str, Any]:
    """The reply: the text, special tokens included."""
    for place, token in enumerate(asked.tokens):
        if not 0 <= token < 1 << 32 or tokenizer.core.id_to_token(token) is None:
            raise ApiError("is no token of this model", param=f"tokens[{place}]")
    return {"prompt": decode(tokenizer.core, asked.tokens)}


def describe_tokenizer(tokenizer: BundleTokenizer) -> dict[str, Any]:
    """Returns what vLLM's /tokenizer_info tells: its config, and its tokens as texts."""
    tokens = {name: text or None for name, text in tokenizer.special_texts.items()}
    return {**tokenizer.config, **tokens, "chat_template": tokenizer.chat_template}
