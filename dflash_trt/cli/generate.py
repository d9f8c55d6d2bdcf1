"""`dflash-trt generate`."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import click
from click.core import ParameterSource

from dflash_trt.backends.registry import check_runnable, open_executor
from dflash_trt.bundle.bundle import load_tokenizer, open_bundle
from dflash_trt.cli.generate_remote import generate_remote, parse_url
from dflash_trt.cli.generation_output import TextWriter, print_json, print_statistics
from dflash_trt.cli.options import (
    block_schedule_option,
    json_option,
    prompt_options,
    sampling_options,
    show_thread_note,
    threads_option,
)
from dflash_trt.errors import DflashError
from dflash_trt.runtime import (
    Generator,
    GeneratorOptions,
    Request,
    SamplingParams,
    total,
)
from dflash_trt.serving.client.client import GenerationRequest
from dflash_trt.text.encode import encode_prompts
from dflash_trt.text.harmony import HarmonyFormat
from dflash_trt.text.prompts import read_texts
from dflash_trt.tuning.bundle_schedule import AUTO, NONE, choose_schedule, needed_graphs

LOCAL_OPTIONS = {"bundle", "block_size", "block_schedule", "no_speculation", "view", "threads"}


@click.command("generate", short_help="Continue prompts, with or without speculation.")
@click.argument("bundle", required=False, type=click.Path(file_okay=False, path_type=Path))
@click.option("--url", help="Ask a served model (grpc://HOST:PORT) instead of a bundle.")
@prompt_options
@click.option("--max-tokens", type=click.IntRange(1), default=128, show_default=True)
@sampling_options
@click.option("--stop", "stops", multiple=True, help="Text that ends the output; repeatable.")
@click.option("--ignore-eos", is_flag=True, help="Go on past the end-of-sequence token.")
@click.option("--block-size", type=click.IntRange(2), help="Rows of every verify step.")
@block_schedule_option
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
    prompt: str | None,
    prompt_file: Path | None,
    raw: bool,
    max_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float,
    seed: int,
    stops: tuple[str, ...],
    ignore_eos: bool,
    block_size: int | None,
    block_schedule: str,
    no_speculation: bool,
    view: bool,
    threads: int,
    as_json: bool,
) -> None:
    """Continue prompts with the pair in BUNDLE, or with the one that is served at --url.

    Text streams to stdout, statistics go to stderr. Several prompts run together and are
    printed in order. A prompt is a user's message where the tokenizer has a chat template.
    """
    if view and as_json:
        raise DflashError("--view and --json exclude each other", usage=True)
    if no_speculation and block_size is not None:
        raise DflashError("--block-size needs speculation; drop --no-speculation", usage=True)
    if block_size is not None or no_speculation:
        if block_schedule not in (AUTO, NONE):
            raise DflashError(
                "does not go with --block-size or --no-speculation",
                where="--block-schedule",
                usage=True,
            )
        block_schedule = NONE
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    if url is not None:
        _refuse_local_options(context)
        address = parse_url(url)
        remote = [
            GenerationRequest(
                prompt=text,
                max_tokens=max_tokens,
                sampling=sampling,
                stop_strings=stops,
                ignore_eos=ignore_eos,
            )
            for text in read_texts(prompt, prompt_file, None)
        ]
        generate_remote(address, remote, raw=raw, as_json=as_json)
        return
    if bundle is None:
        raise DflashError("no model", fix="pass a BUNDLE, or the --url of a server", usage=True)
    opened = open_bundle(bundle)
    check_runnable(opened)
    schedule = choose_schedule(opened, block_schedule)
    show_thread_note(schedule, threads)
    tokenizer = load_tokenizer(opened)
    manifest = opened.manifest
    requests = [
        Request(
            prompt_ids=tuple(ids),
            max_tokens=max_tokens,
            sampling=sampling,
            stop_strings=stops,
            ignore_eos=ignore_eos,
        )
        for ids in encode_prompts(tokenizer, prompt, prompt_file, None, raw=raw)
    ]
    executor = open_executor(
        opened,
        threads=threads,
        graphs=needed_graphs(speculation=not no_speculation, schedule=schedule),
    )
    generator = Generator(
        executor,
        tokenizer=tokenizer.core,
        eos_token_ids=manifest.target.eos_token_ids,
        options=GeneratorOptions(
            speculation=not no_speculation,
            block_size=block_size,
            prefill_chunk=manifest.limits.prefill_chunk,
            schedule=schedule,
        ),
    )
    for number, request in enumerate(requests, start=1):
        _check(generator, request, None if len(requests) == 1 else number)
    is_chat = tokenizer.chat_template is not None and not raw
    harmony = HarmonyFormat.find(tokenizer.core) if is_chat else None
    channels = None if harmony is None else partial(harmony.open, stops)
    writer = TextWriter(view=view, quiet=as_json, count=len(requests), channels=channels)
    started = time.perf_counter()
    results = generator.generate(requests, writer.take)
    summary = total((result.statistics for result in results), time.perf_counter() - started)
    executor.close()
    if as_json:
        print_json(results, summary, channels)
    else:
        writer.end()
        print_statistics(results, summary)


def _refuse_local_options(context: click.Context) -> None:
    """Raises DflashError (usage) when something was given that a server decides for itself."""
    for parameter in context.command.params:
        if (
            parameter.name in LOCAL_OPTIONS
            and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
        ):
            raise DflashError(
                "does not go with --url: the server decides",
                where="BUNDLE" if parameter.name == "bundle" else parameter.opts[0],
                usage=True,
            )


def _check(generator: Generator, request: Request, number: int | None) -> None:
    """Raises DflashError for a request that cannot run, naming its prompt among several."""
    try:
        generator.check(request)
    except DflashError as error:
        where = error.where if number is None else f"{error.where} {number}"
        raise DflashError(error.what, where=where, fix=error.fix, usage=error.usage) from error
