"""Prompts as serving sends them: chat template, system prompt and thinking mode, then tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass

from dflash_trt.errors import DflashError
from dflash_trt.text.chat import ChatRenderer, Message
from dflash_trt.text.tokenizer import BundleTokenizer
from dflash_trt.training.observer import TrainingWatch
from dflash_trt.training.training_request import DataOptions
from dflash_trt.training.training_rows import HELD_OUT_MOST, PromptRow, SplitRows

LEAST_ANSWER = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedRow:
    """A prompt that serving would send: its text, its tokens, and its answer where one is given.

    `messages` are empty where no template was used.
    """

    row_id: str
    set_name: str
    category: str | None
    messages: tuple[Message, ...]
    text: str
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...] | None


class PromptRenderer:
    """Renders rows with the tokenizer and the template that the bundle will have.

    Attributes:
        variables: of the template, beside the usual ones.
        uses_template: False for prompts that go to the target as they are.
    """

    def __init__(
        self,
        tokenizer: BundleTokenizer,
        data: DataOptions,
        configured: Mapping[str, bool | str],
        end_ids: tuple[int, ...],
        max_length: int,
    ) -> None:
        self._tokenizer, self._end_ids, self._max_length = tokenizer, end_ids, max_length
        self._system, self._takes_answers = data.system_prompt, data.given_answers
        self.variables = {**configured, **data.template_options}
        self.uses_template = tokenizer.chat_template is not None and not data.raw
        if not self.uses_template:
            for option, given in (
                ("--system-prompt", data.system_prompt is not None),
                ("--template-option", bool(data.template_options)),
            ):
                if given:
                    what = "needs a chat template, and none is used"
                    raise DflashError(what, where=option, usage=True)

    @property
    def template_sha256(self) -> str | None:
        """Hash of the template's source; None where none is used."""
        if not self.uses_template:
            return None
        return hashlib.sha256((self._tokenizer.chat_template or "").encode()).hexdigest()

    def render(
        self, rows: Iterable[PromptRow], on_row: Callable[[], None] = lambda: None
    ) -> tuple[list[RenderedRow], int]:
        """The rows that leave room for an answer, and how many do not.

        Raises:
            DflashError: a row whose stated tokens are not what serving sends, a template that
                fails, or a template variable that it does not know.
        """
        rendered, too_long = [], 0
        with ExitStack() as stack:
            renderer = self._tokenizer.open_renderer() if self.uses_template else None
            if renderer is not None:
                stack.enter_context(closing(renderer))
                self._check_variables(renderer)
            for row in rows:
                text = self._text(row, renderer)
                ids = tuple(self._tokenizer.encode(text, special=renderer is None))
                _check_stated(row, ids)
                if not ids or len(ids) + LEAST_ANSWER > self._max_length:
                    too_long += 1
                else:
                    rendered.append(self._finish(row, text, ids))
                on_row()
        return rendered, too_long

    def _finish(self, row: PromptRow, text: str, ids: tuple[int, ...]) -> RenderedRow:
        answer = row.answer if self._takes_answers else None
        if isinstance(answer, str):
            # As the target would have ended it.
            answer = (*self._tokenizer.encode(answer, special=False), *self._end_ids[:1])
        if answer is not None:
            answer = answer[: self._max_length - len(ids)]
        return RenderedRow(
            row_id=row.row_id,
            set_name=row.set_name,
            category=row.category,
            messages=self._conversation(row) if self.uses_template else (),
            text=text,
            prompt_ids=ids,
            answer_ids=answer,
        )

    def _conversation(self, row: PromptRow) -> tuple[Message, ...]:
        if self._system is None:
            return row.messages
        if row.messages[0]["role"] == "system":
            what = "begins with a system prompt of its own"
            raise DflashError(what, where=row.where, fix="leave out --system-prompt", usage=True)
        return ({"role": "system", "content": self._system}, *row.messages)

    def _text(self, row: PromptRow, renderer: ChatRenderer | None) -> str:
        if renderer is not None:
            return renderer.render(self._conversation(row), self.variables)
        if row.text is None:
            what = "a conversation needs a chat template, and none is used"
            fix = 'give a "prompt", which goes to the target as it is'
            raise DflashError(what, where=row.where, fix=fix, usage=True)
        return row.text

    def _check_variables(self, renderer: ChatRenderer) -> None:
        for name in self.variables:
            if not renderer.knows(name):
                what = f"the chat template knows no {name}"
                raise DflashError(what, where="--template-option", usage=True)


@dataclass(slots=True)
class RenderedRows:
    """Prompts to train on, and prompts to measure on."""

    train: list[RenderedRow]
    held_out: list[RenderedRow]


def render_rows(
    renderer: PromptRenderer, rows: SplitRows, data: DataOptions, watch: TrainingWatch
) -> RenderedRows:
    """All prompts as serving sends them; says which are left out.

    Raises:
        DflashError: see `PromptRenderer.render`; no prompt leaves room for an answer.
    """
    watch.stage("rendering prompts", len(rows.train) + len(rows.held_out), "steps")
    train, long = renderer.render(rows.train, lambda: watch.advance(1))
    held_out, too_long = renderer.render(rows.held_out, lambda: watch.advance(1))
    for count, what in (
        (long + too_long, "too long for --set max-length"),
        (rows.repeated, "repeated"),
    ):
        if count:
            watch.say(f"left out {count:,} prompts that are {what}")
    if rows.unmeasured:
        watch.say(
            f"{rows.unmeasured:,} held-out prompts are not measured on: {HELD_OUT_MOST} tell enough"
        )
    brought = sum(row.answer is not None for row in rows.train)
    if brought and not data.given_answers:
        watch.say(
            f"{brought:,} prompts bring answers, which are not used: the target gives its own "
            "(--given-answers takes theirs)"
        )
    if not train or not held_out:
        what = "no prompt leaves room for an answer"
        raise DflashError(what, where="--prompts", fix="raise --set max-length", usage=True)
    return RenderedRows(train, held_out)


def _check_stated(row: PromptRow, ids: tuple[int, ...]) -> None:
    """Refuses a row that was made with another template or tokenizer than serving has."""
    stated = row.prompt_ids
    if stated is None or stated == ids:
        return
    pairs = zip(stated, ids, strict=False)
    least = min(len(stated), len(ids))
    parting = next((at for at, (old, new) in enumerate(pairs) if old != new), least)
    raise DflashError(
        f"its prompt_ids ({len(stated)} tokens) are not what serving sends ({len(ids)}): they part "
        f"at token {parting}",
        where=row.where,
        fix="it was made with another tokenizer, chat template, system prompt or thinking mode; "
        "make its answers again",
        usage=True,
    )
