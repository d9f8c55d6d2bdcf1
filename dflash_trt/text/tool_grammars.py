"""Grammars of answers with calls, in llguidance's Lark, and of answers on harmony's channels.

Where the model is free to call or not, text is free up to the mark of a call; what follows the
mark is bound. Special tokens are no text to llguidance: those that may stand in it are named.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from dflash_trt.errors import DflashError
from dflash_trt.text.grammar import Grammar, lark_choice, lark_json, schema_text
from dflash_trt.text.harmony import CHANNEL, CONSTRAIN, END, MESSAGE, START
from dflash_trt.text.tool_calls import HERMES, LLAMA_3
from dflash_trt.text.tools import Tool, ToolFormat, ToolUse

_ANY_TEXT = r"TEXT: /(.|\n)*/"
_HARMONY = f"""{_ANY_TEXT}
thought: {CHANNEL} "analysis" {MESSAGE} TEXT {END} {START} "assistant"
preamble: {CHANNEL} "commentary" {MESSAGE} TEXT {END} {START} "assistant"
"""


def bind_answer(
    form: ToolFormat | None,
    use: ToolUse | None,
    answer: Grammar | None,
    *,
    harmony: bool,
    thought: str = "",
) -> Grammar | None:
    """What an answer must follow that may call as `use` says, or else is `answer`.

    None where it is bound by nothing. `thought` are rules of what stands before it.

    Raises:
        DflashError: an answer's grammar that cannot stand in another (usage).
    """
    if use is None or form is None:
        if answer is None or not (harmony or thought):
            return answer
        if thought:
            return _join(["start: thought answer", thought, _answer(answer)])
        return _join(["start: thought* final", f"{_FINAL} answer", _HARMONY, _answer(answer)])
    is_bound = use.must or not use.parallel or answer is not None
    if not is_bound and not any(one.strict for one in use.callable):
        return None
    beside_json = answer is not None and form.family == "llama3" and not use.must
    calls = [
        f"call_{place}: {_json_call(tool) if beside_json else _call(form, tool, use)}"
        for place, tool in enumerate(use.callable)
    ]
    calls.append(f"call: {' | '.join(f'call_{place}' for place in range(len(use.callable)))}")
    if answer is not None and not use.must:
        calls.append(_answer(answer))
    rules = {"hermes": _hermes, "llama3": _llama, "harmony": _channels}[form.family]
    bound = [*rules(form, use, answer), *calls]
    if thought:
        bound = ["start: thought told", thought, *(_tell(rule) for rule in bound)]
    return _join(bound)


def _tell(rule: str) -> str:
    """The rule that an answer begins with, as one that stands behind another."""
    return rule.replace("start:", "told:", 1) if rule.startswith("start:") else rule


_FINAL = f'final: {CHANNEL} "final" {MESSAGE}'


def _hermes(form: ToolFormat, use: ToolUse, answer: Grammar | None) -> Iterable[str]:
    more = '("\\n" opening call)*' if use.parallel else ""
    yield f"opening: {_mark(form, HERMES.opening)}"
    if use.must or answer is not None:
        yield f"start: opening call {more}" + ("" if use.must else " | answer")
        return
    yield "start: part* TEXT" if use.parallel else "start: other* (TEXT | marked call)"
    yield "part: marked call | other"
    yield _ANY_TEXT
    marked = f"marked[lazy]: TEXT {json.dumps(HERMES.opening)}"
    if (token := form.added.get(HERMES.opening)) is not None:
        marked = f"marked: spelled | TEXT <[{token}]>\nspelled[lazy]: TEXT " + json.dumps(
            HERMES.opening
        )
    yield marked
    others = sorted(at for text, at in form.added.items() if text != HERMES.opening)
    yield f"other: TEXT <[{','.join(map(str, others))}]>" if others else 'other: "" TEXT'


def _llama(form: ToolFormat, use: ToolUse, answer: Grammar | None) -> Iterable[str]:
    tag = f"{LLAMA_3.opening}? " if LLAMA_3.opening in form.added else ""
    if use.must:
        yield f"start: {tag}call"
    elif answer is not None:
        yield f"start: {tag}call | answer"
    else:
        yield f"start: ({tag}call | TEXT)?"
        yield r"TEXT: /\s*[^{\s](.|\n)*/"


def _channels(form: ToolFormat, use: ToolUse, answer: Grammar | None) -> Iterable[str]:
    """Reasoning and preambles as the model likes, then one call or the final message."""
    yield "start: (thought | preamble)* call" + (
        "" if use.must else " | (thought | preamble)* final"
    )
    yield _HARMONY
    if not use.must:
        yield f"{_FINAL} {'TEXT' if answer is None else 'answer'}"


def _call(form: ToolFormat, tool: Tool, use: ToolUse) -> str:
    free = not use.must and not tool.strict
    arguments = lark_json("" if free else schema_text(tool.schema))
    if form.family == "harmony":
        constrain = CONSTRAIN if CONSTRAIN in form.added else ""
        head = json.dumps(f"commentary to=functions.{tool.name} ")
        return f'{CHANNEL} {head} {constrain} "json" {MESSAGE} {arguments}'
    key = "arguments" if form.family == "hermes" else "parameters"
    head = json.dumps(f'{{"name": "{tool.name}", "{key}": ')
    if form.family == "llama3":
        return f'{head} {arguments} "}}"'
    return f'"\\n" {head} {arguments} "}}\\n" {_mark(form, HERMES.closing)}'


def _json_call(tool: Tool) -> str:
    """A bare call as a schema of its own: a lexer does not go back from the call's text to JSON.

    Raises:
        DflashError: its arguments' schema refers to its root, which would be another (usage).
    """
    schema = tool.schema
    if '"$ref": "#"' in json.dumps(schema):
        what = f"the schema of {tool.name} refers to itself, which does not go with another format"
        raise DflashError(what, where="grammar", usage=True)
    shared: dict[str, Any] = {
        name: schema.pop(name) for name in ("$defs", "definitions") if name in schema
    }
    properties = {"name": {"const": tool.name}, "parameters": schema}
    call = {"type": "object", "properties": properties, "required": [*properties]}
    return lark_json(schema_text({**call, "additionalProperties": False, **shared}))


def _mark(form: ToolFormat, text: str) -> str:
    """A mark as its token where it is one, else as its text."""
    return f"<[{form.added[text]}]>" if text in form.added else json.dumps(text)


def _answer(grammar: Grammar) -> str:
    if grammar.kind == "grammar":
        what = "rules of one's own do not go with tools, and not with channels"
        raise DflashError(what, where="grammar", usage=True)
    if grammar.kind == "choice":
        return f"answer: {lark_choice(grammar.text)}"
    if grammar.kind == "regex":
        # A slash ends an expression there, and no line breaks stand in one.
        escaped = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", grammar.text, flags=re.DOTALL)
        return "answer: /" + escaped.replace("\n", r"\n") + "/"
    return f"answer: {lark_json(grammar.text)}"


def _join(rules: Iterable[str]) -> Grammar:
    return Grammar("grammar", "\n".join(rules))
