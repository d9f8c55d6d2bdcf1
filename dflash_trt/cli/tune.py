"""`dflash-trt tune`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from dflash_trt.backends.registry import executor_limits
from dflash_trt.bundle.bundle import Bundle, bound_memory, detach_file, open_bundle
from dflash_trt.cli.bars import StageBars
from dflash_trt.cli.options import (
    FILE,
    TaskOptions,
    bundle_argument,
    drafter_option,
    json_option,
    name_threads,
    parse_counts,
    print_json,
    refuse_given,
    task_options,
    threads_option,
)
from dflash_trt.cli.verify_output import count_answers
from dflash_trt.core.publish import write_named
from dflash_trt.core.text_table import columns
from dflash_trt.decoding import Request
from dflash_trt.decoding.drafter_kinds import DFLASH, DrafterKind
from dflash_trt.decoding.schedule import (
    NO_SPECULATION,
    BlockSchedule,
    Measurements,
    StepPrediction,
    schedule_name,
)
from dflash_trt.decoding.tuning.block_times import (
    TuningOptions,
    candidate_batches,
    candidate_blocks,
    derive_schedule,
    measure,
)
from dflash_trt.decoding.tuning.bundle_schedule import (
    NONE,
    encode_schedule,
    fingerprint,
    write_schedule,
)
from dflash_trt.errors import DflashError
from dflash_trt.graph.bindings import GRAPH_NAMES
from dflash_trt.hardware.cores import ThreadChoice
from dflash_trt.pair import LoadedPair


@click.command("tune")
@bundle_argument
@task_options
@drafter_option
@click.option(
    "--block-size", "blocks", help="Blocks to try, as 2,4,8.  [default: all up to 8, then fewer]"
)
@click.option(
    "--batch", "batches", help="Batches to time, as 1,4.  [default: powers of two to the limit]"
)
@click.option("--remove", is_flag=True, help="Take BUNDLE's schedule out of it; measures nothing.")
@threads_option
@json_option
@click.option(
    "-o", "--output", type=FILE, help="Write the schedule to this file, not into the bundle."
)
@click.pass_context
def command(
    context: click.Context,
    bundle: Path,
    prompts: TaskOptions,
    drafter: DrafterKind,
    blocks: str | None,
    batches: str | None,
    remove: bool,
    threads: ThreadChoice,
    as_json: bool,
    output: Path | None,
) -> None:
    """Measure BUNDLE here and write the block size by batch that is fastest into it.

    Times steps of every batch and block, and of decoding without drafts; measures acceptance on
    the prompts (by default those that came with the pair) at every block; with several sets it
    shows that of each, and decides by all of them together. `generate`, `serve` and
    `package` follow the schedule from then on; `--block-schedule none` turns that off. Each
    drafter has a schedule of its own. No output changes, only speed.
    """
    opened = open_bundle(bundle)
    if remove:
        _remove(opened, drafter, context)
        return
    manifest, limits = opened.manifest, executor_limits(opened)
    bound_memory(opened)
    graphs = GRAPH_NAMES if drafter == DFLASH else ()
    pair = LoadedPair(opened, threads=threads, block_schedule=NONE, drafter=drafter, graphs=graphs)
    longest, most = limits.block_size, limits.max_batch
    sizes = parse_counts(blocks, "--block-size", 2, longest, candidate_blocks(longest))
    options = TuningOptions(
        block_sizes=tuple(sizes),
        batches=tuple(parse_counts(batches, "--batch", 1, most, candidate_batches(most))),
        threads=pair.threads,
        prefill_chunk=limits.prefill_chunk,
        eos_token_ids=tuple(manifest.target.eos_token_ids),
        drafter=drafter,
    )
    tasks = prompts.encode(pair.tokenizer, opened.prompts)
    requests = [
        Request(prompt_ids=task.ids, max_tokens=prompts.max_tokens, sampling=prompts.sampling)
        for task in tasks
    ]
    with pair, StageBars() as bars:
        prompts.check(pair, requests, tasks)
        names = [task.set_name for task in tasks]
        measured = measure(pair.executor, requests, options, bars, names)
    bundle_print, executor = fingerprint(manifest), manifest.executor
    schedule = derive_schedule(
        measured, limits, executor=executor, bundle=bundle_print, drafter=drafter
    )
    written = output or bundle / schedule_name(drafter)
    if output is None:
        write_schedule(opened, schedule)
    else:
        write_named(output, encode_schedule(schedule))
    if as_json:
        drafts = {str(k): v for k, v in schedule.draft_len_schedule().items()}
        shown = {"schedule": schedule.to_json(), "tokens_per_second": predict(schedule)}
        print_json(shown | {"draft_len_schedule": drafts, "written": str(written)})
        return
    for line in _describe(schedule, name_threads(manifest, pair.threads)):
        click.echo(line)
    click.echo(f"written to {written}")


def _remove(bundle: Bundle, drafter: DrafterKind, context: click.Context) -> None:
    """Raises DflashError: another option was given, or the bundle has no schedule (usage)."""
    others = {str(one.name) for one in context.command.params} - {"bundle", "drafter", "remove"}
    refuse_given(context, others, "does not go with --remove, which measures nothing")
    name = schedule_name(drafter)
    path = bundle.folder / name
    named = any(file.path == name for file in bundle.manifest.files)
    if not named and not path.exists():
        raise DflashError("has no schedule to remove", where=bundle.folder, usage=True)
    detach_file(bundle, name)
    click.echo(f"removed {path}")


def predict(schedule: BlockSchedule) -> list[dict[str, Any]]:
    """Predicted tokens/s by measured batch: of each way of decoding, and which is chosen."""
    measured = schedule.measured
    assert measured is not None
    longest = max(measured.block_sizes)
    plain = StepPrediction(measured, "target_only", longest)
    fed = StepPrediction(measured, "target", longest)
    return [
        {
            "batch": batch,
            "block_size": schedule.block_size(batch),
            "target_only": plain.tokens_per_second(batch, NO_SPECULATION),
            "target": fed.tokens_per_second(batch, NO_SPECULATION),
            "blocks": {
                str(block): plain.tokens_per_second(batch, block) for block in measured.block_sizes
            },
        }
        for batch in (step.batch for step in measured.steps)
    ]


def _describe(schedule: BlockSchedule, threads: str) -> list[str]:
    measured = schedule.measured
    assert measured is not None
    lengths = _by_block(measured, measured.acceptance_lengths)
    is_fed = schedule.drafter == DFLASH
    note = "; fed: without drafts, but keeping the drafter's context" if is_fed else ""
    ways = ("target_only", "target") if is_fed else ("target_only",)
    blocks = [f"block {block}" for block in measured.block_sizes]
    table = [("batch", *("fed" if way == "target" else way for way in ways), *blocks)]
    for row in predict(schedule):
        chosen = schedule.plain_graph if row["block_size"] == NO_SPECULATION else row["block_size"]
        rates = {way: row[way] for way in ways} | row["blocks"]
        cells = (f"{rate:,.0f}{'*' if way == str(chosen) else ' '}" for way, rate in rates.items())
        table.append((str(row["batch"]), *cells))
    lines = [
        f"acceptance length by block ({measured.prompts} prompts): {lengths}",
        *(
            f"  {one.name} ({one.answers}): {_by_block(measured, one.acceptance_lengths)}"
            for one in measured.sets or ()
        ),
        f"predicted decode tokens/s with {measured.positions} positions held{threads}, * the "
        f"choice{note}",
        *(f"  {line}" for line in columns(table)),
    ]
    if measured.looping is not None:
        lines.append(
            f"looping: {count_answers(measured.looping.answers)}, which may inflate the figures "
            f"above; alone: {_by_block(measured, measured.looping.acceptance_lengths)}"
        )
    lines.append(f"schedule: {schedule.describe()}")
    if schedule.drafter != DFLASH:
        return lines
    drafts = schedule.draft_len_schedule()
    lines.append(
        f"TensorRT-LLM: draft_len_schedule: {{{', '.join(f'{k}: {v}' for k, v in drafts.items())}}}"
        f", max_draft_len: {max(drafts.values())}"
        if drafts
        else "TensorRT-LLM: no speculation"
    )
    return lines


def _by_block(measured: Measurements, lengths: Sequence[float | None]) -> str:
    return ", ".join(
        f"{'–' if length is None else f'{length:.2f}'} at {block}"
        for block, length in zip(measured.block_sizes, lengths, strict=True)
    )
