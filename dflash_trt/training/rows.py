"""Prompts from files to the rows that serving would send: split, rendered and tokenised."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_trt.core.files import FileKind, read_text
from dflash_trt.core.strict_json import parse_given
from dflash_trt.errors import DflashError, refuse_options
from dflash_trt.text.chat import Message
from dflash_trt.text.hub_prompts import HubPrompts, is_hub_address
from dflash_trt.text.prompts import check_texts
from dflash_trt.text.task_sets import name_sources
from dflash_trt.text.tokenizer import BundleTokenizer
from dflash_trt.training.observer import TrainingWatch
from dflash_trt.training.prompt_sets import TrainingSet
from dflash_trt.training.training_request import TrainRequest

HELD_OUT_SHARE = 0.05
HELD_OUT_LEAST, HELD_OUT_MOST = 16, 100
LEAST_PROMPTS = 8
LEAST_ANSWER = 16
ROLES = ("system", "developer", "user", "assistant")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """A line of a file.

    Args:
        messages: the conversation up to the answer; a "prompt" is a user's message.
        text: of a "prompt" alone, for targets without a chat template.
        answer: a known one, as text or as token ids.
        where: file and line, for errors.
    """

    messages: tuple[Message, ...]
    text: str | None
    answer: str | tuple[int, ...] | None
    set_name: str
    where: str

    @property
    def row_id(self) -> str:
        """Equal for two rows that ask the same."""
        asked = json.dumps([dict(message) for message in self.messages], sort_keys=True)
        return hashlib.sha256(asked.encode("utf-8", "surrogatepass")).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class SplitRows:
    """Rows to train on and rows to measure on, none in both.

    `repeated` were left out, and `surplus` ones for which the sets' shares have no place.
    """

    train: tuple[PromptRow, ...]
    held_out: tuple[PromptRow, ...]
    repeated: int
    surplus: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedRow:
    """A prompt that serving would send: its text, its tokens, and its answer where one is given.

    `messages` are empty where no template was used.
    """

    row_id: str
    set_name: str
    messages: tuple[Message, ...]
    text: str
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...] | None


def read_sets(given: Sequence[str]) -> tuple[list[PromptRow], dict[str, str]]:
    """Rows, and SHA-256 by set, of texts [NAME=]SOURCE: .jsonl files and addresses on the hub.

    Raises:
        DflashError: a name that stands twice, a source that cannot be used, or a line that asks
            nothing (usage).
    """
    rows: list[PromptRow] = []
    hashes: dict[str, str] = {}
    for name, source in name_sources(given).items():
        if is_hub_address(source):
            records = [
                {"prompt": one.text, "answer": one.answer}
                for one in HubPrompts.parse(source).read()
            ]
            content = "".join(f"{json.dumps(record)}\n" for record in records)
        elif source.endswith(".jsonl"):
            content = read_text(Path(source), FileKind.DATA_SET, named=True)
        else:
            fix = 'one object a line, with a "prompt" or "messages"'
            raise DflashError("prompts must be a .jsonl file", where=source, fix=fix, usage=True)
        lines = enumerate(content.split("\n"), start=1)
        found = [_read_row(line, name, f"{source}:{at}") for at, line in lines if line.strip()]
        if not found:
            raise DflashError("holds no prompt", where=source, usage=True)
        rows += found
        hashes[name] = hashlib.sha256(content.encode()).hexdigest()
    return rows, hashes


def _read_row(line: str, set_name: str, where: str) -> PromptRow:
    def refused(what: str) -> DflashError:
        return DflashError(what, where=where, usage=True)

    record = parse_given(line.encode(), where)
    read: Mapping[str, Any] = record if isinstance(record, dict) else {}
    text, messages = read.get("prompt"), read.get("messages")
    answer = read.get("answer")
    if isinstance(text, str) and messages is None:
        messages = [{"role": "user", "content": text}]
    elif not isinstance(messages, list) or text is not None or not all(map(_is_message, messages)):
        raise refused('must be an object with a text "prompt", or "messages" of role and content')
    asked: tuple[Message, ...] = tuple(
        {"role": one["role"], "content": one["content"]} for one in messages
    )
    if asked and asked[-1]["role"] == "assistant":
        if answer is not None:
            raise refused('has an "answer" and messages that end with one')
        asked, answer = asked[:-1], asked[-1]["content"]
    if not any(one["content"].strip() for one in asked if one["role"] == "user"):
        raise refused("its prompt has no text")
    check_texts([one["content"] for one in asked if one["content"]], where)
    if isinstance(answer, list) and answer and all(type(one) is int and one >= 0 for one in answer):
        answer = tuple(answer)
    elif answer is not None and not isinstance(answer, str):
        raise refused('its "answer" is neither a text nor token ids')
    return PromptRow(
        messages=asked, text=text, answer=answer or None, set_name=set_name, where=where
    )


def _is_message(item: Any) -> bool:
    is_object = isinstance(item, dict)
    return is_object and item.get("role") in ROLES and isinstance(item.get("content"), str)


def split_rows(
    prompts: Iterable[PromptRow],
    held_out: Sequence[PromptRow] | None,
    sets: Sequence[TrainingSet] = (),
) -> SplitRows:
    """Rows in an order that their hashes give, each once; without `held_out` some are split off.

    5 % of them, at least 16 and at most 100, but never more than a quarter. Where `sets` have
    shares, each beginning of both has them.

    Raises:
        DflashError: too few prompts are left (usage).
    """
    given = list(prompts)
    unique = {row.row_id: row for row in reversed(given)}
    ordered = _mix([unique[row_id] for row_id in sorted(unique)], sets)
    if held_out is None:
        share = round(HELD_OUT_SHARE * len(ordered))
        count = min(max(share, HELD_OUT_LEAST), HELD_OUT_MOST, len(ordered) // 4)
        measured, train = ordered[:count], ordered[count:]
    else:
        chosen = {row.row_id: row for row in reversed(held_out)}
        measured = [chosen[row_id] for row_id in sorted(chosen)][:HELD_OUT_MOST]
        train = [row for row in ordered if row.row_id not in chosen]
    if len(train) < LEAST_PROMPTS or not measured:
        what = f"{len(train)} different prompts to train on and {len(measured)} to measure on"
        fix = f"give at least {2 * LEAST_PROMPTS}"
        raise DflashError(f"{what} are too few", where="--prompts", fix=fix, usage=True)
    repeated = len(given) - len(unique)
    return SplitRows(tuple(train), tuple(measured), repeated, len(unique) - len(ordered))


def _mix(rows: Sequence[PromptRow], sets: Sequence[TrainingSet]) -> list[PromptRow]:
    """Rows in an order of which each beginning has the sets' shares; it ends where a set does.

    Without shares that is all rows, as they come.
    """
    stated = {one.name: one.share for one in sets if one.share is not None}
    if not stated:
        return list(rows)
    queues: dict[str, deque[PromptRow]] = defaultdict(deque)
    for row in rows:
        queues[row.set_name].append(row)
    others = sum(len(queue) for name, queue in queues.items() if name not in stated)
    whole = sum(stated.values()) if not others else 1.0
    weights = {
        name: stated[name] / whole
        if name in stated
        else (1 - sum(stated.values())) * len(queues[name]) / others
        for name in queues
    }
    mixed: list[PromptRow] = []
    taken: Counter[str] = Counter()
    while True:
        name = max(weights, key=lambda one: weights[one] * (len(mixed) + 1) - taken[one])
        if not queues[name]:
            return mixed
        mixed.append(queues[name].popleft())
        taken[name] += 1


class PromptRenderer:
    """Renders rows with the tokenizer and the template that the bundle will have.

    Attributes:
        variables: of the template, beside the usual ones.
        uses_template: False for prompts that go to the target as they are.
        takes_answers: whether the rows' answers are the target's own.
    """

    def __init__(
        self,
        tokenizer: BundleTokenizer,
        request: TrainRequest,
        configured: Mapping[str, bool | str],
        end_ids: tuple[int, ...],
        max_length: int,
    ) -> None:
        self._tokenizer, self._end_ids, self._max_length = tokenizer, end_ids, max_length
        self._system, self.takes_answers = request.system_prompt, request.given_answers
        self.variables = {**configured, **request.template_options}
        self.uses_template = tokenizer.chat_template is not None and not request.raw
        if not self.uses_template:
            variables = request.template_options or None
            given = {"--system-prompt": self._system, "--template-option": variables}
            refuse_options(given, "needs a chat template, and none is used")

    @property
    def template_sha256(self) -> str | None:
        """Hash of the template's source; None where none is used."""
        if not self.uses_template:
            return None
        return hashlib.sha256((self._tokenizer.chat_template or "").encode()).hexdigest()

    def render(
        self, rows: Iterable[PromptRow], on_row: Callable[[], None] = lambda: None
    ) -> list[RenderedRow]:
        """The rows that leave room for an answer.

        Raises:
            DflashError: a row or a variable that the template does not take.
        """
        rendered = []
        renderer = self._tokenizer.open_renderer() if self.uses_template else None
        with nullcontext() if renderer is None else closing(renderer):
            for name in self.variables:
                if renderer is not None and not renderer.knows(name):
                    what = f"the chat template knows no {name}"
                    raise DflashError(what, where="--template-option", usage=True)
            for row in rows:
                if renderer is not None:
                    text = renderer.render(self._conversation(row), self.variables)
                elif row.text is None:
                    what = "a conversation needs a chat template, and none is used"
                    fix = 'give a "prompt", which goes to the target as it is'
                    raise DflashError(what, where=row.where, fix=fix, usage=True)
                else:
                    text = row.text
                ids = tuple(self._tokenizer.encode(text, special=renderer is None))
                if ids and len(ids) + LEAST_ANSWER <= self._max_length:
                    rendered.append(self._finish(row, text, ids))
                on_row()
        return rendered

    def _finish(self, row: PromptRow, text: str, ids: tuple[int, ...]) -> RenderedRow:
        answer = row.answer if self.takes_answers else None
        if isinstance(answer, str):
            # As the target would have ended it.
            answer = (*self._tokenizer.encode(answer, special=False), *self._end_ids[:1])
        return RenderedRow(
            row_id=row.row_id,
            set_name=row.set_name,
            messages=self._conversation(row) if self.uses_template else (),
            text=text,
            prompt_ids=ids,
            answer_ids=None if answer is None else answer[: self._max_length - len(ids)],
        )

    def _conversation(self, row: PromptRow) -> tuple[Message, ...]:
        if self._system is None:
            return row.messages
        if row.messages[0]["role"] == "system":
            what = "begins with a system prompt of its own"
            raise DflashError(what, where=row.where, fix="leave out --system-prompt", usage=True)
        return ({"role": "system", "content": self._system}, *row.messages)


@dataclass(slots=True)
class RenderedRows:
    """Prompts to train on, and prompts to measure on."""

    train: list[RenderedRow]
    held_out: list[RenderedRow]


def render_rows(renderer: PromptRenderer, rows: SplitRows, watch: TrainingWatch) -> RenderedRows:
    """All prompts as serving sends them; says which are left out.

    Raises:
        DflashError: see `PromptRenderer.render`; no prompt leaves room for an answer.
    """
    count = len(rows.train) + len(rows.held_out)
    watch.stage("rendering prompts", count, "steps")
    train, held_out = (
        renderer.render(some, lambda: watch.advance(1)) for some in (rows.train, rows.held_out)
    )
    too_long = count - len(train) - len(held_out)
    if too_long or rows.repeated:
        watch.say(
            f"left out {rows.repeated:,} repeated prompts, and {too_long:,} that are too long for "
            "--set max-length"
        )
    if rows.surplus:
        watch.say(f"left out {rows.surplus:,} prompts that the sets' shares have no place for")
    if any(row.answer is not None for row in rows.train) and not renderer.takes_answers:
        watch.say("the prompts' answers are not used: the target gives its own (--given-answers)")
    if not train or not held_out:
        what = "no prompt leaves room for an answer"
        raise DflashError(what, where="--prompts", fix="raise --set max-length", usage=True)
    return RenderedRows(train, held_out)
