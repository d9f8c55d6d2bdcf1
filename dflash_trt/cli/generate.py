"""`dflash-trt generate`."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import click

from dflash_trt.bundle.bundle import bound_memory, open_bundle
from dflash_trt.cli.chat import PairSpeaker, ServedSpeaker, hold_chat
from dflash_trt.cli.generation_output import OpenAnswer, TextWriter, showable
from dflash_trt.cli.options import (
    FILE,
    FOLDER,
    PromptOptions,
    block_schedule_option,
    json_option,
    name_threads,
    option_group,
    prompt_options,
    refuse_given,
    sampling_options,
    show_note,
    show_thread_note,
    speculation_option,
    threads_option,
)
from dflash_trt.core.strict_json import read_json_object
from dflash_trt.decoding import RequestResult, SamplingParams
from dflash_trt.decoding.drafter_kinds import DFLASH, NOBODY, Drafting
from dflash_trt.decoding.request import ContinuationOptions
from dflash_trt.decoding.tuning.break_even import (
    DraftedSteps,
    low_acceptance,
    own_schedule,
    schedule_break_even,
)
from dflash_trt.decoding.tuning.bundle_schedule import AUTO, NONE
from dflash_trt.errors import DflashError
from dflash_trt.hardware.cores import ThreadChoice
from dflash_trt.pair import LoadedPair
from dflash_trt.serving.client.client import GenerationRequest, ServedModel
from dflash_trt.serving.client.openai_chat import OpenAiChat
from dflash_trt.text.grammar import Grammar, schema_text
from dflash_trt.text.thoughts import open_answer

MAX_TOKENS = 128
DEFAULT_GRPC_PORT = 8001
# As many as keep a server busy; a queue is the server's own and may be short.
MAX_IN_FLIGHT = 16
PROMPT_OPTIONS = {"prompt", "prompt_file", "raw", "view", "as_json"}
LOCAL_OPTIONS = {"bundle", "block_schedule", "view", "drafter", "threads"}
STRUCTURE = {"json_schema", "regex"}
"""The parameters of `structure_options`."""


@dataclass(frozen=True, slots=True)
class StructureOptions:
    """A JSON schema in a file, or a regular expression."""

    json_schema: Path | None
    regex: str | None

    def read(self, *, ignore_eos: bool) -> Grammar | None:
        """The grammar; None where none is asked for.

        Raises:
            DflashError: both are given, a file that cannot be used, or outputs do not end (usage).
        """
        if self.json_schema is None and self.regex is None:
            return None
        option = "--regex" if self.json_schema is None else "--json-schema"
        if self.json_schema is not None and self.regex is not None:
            raise DflashError("give --json-schema or --regex, not both", usage=True)
        if ignore_eos:
            what = "does not go with --ignore-eos: what is whole ends there"
            raise DflashError(what, where=option, usage=True)
        try:
            if self.json_schema is None:
                return Grammar("regex", self.regex or "")
            schema = read_json_object(self.json_schema, named=True)
            return Grammar("json_schema", schema_text(schema))
        except DflashError as error:
            where = option if error.where == "grammar" else error.where
            raise DflashError(error.what, where=where, fix=error.fix, usage=True) from error


structure_options = option_group(
    "structure",
    StructureOptions,
    click.option("--json-schema", type=FILE, help="Outputs are JSON that fits the schema in FILE."),
    click.option("--regex", help="Outputs match the regular expression."),
)


@click.command("generate")
@click.argument("bundle", required=False, type=FOLDER)
@click.option("--url", help="Ask a served model (grpc://HOST:PORT) instead of a bundle.")
@prompt_options
@click.option(
    "--chat",
    "is_chat",
    is_flag=True,
    help="Talk in the terminal; --url http://HOST:PORT/v1 too, or grpc:// and the BUNDLE served.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    help=f"Of an answer.  [default: {MAX_TOKENS}; --chat: what the context has room for]",
)
@sampling_options
@click.option("--stop", "stops", multiple=True, help="Text that ends the output; repeatable.")
@structure_options
@click.option("--ignore-eos", is_flag=True, help="Go on past the end-of-sequence token.")
@block_schedule_option
@speculation_option
@click.option(
    "--view", is_flag=True, help="Colour accepted drafts (green) and the target's own (yellow)."
)
@threads_option
@json_option
@click.pass_context
def command(
    context: click.Context,
    bundle: Path | None,
    url: str | None,
    prompts: PromptOptions,
    is_chat: bool,
    max_tokens: int | None,
    sampling: SamplingParams,
    stops: tuple[str, ...],
    structure: StructureOptions,
    ignore_eos: bool,
    block_schedule: str,
    drafter: Drafting,
    view: bool,
    threads: ThreadChoice,
    as_json: bool,
) -> None:
    """Continue prompts with the pair in BUNDLE, or with the one that is served at --url.

    Text streams to stdout, statistics go to stderr. Several prompts run together and are
    printed in order. A prompt is a user's message where the tokenizer has a chat template.
    With --chat, messages are read from the terminal, and the conversation is remembered.
    """
    if view and as_json:
        raise DflashError("--view and --json exclude each other", usage=True)
    if drafter == NOBODY and block_schedule not in (AUTO, NONE):
        raise DflashError("needs speculation", where="--block-schedule", usage=True)
    if url is not None:
        refuse_given(context, LOCAL_OPTIONS, "does not go with --url: the server decides")
    if is_chat:
        refuse_given(context, PROMPT_OPTIONS | STRUCTURE, "does not go with --chat")
    elif max_tokens is None:
        max_tokens = MAX_TOKENS
    grammar = structure.read(ignore_eos=ignore_eos)
    common: ContinuationOptions = {
        "max_tokens": max_tokens,
        "stop_strings": stops,
        "ignore_eos": ignore_eos,
    }
    variables = prompts.template_options
    if url is not None and is_chat:
        refuse_given(context, {"ignore_eos"}, "does not go with --url and --chat")
        given = {"max_tokens": max_tokens, "stop": [*stops], "chat_template_kwargs": variables}
        asked = {name: one for name, one in given.items() if one}
        hold_chat(ServedSpeaker(OpenAiChat(url, sampling, asked)), prompts.system)
        return
    if url is not None:
        refuse_given(
            context,
            {"system", "template_options"},
            "does not go with --url: chats go to its OpenAI port",
        )
        address = _parse_url(url)
        remote = [
            GenerationRequest(prompt=text, sampling=sampling, grammar=grammar, **common)
            for text in prompts.read()
        ]
        writer = TextWriter(view=False, quiet=as_json, count=len(remote))
        started = time.perf_counter()
        results = asyncio.run(_run_remote(address, remote, writer, prompts.raw))
        writer.end(results, time.perf_counter() - started)
        return
    if bundle is None:
        raise DflashError("no model", fix="pass a BUNDLE, or the --url of a server", usage=True)
    opened = open_bundle(bundle)
    bound_memory(opened)
    pair = LoadedPair(
        opened,
        threads=threads,
        speculation=drafter != NOBODY,
        block_schedule=block_schedule,
        drafter=DFLASH if drafter == NOBODY else drafter,
    )
    show_thread_note(pair.schedule, pair.threads)
    if is_chat:
        with pair:
            hold_chat(PairSpeaker(pair, sampling, common, variables), prompts.system)
        return
    follower = None if grammar is None else pair.grammars.compile(grammar)
    requests = [
        pair.request(ids, sampling, grammar=follower, **common)
        for ids in prompts.encode(pair.tokenizer)
    ]
    is_templated = pair.tokenizer.chat_template is not None and not prompts.raw
    channels: list[OpenAnswer] = []
    # What a grammar binds from its first token on is the answer.
    if is_templated and grammar is None and (form := pair.answer_format) is not None:
        channels = [
            partial(open_answer, form, one.stop_strings, one.prompt_ids) for one in requests
        ]
    writer = TextWriter(view=view, quiet=as_json, count=len(requests), channels=channels)
    with pair:
        pair.check(requests)
        started = time.perf_counter()
        results = pair.run(requests, writer.take)
        wall_s = time.perf_counter() - started
    writer.end(results, wall_s, name_threads(pair.bundle.manifest, pair.threads))
    steps = DraftedSteps(*(result.statistics for result in results))
    if steps.count and drafter == DFLASH:
        schedule = own_schedule(pair.bundle) if block_schedule.isdecimal() else pair.schedule
        show_note(low_acceptance(steps, schedule_break_even(schedule, steps.block), str(bundle)))


def _parse_url(url: str) -> str:
    """The address (host:port) in `grpc://HOST[:PORT]`.

    Raises:
        DflashError: another kind of URL (usage).
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or url.rstrip("/") != f"grpc://{parts.netloc}" or "@" in parts.netloc:
        raise DflashError(f"{url!r} is not of the form grpc://HOST:PORT", where="--url", usage=True)
    shown = f"[{host}]" if ":" in host else host
    return f"{shown}:{DEFAULT_GRPC_PORT if port is None else port}"


async def _run_remote(
    address: str, requests: list[GenerationRequest], writer: TextWriter, raw: bool
) -> list[RequestResult]:
    """Results in the order of `requests` on the server at `address` (host:port); the first failure
    ends all of them, as does a chat template without `raw`."""
    model = ServedModel(address)
    turn = asyncio.Semaphore(MAX_IN_FLIGHT)

    async def run_one(index: int, request: GenerationRequest) -> RequestResult:
        async with turn, aclosing(model.stream(request)) as deltas:
            async for delta in deltas:
                writer.write(index, showable(delta.text), finished=delta.result is not None)
                result = delta.result
        assert result is not None
        return result

    try:
        if not raw and await model.has_chat_template():
            what = "the served model has a chat template, which is not known here"
            fix = "--raw sends the prompt as it is; chats go to its OpenAI port"
            raise DflashError(what, where=address, fix=fix, usage=True)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(run_one(index, request)) for index, request in enumerate(requests)
            ]
    except* DflashError as errors:
        raise errors.exceptions[0] from None
    finally:
        await model.close()
    return [task.result() for task in tasks]
