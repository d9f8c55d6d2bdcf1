"""Tools of a chat: the functions that its answer may call, and whether it must."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from dflash_trt.core.strict_json import quoted
from dflash_trt.serving.openai.body import AnyText, Body
from dflash_trt.serving.openai.errors import ApiError
from dflash_trt.text.tools import Tool, ToolUse

MOST_TOOLS = 128


def _check_schema(parameters: dict[str, Any]) -> dict[str, Any]:
    if parameters.get("type", "object") != "object":
        raise ValueError("must be the schema of an object")
    return parameters


class _Function(Body):
    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: AnyText | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_check_schema)] = Field({})
    strict: bool = False


class FunctionTool(Body):
    """A function that an answer may call."""

    type: Literal["function"]
    function: _Function


Tools = Annotated[list[FunctionTool], Field(max_length=MOST_TOOLS)]


def read_tools(
    given: Sequence[FunctionTool], choice: Any = "auto", *, parallel: bool = True
) -> ToolUse | None:
    """What a request offers; None where an answer calls nothing."""
    functions = [one.function for one in given]
    tools = tuple(Tool(f.name, f.description, f.parameters, f.strict) for f in functions)
    names = [one.name for one in tools]
    for place, name in enumerate(names):
        if name in names[:place]:
            what = "is another function's name"
            raise ApiError(what, param=f"tools[{place}].function.name")
    if choice == "none" or (choice == "auto" and not tools):
        return None
    if choice == "auto":
        return ToolUse(tools, parallel=parallel)
    if choice == "required":
        if not tools:
            raise ApiError("goes with tools only", param="tool_choice")
        return ToolUse(tools, must=True, parallel=parallel)
    match choice:
        case {"type": "function", "function": {"name": only, **other}, **more}:
            if other or more or only not in names:
                raise ApiError(f"{quoted(choice)} is none of the tools", param="tool_choice")
            return ToolUse(tools, must=True, only=only, parallel=False)
    what = "must be none, auto, required, or an object that names a function"
    raise ApiError(f"{what}, not {quoted(choice)}", param="tool_choice")
