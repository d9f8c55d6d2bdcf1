"""A bundle that is ready to run in this process: prompts in, texts and statistics out."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from collections.abc import Generator as Iterating
from contextlib import aclosing, closing, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, Self, Unpack, cast

from dflash_trt.backends.base import Executor
from dflash_trt.backends.registry import check_runnable, open_executor
from dflash_trt.bundle.bundle import Bundle, load_tokenizer, open_bundle
from dflash_trt.core.limits import Threads
from dflash_trt.core.validation import check_value
from dflash_trt.decoding import (
    Generator,
    GeneratorOptions,
    Request,
    RequestFailedError,
    RequestResult,
    SamplingParams,
    TokenEvent,
)
from dflash_trt.decoding.drafter_kinds import DFLASH, DrafterKind
from dflash_trt.decoding.host import GeneratorHost
from dflash_trt.decoding.jobs import JobRunner
from dflash_trt.decoding.request import ContinuationOptions
from dflash_trt.decoding.tuning.bundle_schedule import (
    AUTO,
    NONE,
    check_drafter,
    choose_schedule,
)
from dflash_trt.errors import DflashError, nearest
from dflash_trt.graph.bindings import GraphName
from dflash_trt.hardware.cores import AUTO as ALL_CORES
from dflash_trt.hardware.cores import ThreadChoice, choose_threads
from dflash_trt.sampling.token_rules import TokenRules
from dflash_trt.text.chat import ChatRenderer, Message, as_messages
from dflash_trt.text.grammar import Follower, GrammarCompiler
from dflash_trt.text.harmony import HarmonyFormat
from dflash_trt.text.thoughts import AnswerFormat, find_format, open_answer
from dflash_trt.text.tokenizer import BundleTokenizer

Prompt = str | Sequence[int] | Sequence[Message]
"""A text as it is, token ids, or a conversation for the chat template: {"role", "content"} each."""


class _TokenOptions(ContinuationOptions, total=False):
    speculate: bool
    block_size: int | None
    rules: TokenRules
    grammar: Follower | None


class RequestOptions(_TokenOptions, total=False):
    """How a prompt is continued, beside its sampling; see `Request`.

    `template_options` are variables of the chat template, as {"enable_thinking": False}.
    """

    template_options: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """The answer to a conversation; `reasoning` is None where the model does not mark it."""

    text: str
    reasoning: str | None
    result: RequestResult


class LoadedPair:
    """Target and draft of a bundle, with one executor and one generator.

    What is asked for at the same time is batched continuously. A request's tokens depend on its
    prompt, options and seed alone, not on its neighbours or on speculation; see `Generator`.

    Args:
        bundle: an opened bundle.
        threads: CPU threads of a step; "auto" gives a target that is not small the physical cores
            that this process may use. `threads` of the pair says how many that are.
        speculation: False decodes with the baseline graph, target_only.
        block_size: rows of every verify step, anchor included; None is the trained block.
        block_schedule: which block at how many sequences: "auto" (the bundle's own, unless what it
            would decide is fixed; without one, no drafts while they cost more than they bring),
            "none", or a file.
        drafter: who fills the blocks: "dflash", the bundle's draft, or "prompt-lookup", what
            followed the same tokens before.
        graphs: to open from the start beside those that decoding needs, so that no measurement
            waits for one.

    Raises:
        DflashError: this machine cannot run the bundle, or a schedule that does not fit.
    """

    def __init__(
        self,
        bundle: Bundle,
        *,
        threads: ThreadChoice = ALL_CORES,
        speculation: bool = True,
        block_size: int | None = None,
        block_schedule: str | Path = AUTO,
        drafter: DrafterKind = DFLASH,
        graphs: Iterable[GraphName] = (),
    ) -> None:
        check_value("threads", threads, Threads | Literal["auto"])
        check_runnable(bundle)
        check_value("drafter", drafter, DrafterKind)
        check_drafter(bundle, drafter)
        is_fixed = block_size is not None or not speculation
        if is_fixed and block_schedule == AUTO:
            block_schedule = NONE
        self.bundle = bundle
        self.schedule = choose_schedule(bundle, str(block_schedule), drafter)
        self.threads = choose_threads(threads, bundle.manifest.target.parameters)
        self._options = GeneratorOptions(
            speculation=speculation,
            block_size=block_size,
            prefill_chunk=bundle.manifest.limits.prefill_chunk,
            schedule=self.schedule,
            live=self.schedule is None and str(block_schedule) == AUTO,
            drafter=drafter,
        )
        drafts = self._options.graph == "target"
        needed: list[GraphName] = ["target", "draft"] if drafts else ["target_only"]
        self._graphs = dict.fromkeys([*needed, *graphs])
        self._host = GeneratorHost(self.open_runner)
        self._renderer: ChatRenderer | None = None
        self._rendering = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @cached_property
    def tokenizer(self) -> BundleTokenizer:
        """The bundle's tokenizer; DflashError when it was built without one."""
        return load_tokenizer(self.bundle)

    @cached_property
    def answer_format(self) -> AnswerFormat | None:
        """What tells an answer from its reasoning, for models that mark it."""
        return find_format(self.tokenizer.core)

    @property
    def executor(self) -> Executor:
        """What runs the graphs: for measurements, while the pair itself does nothing."""
        return self._host.open().executor

    @property
    def used_slots(self) -> int:
        """Slots that hold a request, of the bundle's max_batch."""
        return self._host.open().generator.used_slots

    def open(self) -> None:
        """Loads the graphs and weights now; else the first request does."""
        self._host.open()

    def close(self) -> None:
        """Ends what runs and releases everything; may be called twice."""
        self._host.close()
        if self._renderer is not None:
            self._renderer.close()

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """What compiles the `grammar` of a request."""
        target = self.bundle.manifest.target
        return GrammarCompiler(self.tokenizer.core, target.vocab_size, target.eos_token_ids)

    def request(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Request:
        """The request that `generate` and `stream` make of a prompt.

        Raises:
            DflashError: a value that no generator could accept (usage), a prompt that the
                tokenizer or the chat template refuses.
        """
        known = [*RequestOptions.__annotations__]
        for key in set(options).difference(known):
            near = " (see SamplingParams)" if hasattr(SamplingParams, key) else nearest(key, known)
            raise DflashError(f"no such option{near}", where=key, usage=True)
        variables = options.pop("template_options", {})
        ids = tuple(self._encode(prompt, variables))
        sampling = SamplingParams() if sampling is None else sampling
        return Request(prompt_ids=ids, sampling=sampling, **cast(_TokenOptions, options))

    def check(self, requests: Sequence[Request]) -> None:
        """Raises DflashError (usage) for a request that cannot run, saying which of several."""
        generator = self._host.open().generator
        for number, request in enumerate(requests, start=1):
            try:
                generator.check(request)
            except DflashError as error:
                if len(requests) == 1:
                    raise
                where, fix = f"{error.where} {number}", error.fix
                raise DflashError(error.what, where=where, fix=fix, usage=error.usage) from error

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[RequestResult]:
        """Continues `prompts` together; results in their order. Greedy without `sampling`.

        Raises:
            DflashError: see `request` and `run`.
        """
        if isinstance(prompts, str | bytes):
            raise DflashError("is one text, not a list of prompts", where="prompts", usage=True)
        return self.run([self.request(prompt, sampling, **options) for prompt in prompts])

    def run(
        self,
        requests: Sequence[Request],
        on_event: Callable[[int, TokenEvent], bool | None] | None = None,
    ) -> list[RequestResult]:
        """Runs `requests` together to their end; results in their order.

        `on_event(index, event)` is told what each step did for the request at `index`; that it
        returns True ends this request, whose finish reason is "cancelled" then.

        Raises:
            DflashError: a request that cannot run, before any of them does (usage).
            RequestFailedError: one that cannot go on, when the others have ended; it has their
                results.
        """
        self.check(requests)
        results: list[RequestResult | None] = [None] * len(requests)
        with closing(self._host.events(requests)) as events, suppress(StopIteration):
            wish: bool | None = None
            try:
                while True:
                    index, event = events.send(wish)
                    results[index] = event.result
                    wish = None if on_event is None else on_event(index, event)
            except RequestFailedError as error:
                error.results = results
                raise
        return [one for one in results if one is not None]  # all of them: none has failed

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Iterating[TokenEvent, None, None]:
        """What every step adds to the output; the last event has the result.

        Nothing runs before the first event is asked for, nor while none is: use `astream` to go
        on meanwhile. Closing the iterator cancels the request and frees its slot at once.

        Raises:
            DflashError: see `request` and `run`.
        """
        request = self.request(prompt, sampling, **options)
        self.check([request])
        return self._stream(request)

    async def astream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[TokenEvent, None]:
        """As `stream`, while the event loop does other things; several at a time are batched.

        A thread runs the steps from then on. Closing the iterator (`contextlib.aclosing`), or
        cancelling the task that waits in it, cancels the request; its slot is free before the
        next step.

        Raises:
            DflashError: see `request` and `run`; an executor that failed.
        """
        # Neither a chat template nor the weights may hold up the event loop.
        request = await asyncio.to_thread(self.request, prompt, sampling, **options)
        async with aclosing(self._host.stream(request)) as events:
            async for event in events:
                yield event

    def chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> ChatAnswer:
        """The answer to a conversation of messages, each {"role": …, "content": …}.

        Raises:
            DflashError: no conversation, no chat template, or see `request` and `run`.
        """
        if not messages or not all(isinstance(one, Mapping) for one in messages):
            what = "must be a list of messages, each with a role and a content"
            raise DflashError(what, where="messages", usage=True)
        request = self.request(messages, sampling, **options)
        (result,) = self.run([request])
        form = self.answer_format
        if form is None:
            return ChatAnswer(text=result.text or "", reasoning=None, result=result)
        is_marked = isinstance(form, HarmonyFormat) or form.closing in result.token_ids
        if request.grammar is not None and not is_marked:
            # A grammar without the mark of reasoning is the answer's alone.
            return ChatAnswer(text=result.text or "", reasoning="", result=result)
        stream = open_answer(form, request.stop_strings, request.prompt_ids)
        piece = stream.push(result.token_ids) + stream.flush()
        return ChatAnswer(text=piece.content, reasoning=piece.reasoning, result=result)

    def make_generator(self, options: GeneratorOptions) -> Generator:
        """Another generator on the pair's executor, for measurements; it makes no text."""
        eos = self.bundle.manifest.target.eos_token_ids
        return Generator(self.executor, eos_token_ids=eos, options=options)

    def open_runner(self) -> JobRunner:
        """An executor and a generator of their own, for a `GeneratorWorker`; else see `run`."""
        executor = open_executor(self.bundle, threads=self.threads, graphs=self._graphs)
        generator = Generator(
            executor,
            tokenizer=self.tokenizer.core if self.bundle.tokenizer_folder else None,
            eos_token_ids=self.bundle.manifest.target.eos_token_ids,
            options=self._options,
        )
        return JobRunner(generator, executor)

    def _stream(self, request: Request) -> Iterating[TokenEvent, None, None]:
        with closing(self._host.events([request])) as events:
            for _, event in events:
                yield event

    def _encode(self, prompt: Prompt, variables: Mapping[str, object]) -> Sequence[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        messages = as_messages(prompt)
        if messages is None:
            return [one for one in prompt if not isinstance(one, Mapping)]
        with self._rendering:
            if self._renderer is None:
                self._renderer = self.tokenizer.open_renderer()
            if self._renderer is None:
                raise DflashError(
                    "the tokenizer has no chat template",
                    where="prompt",
                    fix="pass a text to `generate` instead of messages",
                    usage=True,
                )
            text = self._renderer.render(messages, variables)
        # The template writes the special tokens itself.
        return self.tokenizer.encode(text, special=False)


def load(
    folder: str | Path,
    *,
    threads: ThreadChoice = ALL_CORES,
    speculation: bool = True,
    block_size: int | None = None,
    block_schedule: str | Path = AUTO,
    drafter: DrafterKind = DFLASH,
) -> LoadedPair:
    """Opens the bundle in `folder` and loads it; see `LoadedPair`.

    Raises:
        DflashError: not a bundle, one that this machine cannot run, or a value out of range.
    """
    check_value("folder", folder, str | os.PathLike[str])
    pair = LoadedPair(
        open_bundle(folder),
        threads=threads,
        speculation=speculation,
        block_size=block_size,
        block_schedule=block_schedule,
        drafter=drafter,
    )
    pair.open()
    return pair
