"""`dflash-trt verify`."""

from __future__ import annotations

import math
from pathlib import Path

import click

from dflash_trt.backends.registry import check_runnable
from dflash_trt.bundle.bundle import bound_memory, open_bundle
from dflash_trt.cli.bars import StageBars
from dflash_trt.cli.endpoint_commands import URL_HELP, needs_bundle, verify_urls
from dflash_trt.cli.options import (
    FOLDER,
    TaskOptions,
    drafter_option,
    json_option,
    name_threads,
    optional_bundle_argument,
    parse_counts,
    refuse_given,
    show_note,
    task_options,
    threads_option,
)
from dflash_trt.cli.verify_output import (
    print_comparison,
    print_comparison_json,
    print_report,
    print_report_json,
    print_tasks,
)
from dflash_trt.decoding import Request
from dflash_trt.decoding.drafter_kinds import DFLASH, DrafterKind, name_drafter
from dflash_trt.decoding.tuning.break_even import (
    DraftedSteps,
    low_acceptance,
    own_schedule,
    schedule_break_even,
    timed_break_even,
)
from dflash_trt.decoding.tuning.bundle_schedule import NONE
from dflash_trt.errors import EXIT_FAILED, DflashError
from dflash_trt.hardware.cores import ThreadChoice
from dflash_trt.pair import LoadedPair
from dflash_trt.proof.comparison import compare
from dflash_trt.proof.task_table import tabulate
from dflash_trt.proof.twins import check_twins
from dflash_trt.proof.verification import Mode, measure_speed, verify

LOCAL_OPTIONS = {"against", "threads"}
PROOF_OPTIONS = {"blocks", "batches", "repeats", "drafter"}
COMPARISON_OPTIONS = {"fail_below_agreement", "max_tau_loss"}


@click.command("verify")
@optional_bundle_argument
@task_options
@click.option(
    "--block-size", "blocks", help="Block sizes to try, as 2,4,8.  [default: the bundle's]"
)
@click.option(
    "--batch", "batches", help="Batch sizes to try, as 1,4.  [default: 1 and the bundle's limit]"
)
@click.option(
    "--repeats",
    type=click.IntRange(0),
    default=3,
    help="Timed runs of baseline and speculation at batch 1; 0 skips them.",
)
@drafter_option
@click.option(
    "--against",
    type=FOLDER,
    help="Instead: compare with this bundle, the pair's high-precision twin.",
)
@click.option(
    "--fail-below-agreement",
    type=click.FloatRange(0, 1),
    help="Exit code 1 when fewer likeliest tokens are the twin's (0 to 1).",
)
@click.option(
    "--max-tau-loss",
    type=click.FloatRange(0, 100),
    help="Exit code 1 when the acceptance length is more per cent below the twin's.",
)
@click.option("--url", help=f"Instead: {URL_HELP}")
@click.option("--against-url", help="…and a second one, which must answer the same.")
@threads_option
@json_option
@click.pass_context
def command(
    context: click.Context,
    bundle: Path | None,
    prompts: TaskOptions,
    blocks: str | None,
    batches: str | None,
    repeats: int,
    drafter: DrafterKind,
    against: Path | None,
    fail_below_agreement: float | None,
    max_tau_loss: float | None,
    url: str | None,
    against_url: str | None,
    threads: ThreadChoice,
    as_json: bool,
) -> int:
    """Run prompts with the baseline graph and with speculation, and compare every bit.

    Each output token's logits must be the baseline's, alone and batched (on an executor that
    does not promise bits: up to floating-point ties). Exit code 1 at any difference. Without
    prompts, those that came with the pair are used. With --prompts, figures are shown for each
    set; answers that repeat themselves are left out of those, since they inflate acceptance.

    With --against, say instead what lower precision costs: how often BUNDLE expects the same
    token as its twin, how far their distributions are apart, and what drafts are worth to
    each target with each draft. Nothing fails then but the bounds given.

    With --url, ask a server (vLLM, SGLang, TensorRT-LLM, llama-server, our own) each prompt alone,
    again and beside others, and --against-url the same prompts. Exit code 1 where an answer changes
    by more than the first server's own noise.
    """
    if url is not None:
        local = LOCAL_OPTIONS | PROOF_OPTIONS | COMPARISON_OPTIONS
        refuse_given(context, local, "does not go with --url")
        return verify_urls([url, *filter(None, [against_url])], bundle, prompts, as_json)
    refuse_given(context, {"against_url"}, "needs --url")
    bundle = needs_bundle(bundle)
    if against is None:
        refuse_given(context, COMPARISON_OPTIONS, "needs --against")
    else:
        refuse_given(context, PROOF_OPTIONS, "does not go with --against")
    for option, bound in (
        ("--fail-below-agreement", fail_below_agreement),
        ("--max-tau-loss", max_tau_loss),
    ):
        if bound is not None and math.isnan(bound):  # click's ranges let it pass
            raise DflashError("nan is no bound", where=option, usage=True)
    opened = open_bundle(bundle)
    bound_memory(opened)
    pair = LoadedPair(opened, threads=threads, block_schedule=NONE, drafter=drafter)
    limits = pair.bundle.manifest.limits
    tasks = prompts.encode(pair.tokenizer, pair.bundle.prompts)
    sequences = [task.ids for task in tasks]
    if against is not None:
        twin = open_bundle(against)
        check_runnable(twin)
        with StageBars() as bars:
            comparison = compare(
                check_twins(pair.bundle, twin),
                sequences,
                prompts.sampling,
                max_tokens=prompts.max_tokens,
                threads=pair.threads,
                progress=bars,
            )
        failures = comparison.failures(fail_below_agreement, max_tau_loss)
        (print_comparison_json if as_json else print_comparison)(comparison, failures)
        return EXIT_FAILED if failures else 0
    block_sizes = parse_counts(blocks, "--block-size", 2, limits.block_size, [limits.block_size])
    batch_sizes = parse_counts(
        batches, "--batch", 1, limits.max_batch, sorted({1, limits.max_batch})
    )
    requests = [
        Request(prompt_ids=ids, max_tokens=prompts.max_tokens, sampling=prompts.sampling)
        for ids in sequences
    ]
    title = name_drafter(drafter, pair.bundle.manifest.draft.kind)
    modes = [
        Mode(speculation=False, batch=batch, block_size=None) for batch in batch_sizes if batch > 1
    ]
    modes += [
        Mode(speculation=True, batch=batch, block_size=block, drafter=drafter, title=title)
        for block in block_sizes
        for batch in batch_sizes
    ]
    timed = block_sizes[-1]
    eos = pair.bundle.manifest.target.eos_token_ids
    with pair, StageBars() as bars:
        prompts.check(pair, requests, tasks)
        executor = pair.executor  # which loads what is to run
        bars.stage("comparing", len(requests) * prompts.max_tokens * (len(modes) + 1), "tokens")
        reports = verify(
            executor,
            requests,
            modes,
            eos_token_ids=eos,
            prefill_chunk=limits.prefill_chunk,
            on_tokens=bars.advance,
        )
        if repeats:
            bars.stage("timing", 2 * repeats, "steps")
        timing = measure_speed(
            executor,
            requests,
            block_size=timed,
            repeats=repeats,
            drafter=drafter,
            eos_token_ids=eos,
            on_run=lambda: bars.advance(1),
        )
    failed = not all(report.is_lossless for report in reports)
    # The mode that is timed, and compared first of its block: batches ascend.
    shown = next(one for one, mode in zip(reports, modes, strict=True) if mode.block_size == timed)
    figures = tabulate([task.set_name for task in tasks], shown, timing)
    if as_json:
        print_report_json(reports, timing.speed(), figures, failed)
    else:
        named = name_threads(pair.bundle.manifest, pair.threads)
        name = f"{title} block {timed}"
        print_report(reports, timing.speed(), len(requests), name, named)
        if prompts.are_named:
            print_tasks(figures, shown.mode, title)
    if drafter == DFLASH and pair.bundle.manifest.draft.traits.is_diagnosed:
        if ratios := timing.speed().ratios:
            steps = DraftedSteps(*timing.speculative[0])
            break_even = timed_break_even(steps, ratios)
        else:
            steps = DraftedSteps(*shown.of_prompts)
            break_even = schedule_break_even(own_schedule(pair.bundle), timed)
        show_note(low_acceptance(steps, break_even, str(pair.bundle.folder)))
    return EXIT_FAILED if failed else 0
