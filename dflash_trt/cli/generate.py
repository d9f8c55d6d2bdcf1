"""`dflash-trt generate`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click

from dflash_trt.bundle.bundle import bound_memory, open_bundle
from dflash_trt.cli.chat import PairSpeaker, ServedSpeaker, hold_chat
from dflash_trt.cli.generate_remote import generate_remote, parse_url
from dflash_trt.cli.generation_output import TextWriter
from dflash_trt.cli.options import (
    FILE,
    FOLDER,
    PromptOptions,
    block_schedule_option,
    drafter_option,
    json_option,
    name_threads,
    option_group,
    prompt_options,
    refuse_given,
    sampling_options,
    show_hint,
    show_thread_note,
    threads_option,
)
from dflash_trt.core.strict_json import read_json_object
from dflash_trt.decoding import Request, SamplingParams
from dflash_trt.decoding.drafter_kinds import DFLASH, DrafterKind
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
from dflash_trt.serving.client.client import GenerationRequest
from dflash_trt.serving.client.openai_chat import OpenAiChat
from dflash_trt.text.grammar import Grammar, schema_text
from dflash_trt.text.thoughts import AnswerFormat, TokenReader, open_answer

MAX_TOKENS = 128
PROMPT_OPTIONS = {"prompt", "prompt_file", "raw", "view", "as_json"}
LOCAL_OPTIONS = {"bundle", "block_size", "block_schedule", "no_speculation", "view"}
LOCAL_OPTIONS |= {"drafter", "threads"}
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
@click.option("--block-size", type=click.IntRange(2), help="Rows of every verify step.")
@block_schedule_option
@drafter_option
@click.option("--no-speculation", is_flag=True, help="Plain decoding, with the baseline graph.")
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
    block_size: int | None,
    block_schedule: str,
    drafter: DrafterKind,
    no_speculation: bool,
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
    if no_speculation and block_size is not None:
        raise DflashError("--block-size needs speculation; drop --no-speculation", usage=True)
    if no_speculation:
        refuse_given(context, {"drafter"}, "does not go with --no-speculation")
    if (block_size is not None or no_speculation) and block_schedule not in (AUTO, NONE):
        raise DflashError(
            "does not go with --block-size or --no-speculation",
            where="--block-schedule",
            usage=True,
        )
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
        speaker = ServedSpeaker(OpenAiChat(url, sampling, asked))
        hold_chat(speaker, prompts.system, speaker.greeting)
        return
    if url is not None:
        refuse_given(
            context,
            {"system", "template_options"},
            "does not go with --url: chats go to its OpenAI port",
        )
        address = parse_url(url)
        remote = [
            GenerationRequest(prompt=text, sampling=sampling, grammar=grammar, **common)
            for text in prompts.read()
        ]
        generate_remote(address, remote, raw=prompts.raw, as_json=as_json)
        return
    if bundle is None:
        raise DflashError("no model", fix="pass a BUNDLE, or the --url of a server", usage=True)
    opened = open_bundle(bundle)
    bound_memory(opened)
    pair = LoadedPair(
        opened,
        threads=threads,
        speculation=not no_speculation,
        block_size=block_size,
        block_schedule=block_schedule,
        drafter=drafter,
    )
    show_thread_note(pair.schedule, pair.threads)
    if is_chat:
        with pair:
            talk = PairSpeaker(pair, sampling, common, variables)
            hold_chat(talk, prompts.system, talk.greeting)
        return
    follower = None if grammar is None else pair.grammars.compile(grammar)
    requests = [
        pair.request(ids, sampling, grammar=follower, **common)
        for ids in prompts.encode(pair.tokenizer)
    ]
    is_templated = pair.tokenizer.chat_template is not None and not prompts.raw
    form, channels = pair.answer_format if is_templated else None, None
    if form is not None:
        channels = partial(_open_answer, form, requests)
    writer = TextWriter(view=view, quiet=as_json, count=len(requests), channels=channels)
    with pair:
        pair.check(requests)
        started = time.perf_counter()
        results = pair.run(requests, writer.take)
        wall_s = time.perf_counter() - started
    writer.end(results, wall_s, name_threads(pair.bundle.manifest, pair.threads))
    steps = DraftedSteps(*(result.statistics for result in results))
    if steps.count and drafter == DFLASH:
        schedule = pair.schedule or own_schedule(pair.bundle)
        show_hint(low_acceptance(steps, schedule_break_even(schedule, steps.block), str(bundle)))


def _open_answer(form: AnswerFormat, requests: Sequence[Request], index: int) -> TokenReader:
    request = requests[index]
    return open_answer(form, request.stop_strings, request.prompt_ids)
