"""`dflash-trt couple`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from dflash_trt.bundle.bundle import bound_memory, open_bundle
from dflash_trt.cli.options import (
    FILE,
    TaskOptions,
    bundle_argument,
    json_option,
    print_json,
    task_options,
    threads_option,
)
from dflash_trt.cli.progress import StageBars
from dflash_trt.core.publish import write_named
from dflash_trt.errors import DflashError
from dflash_trt.graph.bindings import GRAPH_NAMES
from dflash_trt.hardware.cores import ThreadChoice
from dflash_trt.pair import LoadedPair
from dflash_trt.replay.coupling import SampledAnswer, fit_coupling
from dflash_trt.replay.edits import Edits
from dflash_trt.replay.graphs import ReplayGraphs
from dflash_trt.runtime import Request, SamplingParams
from dflash_trt.speculation.coupling import Coupling, check_couples, encode_coupling, name_sharpness
from dflash_trt.tuning.bundle_schedule import NONE

LEAST_GAIN = 0.01
"""Of tau at every temperature: what choosing on the CPU costs of a small model's step."""
LEAST_ANSWERS = 8
"""Half of them is fitted to."""


@click.command("couple")
@bundle_argument
@task_options
@click.option("--max-tokens", type=click.IntRange(2), default=64)
@click.option(
    "--temperature",
    "temperatures",
    type=click.FloatRange(0, 100, min_open=True),
    multiple=True,
    default=(0.7, 1.0),
    show_default=True,
    help="Draw answers at this temperature; repeatable.",
)
@threads_option
@json_option
@click.option("-o", "--output", type=FILE, help="The file to write where coupling gains.")
def command(
    bundle: Path,
    prompts: TaskOptions,
    max_tokens: int,
    temperatures: tuple[float, ...],
    threads: ThreadChoice,
    as_json: bool,
    output: Path | None,
) -> None:
    """Find out whether drafts gain from the noise of sampled draws, and how sharp they should be.

    Draws answers to the prompts (by default those that came with the pair) and replays them: a
    draft that is chosen with the noise by which the target will draw agrees more often than the
    likeliest token does. Where that gains at every temperature, on answers that nothing was fitted
    to, FILE is written; `build --coupling FILE` makes a bundle of such drafts. No output changes.
    """
    opened = open_bundle(bundle)
    manifest = opened.manifest
    check_couples(manifest.draft.traits, bundle)
    bound_memory(opened)
    graphs = ReplayGraphs(opened, 1, Edits())
    with StageBars() as bars:
        answers: dict[float, list[SampledAnswer]] = {}
        with LoadedPair(opened, threads=threads, block_schedule=NONE, graphs=GRAPH_NAMES) as pair:
            tasks = prompts.encode(pair.tokenizer, opened.prompts)
            for temperature in temperatures:
                requests = [
                    Request(
                        prompt_ids=task.ids,
                        max_tokens=max_tokens,
                        sampling=SamplingParams(temperature=temperature, seed=seed),
                    )
                    for seed, task in enumerate(tasks)
                ]
                prompts.check(pair, requests, tasks)
                bars.stage(f"answers at {temperature:g}", len(requests), "steps")
                answers[temperature] = [
                    SampledAnswer(request.prompt_ids, result.token_ids, request.sampling)
                    for request, result in zip(requests, pair.run(requests), strict=True)
                    if len(result.token_ids) > 1
                ]
        _check_enough(answers)
        coupling = fit_coupling(graphs, answers, manifest.limits.block_size, manifest.name, bars)
    graphs.close()
    gains = min(one.gain for one in coupling.measured) >= LEAST_GAIN
    written = output if gains else None
    if written is not None:
        write_named(written, encode_coupling(coupling))
    if as_json:
        print_json({"coupling": coupling.model_dump(), "written": written and str(written)})
        return
    for line in _describe(coupling):
        click.echo(line)
    if written is not None:
        click.echo(f"written to {written}; `dflash-trt build --coupling {written}` uses it")
    elif not gains:
        click.echo(f"that is less than {LEAST_GAIN:.0%}, which choosing costs: nothing written")


def _check_enough(answers: Mapping[float, Sequence[SampledAnswer]]) -> None:
    fewest = min(map(len, answers.values()))
    if fewest < LEAST_ANSWERS:
        raise DflashError(
            f"{fewest} answers of two tokens or more are too few to fit anything to",
            where="prompts",
            fix=f"give {LEAST_ANSWERS} prompts or more, or longer outputs (--max-tokens)",
            usage=True,
        )


def _describe(coupling: Coupling) -> list[str]:
    return [
        *(
            f"T {one.temperature:g}: acceptance length {one.tau_likeliest:.2f} with the likeliest "
            f"tokens, {one.tau_coupled:.2f} with the draw's noise ({100 * one.gain:+.1f} %; "
            f"{one.answers} answers)"
            for one in coupling.measured
        ),
        f"sharpness by draft (– the likeliest): {name_sharpness(coupling.sharpness)}",
    ]
