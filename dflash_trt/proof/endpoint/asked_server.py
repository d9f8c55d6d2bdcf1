"""A server at a URL that is asked prompts, alone and beside each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from dflash_trt.core.progress import Progress
from dflash_trt.errors import one_line
from dflash_trt.proof.endpoint.told_answer import ToldAnswer, read_answer
from dflash_trt.serving.client.draft_counts import METRICS, read_metrics
from dflash_trt.serving.client.openai_chat import (
    HttpStatusError,
    OpenAiConnection,
    name_server,
    neutral_sampling,
    version_path,
)
from dflash_trt.text.tokenizer import BundleTokenizer

ANSWER_S = 300.0
"""Most seconds of an answer, and of silence in it."""
LIKELIEST = 5
_REFUSED = (400, 422, 500, 501)

Prompt = str | tuple[int, ...]
"""A user's message, or token ids."""
Sets = Mapping[str, Sequence[Prompt]]
"""Prompts by the name of their set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """How prompts are asked: `raw` without the chat template; `thinking` is a switch of it."""

    max_tokens: int
    temperature: float = 0.0
    raw: bool = False
    thinking: bool | None = None


class AskedServer:
    """The server at `url`; the first model that it lists is asked.

    `tokenizer` is the one that prompts of ids come from.

    Raises:
        DflashError: nobody answers, or it is no OpenAI-compatible server; errors name `option`.
    """

    def __init__(self, url: str, option: str, tokenizer: BundleTokenizer | None = None) -> None:
        self.tokenizer = tokenizer
        self._connection = OpenAiConnection(url, option, f"is the server of {option} there?")
        self.base = self._connection.base
        models = self._connection.list_models()
        self.owner, self.model = str(models[0].get("owned_by") or "server"), str(models[0]["id"])
        told = self._connection.read_above(version_path(self.owner))
        self.title = f"{name_server(self.owner, told)}, {one_line(self.model, 120)}"
        self._neutral = neutral_sampling(models)
        self._forms: dict[str, tuple[bool, bool]] = {}

    def read_metrics(self) -> dict[str, float]:
        """What its metrics tell of drafts now; nothing where it has none."""
        texts = map(self._connection.read_above, METRICS)
        return next(filter(None, map(read_metrics, texts)), {})

    def ask_all(
        self,
        prompts: Sequence[Prompt],
        asking: Asking,
        progress: Progress,
        beside: int = 1,
        first: int = 0,
    ) -> list[ToldAnswer]:
        """The answers in order, `beside` requests at a time; too few prompts are repeated.

        Each prompt's number, from `first`, is its seed: a drawn answer can be asked for again.

        Raises:
            DflashError: an answer that fails, breaks off or takes longer than ANSWER_S.
        """

        def ask(number: int) -> ToldAnswer:
            place = number % len(prompts)
            answer = self._ask(first + place, prompts[place], asking)
            progress.advance(1)
            return answer

        numbers = range(max(len(prompts), beside))
        if beside == 1:  # Ctrl-C would wait for a thread
            return [ask(number) for number in numbers]
        with ThreadPoolExecutor(beside) as pool:
            try:
                return [*pool.map(ask, numbers)][: len(prompts)]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _ask(self, seed: int, prompt: Prompt, asking: Asking) -> ToldAnswer:
        """One answer; of each kind the first finds out what may be asked for beside it."""
        is_text = asking.raw or not isinstance(prompt, str)
        path = "/completions" if is_text else "/chat/completions"
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": asking.max_tokens,
            "temperature": asking.temperature,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._neutral,
        }
        chat = [{"role": "user", "content": prompt}]
        body |= {"prompt": prompt} if is_text else {"messages": chat}
        if asking.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": asking.thinking}
        tops = {"logprobs": LIKELIEST} if is_text else {"logprobs": True, "top_logprobs": LIKELIEST}
        forms = [(True, True), (False, True), (True, False), (False, False)]
        for form in forms if path not in self._forms else [self._forms[path]]:
            more = ({"return_token_ids": True} if form[0] else {}) | (tops if form[1] else {})
            try:
                stream = self._connection.events(path, body | more, ANSWER_S, ANSWER_S)
                with closing(stream):
                    answer = read_answer(stream, self.base)
            except HttpStatusError as error:
                if form == forms[-1] or path in self._forms or error.status not in _REFUSED:
                    raise
                continue
            self._forms[path] = form
            return answer
        raise AssertionError
