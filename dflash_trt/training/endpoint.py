"""Answers of an OpenAI-compatible server, which must be the target and read what is served."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from dflash_trt.errors import DflashError, one_line
from dflash_trt.sampling.params import SamplingParams
from dflash_trt.serving.client.openai_chat import OpenAiConnection, neutral_sampling
from dflash_trt.text.tokenizer import BundleTokenizer
from dflash_trt.training.rows import RenderedRow

_ANSWER_S = 900.0
_CONCURRENCY = 32
"""Prompts asked at a time: what fills a server's batch; it queues what is more."""
_ROUND = 4


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """How answers are made.

    Args:
        answer_tokens: most tokens of one.
        max_length: most tokens of a prompt and its answer.
        seed: with the row, the seed of its sampling.
    """

    answer_tokens: int
    max_length: int
    temperature: float
    seed: int

    def room(self, row: RenderedRow) -> int:
        """Most tokens of this row's answer."""
        return min(self.answer_tokens, self.max_length - len(row.prompt_ids))

    def sampling(self, row: RenderedRow) -> SamplingParams:
        """Depends on nothing but the row and the seed, so that a resumed run says the same."""
        seed = (int(row.row_id, 16) ^ self.seed) & (2**63 - 1)
        return SamplingParams(temperature=self.temperature, seed=seed)


class AnswerServer:
    """A server at `url`, with or without /v1.

    Args:
        model: its name for the target; None takes the only one that it lists.
        variables: of the chat template, as serving gives them.
        end_ids: the model's end-of-sequence ids; the first is put where an answer stopped.

    Raises:
        DflashError: no server, no such model.
    """

    def __init__(
        self,
        url: str,
        model: str | None,
        answers: AnswerOptions,
        tokenizer: BundleTokenizer,
        variables: Mapping[str, bool | str],
        end_ids: tuple[int, ...],
    ) -> None:
        unreachable = "start the server, or leave out --answers-from"
        self._server = OpenAiConnection(url, "--answers-from", unreachable)
        self._base = self._server.base
        self._answers, self._tokenizer = answers, tokenizer
        self._variables, self._end_ids = dict(variables), end_ids
        self.model = self._find_model(model)

    @property
    def round_rows(self) -> int:
        return _ROUND * _CONCURRENCY

    def answer(
        self, rows: Sequence[RenderedRow], on_answer: Callable[[int, Sequence[int]], None]
    ) -> None:
        """See `LocalAnswerer`.

        Raises:
            DflashError: the server fails, or reads other tokens than serving would send.
        """
        with ThreadPoolExecutor(_CONCURRENCY) as pool:
            asked = {pool.submit(self.ask, row): index for index, row in enumerate(rows)}
            try:
                for done in as_completed(asked):
                    on_answer(asked[done], done.result())
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def ask(self, row: RenderedRow, greedy_tokens: int | None = None) -> list[int]:
        """The answer's tokens; of `greedy_tokens` likeliest ones where that is given."""
        options = self._answers
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": greedy_tokens or options.room(row),
            "temperature": 0.0 if greedy_tokens else options.temperature,
            "seed": options.sampling(row).seed,
            **self._neutral,
        }
        if row.messages:
            body["messages"] = [dict(message) for message in row.messages]
            if self._variables:
                body["chat_template_kwargs"] = self._variables
            if self._neutral:  # it is ours; others may refuse the field
                body["separate_reasoning"] = False
            reply = self._server.read("/chat/completions", body, _ANSWER_S)
        else:
            reply = self._server.read("/completions", {**body, "prompt": row.text}, _ANSWER_S)
        return self._read_answer(reply, row)

    def _read_answer(self, reply: dict[str, Any], row: RenderedRow) -> list[int]:
        try:
            choice = reply["choices"][0]
            said = choice.get("message", choice)
            text, reason = said.get("content", said.get("text")) or "", choice["finish_reason"]
            read = reply["usage"]["prompt_tokens"]
            ids = self._tokenizer.encode(text, special=False)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            what = f"its reply has no answer or no usage ({one_line(repr(error), 60)})"
            raise DflashError(what, where=self._base) from error
        if said.get("reasoning_content") or said.get("reasoning"):
            fix = "start it without a reasoning parser, so that answers come as they were said"
            raise DflashError("takes the reasoning out of answers", where=self._base, fix=fix)
        if read != len(row.prompt_ids):
            raise DflashError(
                f"reads {read} tokens where serving sends {len(row.prompt_ids)}: its tokenizer, "
                "chat template or thinking mode is another",
                where=self._base,
                fix="start it with the target's, and give --template-option as it is served",
            )
        return [*ids, *self._end_ids[:1]] if reason == "stop" else ids or list(self._end_ids[:1])

    def _find_model(self, wanted: str | None) -> str:
        described = self._server.list_models()
        self._neutral = neutral_sampling(described)
        names = [str(one.get("id")) for one in described]
        if wanted in names or (wanted is None and len(names) == 1):
            return wanted or names[0]
        what = "which of its models is the target?" if wanted is None else f"has no {wanted!r}"
        shown = ", ".join(one_line(name, 60) for name in names[:5])
        raise DflashError(
            f"{what} it lists {shown}",
            where=self._base,
            fix="pass --set endpoint-model=NAME",
            usage=True,
        )
