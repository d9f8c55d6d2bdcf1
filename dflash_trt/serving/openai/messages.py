"""Messages of a chat: who says what, what was called, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_trt.core.strict_json import parse_json, quoted
from dflash_trt.errors import DflashError
from dflash_trt.serving.openai.errors import ApiError
from dflash_trt.serving.openai.prompts import check_text
from dflash_trt.text.chat import Message

ROLES = ("system", "developer", "user", "assistant", "tool")


def read_messages(fields: Mapping[str, Any]) -> tuple[Message, ...]:
    """The messages of a chat, at least one; each call of a function is answered before the next.

    Arguments of calls become objects, and results have the name of their function: what templates
    take.

    Raises:
        ApiError: one is malformed, or stands in a wrong place.
    """
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError("must be a list of at least one message", param="messages")
    waiting: dict[str, str] = {}
    """Names of the functions whose results have not come, by the calls' ids."""
    read: list[Message] = []
    for place, item in enumerate(messages):
        where = f"messages[{place}]"
        message = _read_message(item, where)
        if message["role"] == "tool":
            call = message["tool_call_id"]
            if call not in waiting:
                what = f"{quoted(call)} is no call that waits for a result"
                raise ApiError(what, param=f"{where}.tool_call_id")
            message = {**message, "name": waiting.pop(call)}
        else:
            _check_answered(waiting, where)
        for one in message.get("tool_calls", ()):
            waiting[one["id"]] = one["function"]["name"]
        read.append(message)
    _check_answered(waiting, "messages")
    return tuple(read)


def _check_answered(waiting: Mapping[str, str], where: str) -> None:
    if waiting:
        what = f"the call {quoted(next(iter(waiting)))} has no message of role tool after it"
        raise ApiError(what, param=where)


def _read_message(message: Any, where: str) -> Message:
    """One message: its role, its text and its calls; whatever else says something is refused."""
    if not isinstance(message, dict):
        raise ApiError("must be an object with role and content", param=where)
    role = message.get("role")
    if role not in ROLES:
        raise ApiError(f"must be one of {', '.join(ROLES)}", param=f"{where}.role")
    known = {"role", "content"}
    if role == "assistant":
        # Of an earlier answer; a conversation goes on from answers, not from what led to them.
        known |= {"reasoning_content", "tool_calls"}
    elif role == "tool":
        known.add("tool_call_id")
    for name in message.keys() - known:
        if message[name] not in (None, []):
            raise ApiError("is not supported", param=f"{where}.{quoted(name).strip(chr(34))}")
    calls = message.get("tool_calls") if role == "assistant" else None
    content = message.get("content")
    if calls and content is None:
        content = ""
    read: dict[str, Any] = {"role": role, "content": _read_content(content, f"{where}.content")}
    if calls:
        read["tool_calls"] = _read_calls(calls, f"{where}.tool_calls")
    if role == "tool":
        read["tool_call_id"] = check_text(message.get("tool_call_id"), f"{where}.tool_call_id")
    return read


def _read_content(content: Any, where: str) -> str:
    """A message's text: a string, or parts of type text."""
    if isinstance(content, list):
        parts: list[str] = []
        for number, part in enumerate(content):
            if not isinstance(part, dict) or part.get("type") != "text":
                raise ApiError("only parts of type text are supported", param=f"{where}[{number}]")
            parts.append(check_text(part.get("text"), f"{where}[{number}].text", empty=True))
        return "".join(parts)
    return check_text(content, where, empty=True)


def _read_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise ApiError("must be a list of calls", param=where)
    read = [_read_call(one, f"{where}[{place}]") for place, one in enumerate(calls)]
    ids = [one["id"] for one in read]
    for place, one in enumerate(ids):
        if one in ids[:place]:
            raise ApiError("is another call's id", param=f"{where}[{place}].id")
    return read


def _read_call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise ApiError("must be an object with id, type and function", param=where)
    if call.get("type", "function") != "function":
        raise ApiError("only calls of functions are supported", param=f"{where}.type")
    function = call.get("function")
    if not isinstance(function, dict):
        raise ApiError("must be an object with name and arguments", param=f"{where}.function")
    arguments = function.get("arguments", "")
    place = f"{where}.function.arguments"
    text = check_text(arguments, place, empty=True)
    try:
        value = parse_json(text.encode(), place) if text.strip() else {}
    except DflashError as error:
        raise ApiError(error.what, param=place) from error
    if not isinstance(value, dict):
        raise ApiError("must be the text of a JSON object", param=place)
    name = check_text(function.get("name"), f"{where}.function.name")
    return {
        "id": check_text(call.get("id"), f"{where}.id"),
        "type": "function",
        "function": {"name": name, "arguments": value},
    }
