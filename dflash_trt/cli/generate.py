"""`dflash-trt generate`."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import click
from click.core import ParameterSource

from dflash_trt.bundle.bundle import open_bundle
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
from dflash_trt.pair import LoadedPair
from dflash_trt.runtime import Request, SamplingParams, total
from dflash_trt.serving.client.client import GenerationRequest
from dflash_trt.text.prompts import encode_prompts, read_texts
from dflash_trt.tuning.bundle_schedule import AUTO, NONE

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
    if (block_size is not None or no_speculation) and block_schedule not in (AUTO, NONE):
        raise DflashError(
            "does not go with --block-size or --no-speculation",
            where="--block-schedule",
            usage=True,
        )
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
    pair = LoadedPair(
        open_bundle(bundle),
        threads=threads,
        speculation=not no_speculation,
        block_size=block_size,
        block_schedule=block_schedule,
    )
    show_thread_note(pair.schedule, threads)
    requests = [
        Request(
            prompt_ids=tuple(ids),
            max_tokens=max_tokens,
            sampling=sampling,
            stop_strings=stops,
            ignore_eos=ignore_eos,
        )
        for ids in encode_prompts(pair.tokenizer, prompt, prompt_file, None, raw=raw)
    ]
    is_chat = pair.tokenizer.chat_template is not None and not raw
    harmony = pair.harmony if is_chat else None
    channels = None if harmony is None else partial(harmony.open, stops)
    writer = TextWriter(view=view, quiet=as_json, count=len(requests), channels=channels)
    with pair:
        pair.check(requests)
        started = time.perf_counter()
        results = pair.run(requests, writer.take)
        summary = total((result.statistics for result in results), time.perf_counter() - started)
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
