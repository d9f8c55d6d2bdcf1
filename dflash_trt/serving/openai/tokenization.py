"""Requests of /tokenize and /detokenize, as vLLM has them: texts to token ids, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_trt.serving.openai.errors import ApiError
from dflash_trt.serving.openai.messages import read_messages
from dflash_trt.serving.openai.prompts import check_text
from dflash_trt.serving.openai.request import open_fields, read_flag
from dflash_trt.serving.openai.templates import VARIABLES, read_variables
from dflash_trt.serving.openai.tools import read_tools
from dflash_trt.text.chat import Message
from dflash_trt.text.tokenizer import BundleTokenizer
from dflash_trt.text.tokenizer_calls import decode
from dflash_trt.text.tools import ToolUse

MAX_CHARACTERS = 1 << 20
"""Of a text: one thread makes the tokens of all who ask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeRequest:
    """A text, or the messages of a chat, of which the token ids are asked.

    Args:
        model: None where the client named none.
        tools: that the chat's template is told of.
        variables: of the chat's template.
        special: the tokenizer adds its own special tokens; a chat's template writes them itself.
        strings: each token as the vocabulary spells it is asked too.
    """

    model: str | None
    prompt: str
    messages: tuple[Message, ...]
    tools: ToolUse | None
    variables: Mapping[str, Any]
    special: bool
    strings: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizeRequest:
    """Token ids of which the text is asked."""

    model: str | None
    tokens: tuple[int, ...]


def read_tokenize(body: Any) -> TokenizeRequest:
    """Reads the body of POST /tokenize.

    Raises:
        ApiError: a parameter that is missing, wrong or not supported.
    """
    neutral = {"add_generation_prompt": (True,), "continue_final_message": (False,)}
    names = {"model", "prompt", "messages", "add_special_tokens", "return_token_strs", "tools"}
    names.add(VARIABLES)
    fields = open_fields(body, names, neutral)
    is_chat = "messages" in fields
    if is_chat and "prompt" in fields:
        raise ApiError("goes without messages", param="prompt")
    for name in ("tools", VARIABLES):
        if not is_chat and fields.get(name):
            raise ApiError("goes with messages only", param=name)
    return TokenizeRequest(
        model=_read_model(fields),
        prompt="" if is_chat else check_text(fields.get("prompt"), "prompt", empty=True),
        messages=read_messages(fields) if is_chat else (),
        tools=read_tools({"tools": fields.get("tools", [])}),
        variables=read_variables(fields),
        special=read_flag({"add_special_tokens": not is_chat} | fields, "add_special_tokens"),
        strings=read_flag(fields, "return_token_strs"),
    )


def read_detokenize(body: Any) -> DetokenizeRequest:
    """Reads the body of POST /detokenize.

    Raises:
        ApiError: a parameter that is missing, wrong or not supported.
    """
    fields = open_fields(body, {"model", "tokens"}, {})
    tokens = fields.get("tokens")
    if not isinstance(tokens, list) or any(type(token) is not int for token in tokens):
        raise ApiError("must be a list of token ids", param="tokens")
    return DetokenizeRequest(model=_read_model(fields), tokens=tuple(tokens))


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
        raise ApiError(what, param="messages" if asked.messages else "prompt")
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


def _read_model(fields: dict[str, Any]) -> str | None:
    model = fields.get("model")
    if model is not None and not isinstance(model, str):
        raise ApiError("must be the name of a model", param="model")
    return model
