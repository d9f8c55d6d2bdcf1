"""Messages of a chat and variables of its template: who says what, and what came of calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag
from pydantic_core import from_json

from dflash_trt.core.strict_json import parse_json, quoted
from dflash_trt.errors import DflashError
from dflash_trt.serving.openai.body import AnyText, Body, Text
from dflash_trt.serving.openai.errors import ApiError
from dflash_trt.text.chat import ChatRenderer, Message
from dflash_trt.text.tokenizer import SPECIAL_TOKENS
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


VARIABLES, EFFORT = "chat_template_kwargs", "reasoning_effort"
CONTINUES = "continue_final_message"
_TAG = "DFLASH_CONTINUES_HERE "
MOST_VARIABLES = 32
_TAKEN = {"messages", "tools", "documents", "add_generation_prompt", *SPECIAL_TOKENS}


def _read_arguments(given: Any) -> dict[str, Any]:
    """The object that a call's arguments are the text of: what templates take.

    A model may write another text, and `max_tokens` may cut it: such an answer comes back too.
    """
    if not isinstance(given, str):
        raise ValueError("must be the text of a JSON object")
    try:
        whole = parse_json(given.encode(), "arguments") if given.strip() else {}
    except DflashError:
        whole = None
    if isinstance(whole, dict):
        return whole
    try:
        begun = from_json(given, allow_inf_nan=False, allow_partial="trailing-strings")
    except ValueError:
        begun = None
    return begun if isinstance(begun, dict) else {"arguments": given}


def _find_form(content: Any) -> str:
    return "parts" if isinstance(content, list) else "text"


class _Part(Body, extra="ignore"):
    type: Literal["text", "input_text", "output_text"]  # the latter two in /v1/responses
    text: AnyText


def _join_parts(content: str | list[_Part]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


MessageText = Annotated[
    Annotated[AnyText, Tag("text")] | Annotated[list[_Part], Tag("parts")],
    Discriminator(_find_form),
    AfterValidator(_join_parts),
]


class _Called(Body, extra="ignore"):
    name: Text
    arguments: Annotated[Any, AfterValidator(_read_arguments)] = Field({})


class _Call(Body, extra="ignore"):
    id: Text
    type: Literal["function"] = "function"
    function: _Called


class _Said(Body):
    content: MessageText
    name: AnyText | None = None
    # They change nothing about what was said.
    type: Any = None
    id: Any = None
    status: Any = None
    cache_control: Any = None


class _Told(_Said):
    role: Literal["system", "developer", "user"]


class _Answered(_Said):
    role: Literal["assistant"]
    content: MessageText = ""
    # A conversation goes on from answers, not from what led to them.
    reasoning_content: Any = None
    reasoning: Any = None
    reasoning_details: Any = None
    thinking_blocks: Any = None
    annotations: Any = None
    parsed: Any = None
    provider_specific_fields: Any = None
    tool_calls: list[_Call] = Field([])


class _Result(_Said):
    role: Literal["tool"]
    tool_call_id: Text


Said = Annotated[_Told | _Answered | _Result, Field(discriminator="role")]
Messages = Annotated[list[Said], Field(min_length=1, fail_fast=True)]


class TemplateBody(Body):
    """What a request gives a chat's template beside messages, and what it wants behind them.

    A final message that goes on excludes the beginning of another.
    """

    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    tools: Tools = Field([])
    chat_template_kwargs: dict[str, Any] = Field({}, max_length=MOST_VARIABLES)
    reasoning_effort: Literal["low", "medium", "high"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What a chat's template makes a prompt of; its variables have the effort too.

    The prompt `opens` an answer behind the messages, or `continues` the last of them.
    """

    messages: tuple[Message, ...]
    variables: Mapping[str, Any]
    tools: ToolUse | None
    opens: bool = True
    continues: bool = False

    def cut(self, text: str) -> str:
        """The rendered `text`, up to the end of the message that it continues.

        As transformers cuts it: by a tag, of whose blank it is known whether contents are trimmed.
        """
        if not self.continues:
            return text
        begun, tag, rest = text.rpartition(_TAG.rstrip())
        if not tag:
            raise ApiError("the chat template does not show the last message", param=CONTINUES)
        return begun if rest.startswith(_TAG[-1]) else begun.rstrip()


def read_conversation(
    messages: Sequence[_Told | _Answered | _Result],
    body: TemplateBody,
    choice: Any = "auto",
    *,
    parallel: bool = True,
) -> Conversation:
    """A chat as its template takes it: results have the name of their function."""
    waiting: dict[str, str] = {}
    """Functions of calls whose results have not come, by the calls' ids."""
    read: list[Message] = []
    for place, one in enumerate(messages):
        where = f"messages[{place}]"
        message: dict[str, Any] = {"role": one.role, "content": one.content}
        if isinstance(one, _Result):
            call = one.tool_call_id
            if call not in waiting:
                what = f"{quoted(call)} is no call that waits for a result"
                raise ApiError(what, param=f"{where}.tool_call_id")
            message |= {"tool_call_id": call, "name": waiting.pop(call)}
        else:
            waiting.clear()  # a call that was cut need not have a result
            message |= {} if one.name is None else {"name": one.name}
        if isinstance(one, _Answered) and one.tool_calls:
            message["tool_calls"] = [each.model_dump() for each in one.tool_calls]
            for at, each in enumerate(one.tool_calls):
                if each.id in waiting:
                    raise ApiError("is another call's id", param=f"{where}.tool_calls[{at}].id")
                waiting[each.id] = each.function.name
        read.append(message)
    continues = body.continue_final_message
    if continues and body.add_generation_prompt:
        raise ApiError(f"does not go with {CONTINUES}", param="add_generation_prompt")
    if continues and not read[-1]["content"].strip():
        raise ApiError("the last message has no text", param=CONTINUES)
    if continues:
        read[-1] = {**read[-1], "content": read[-1]["content"] + _TAG}
    return Conversation(
        messages=tuple(read),
        variables=_read_variables(body),
        tools=read_tools(body.tools, choice, parallel=parallel),
        opens=not continues and body.add_generation_prompt is not False,
        continues=continues,
    )


def _read_variables(body: TemplateBody) -> dict[str, Any]:
    """What a request gives its template, the effort included."""
    given, effort = body.chat_template_kwargs, body.reasoning_effort
    if effort is None:
        return dict(given)
    if given.get(EFFORT, effort) != effort:
        raise ApiError(f"differs from {VARIABLES}", param=EFFORT)
    return {**given, EFFORT: effort}


def check_variables(model: str, renderer: ChatRenderer, chat: Conversation) -> None:
    """Raises ApiError for one that the template of `model` does not use, or that is not free."""
    for name in chat.variables:
        if renderer.knows(name, tools=chat.tools is not None) and name not in _TAKEN:
            continue
        if name == EFFORT:
            raise ApiError(f"{model} reasons at no given effort", param=EFFORT)
        what = f"{quoted(name)} is no variable of {model}'s chat template that a request may fill"
        raise ApiError(what, param=VARIABLES)
