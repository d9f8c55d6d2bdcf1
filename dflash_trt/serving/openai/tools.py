"""Tools of a chat: the functions that its answer may call, and whether it must."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dflash_trt.core.strict_json import quoted
from dflash_trt.serving.openai.errors import ApiError
from dflash_trt.serving.openai.prompts import check_text
from dflash_trt.text.tools import Tool, ToolUse

FIELDS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})
MOST_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def read_tools(fields: Mapping[str, Any]) -> ToolUse | None:
    """What a request offers; None where an answer calls nothing.

    Raises:
        ApiError: a tool or a choice that is wrong, or of a kind that is not supported.
    """
    given = fields.get("tools", [])
    if not isinstance(given, list) or len(given) > MOST_TOOLS:
        raise ApiError(f"must be a list of at most {MOST_TOOLS}", param="tools")
    tools = tuple(_read_tool(one, f"tools[{place}]") for place, one in enumerate(given))
    names = [one.name for one in tools]
    for place, name in enumerate(names):
        if name in names[:place]:
            what = "is another function's name"
            raise ApiError(what, param=f"tools[{place}].function.name")
    parallel = fields.get("parallel_tool_calls", True)
    if not isinstance(parallel, bool):
        what = f"must be true or false, not {quoted(parallel)}"
        raise ApiError(what, param="parallel_tool_calls")
    choice = fields.get("tool_choice", "auto")
    if choice == "none" or (choice == "auto" and not tools):
        return None
    if choice == "auto":
        return ToolUse(tools, parallel=parallel)
    if choice == "required":
        if not tools:
            raise ApiError("goes with tools only", param="tool_choice")
        return ToolUse(tools, must=True, parallel=parallel)
    name = _read_named(choice)
    if name not in names:
        raise ApiError(f"{quoted(name)} is none of the tools", param="tool_choice")
    return ToolUse(tools, must=True, only=name, parallel=False)


def _read_named(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.keys() == {"type", "function"}:
        function = choice["function"]
        if choice["type"] == "function" and isinstance(function, dict) and [*function] == ["name"]:
            return function["name"]
    what = "must be none, auto, required, or an object that names a function"
    raise ApiError(f"{what}, not {quoted(choice)}", param="tool_choice")


def _read_tool(given: Any, where: str) -> Tool:
    if not isinstance(given, dict) or given.get("type") != "function":
        raise ApiError("only tools of type function are supported", param=where)
    function = given.get("function")
    if not isinstance(function, dict):
        raise ApiError("must be an object with a name", param=f"{where}.function")
    unknown = sorted(map(str, {*given} - {"type", "function"}))
    unknown += [
        f"function.{name}" for name in {*function} - {"name", "description", "parameters", "strict"}
    ]
    if unknown:
        first = quoted(unknown[0]).strip('"')
        raise ApiError("this parameter is not supported", param=f"{where}.{first}")
    where = f"{where}.function"
    name: Any = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        what = "must be 1 to 64 letters, digits, underscores and dashes"
        raise ApiError(what, param=f"{where}.name")
    told = function.get("description")
    if told is not None:
        check_text(told, f"{where}.description", empty=True)
    parameters = function.get("parameters")
    parameters = {} if parameters is None else parameters
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise ApiError("must be the schema of an object", param=f"{where}.parameters")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise ApiError(f"must be true or false, not {quoted(strict)}", param=f"{where}.strict")
    return Tool(name, told, parameters, bool(strict))
