"""`dflash-trt plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import click

from dflash_trt.building.named_pair import find_config, takes_own_layer
from dflash_trt.building.on_gpu import NEVER_RUN, judge_pair
from dflash_trt.building.sources import find_source, read_shapes
from dflash_trt.building.spec import Checkpoints
from dflash_trt.bundle.memory.cache_bytes import KV_ITEM_BYTES
from dflash_trt.bundle.memory.gpu_layout import GpuLayout
from dflash_trt.cli.options import FILE, FOLDER, json_option, parse_numbers, print_json, show_note
from dflash_trt.core.formats import Format
from dflash_trt.deploy.planning.calibration import read_calibration
from dflash_trt.deploy.planning.known_pairs import (
    PairShape,
    find_pair,
    pair_names,
    published_decodings,
)
from dflash_trt.deploy.planning.layout_search import Site, Workload, possible_layouts
from dflash_trt.deploy.planning.projection import make_projection
from dflash_trt.errors import DflashError, one_line
from dflash_trt.hardware.chosen_gpu import choose_card
from dflash_trt.hardware.gpus import Gpu, gpu_names

_COUNT = click.IntRange(1, 1 << 20)
MOST_GPUS = 72
"""Of an NVL72, the largest domain of NVLink."""


@click.command("plan")
@click.option(
    "--target",
    required=True,
    help="A public pair, as gpt-oss-120b; a YAML file or a folder as for `build`.",
)
@click.option(
    "--gpu",
    help=f"One of {', '.join(gpu_names())}, or several, as b200x8.  [default: the one that is "
    "here]",
)
@click.option(
    "--interactivity",
    help="Tokens/s per user to answer at, as 500.  [default: the whole fronts]",
)
@click.option("--input-tokens", type=_COUNT, default=1024, help="A request's.")
@click.option("--output-tokens", type=_COUNT, default=1024, help="A request's.")
@click.option("--context", type=_COUNT, help="Tokens reserved per user.  [default: input + output]")
@click.option(
    "--precision",
    type=click.Choice([form.value for form in Format]),
    help="Of the target's linears.  [default: as published]",
)
@click.option(
    "--kv-dtype",
    type=click.Choice(["auto", "fp8"]),
    default="auto",
    help="Of both models' KV caches; auto is bf16.  [default: auto]",
)
@click.option(
    "--acceptance",
    help="τ at the trained block, what `generate --json`, `sweep` or `diagnose` wrote, or a "
    "workload whose τ is published, as HumanEval.  [default: the first that is published]",
)
@click.option(
    "--layout",
    metavar="tpN|epN",
    help="Only replicas of N GPUs: tp4 by tensors alone, ep4 with experts dealt out.  "
    "[default: all layouts]",
)
@click.option(
    "--measured",
    type=FOLDER,
    help="RESULTS of a sweep on the same GPUs, drawn beside the projection.",
)
@click.option(
    "-o",
    "--output",
    type=FILE,
    help="Also write the plan as a page (.html) or its fronts as a picture (.png).",
)
@json_option
def command(
    target: str,
    gpu: str | None,
    interactivity: str | None,
    input_tokens: int,
    output_tokens: int,
    context: int | None,
    precision: str | None,
    kv_dtype: str,
    acceptance: str | None,
    layout: str | None,
    measured: Path | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Project a pair's throughput per GPU at a fixed interactivity, from first principles.

    Autoregressive decoding, the pair's own drafts, and other kinds where their τ is published, on
    every layout of the GPUs: bytes, FLOPs and overheads, calibrated on published measurements. No
    figure of it is measured.
    """
    name, gpus = _split_count(gpu)
    card = choose_card(name)
    chosen = card.gpu
    if chosen is None:
        unknown = f"no figures are known of {card.title}, the GPU of this machine"
        fix = f"choose one of {', '.join(gpu_names())}"
        raise DflashError(unknown, where="--gpu", fix=fix, usage=True)
    if card.found is not None:
        show_note(f"{card.title} is here; its figures are of {chosen.title}")
    if target in pair_names():
        pair = find_pair(target)
    else:  # what a build would find
        source, path = find_config(target, Checkpoints())
        model = find_source(source.target, path, None, "--target")
        draft = None
        if not takes_own_layer(Checkpoints(), source):
            draft = find_source(source.draft, path, None, "--target")
        pair = replace(read_shapes(model, draft, source, path), name=path.stem)
    if precision is not None:
        pair = replace(pair, target=pair.target.in_format(Format(precision)))
    asked: Sequence[float | None] = [None]
    if interactivity is not None:
        asked = parse_numbers(interactivity, "--interactivity")
    if len(asked) > 1:
        raise DflashError("takes one number", where="--interactivity", usage=True)
    needed, longest = input_tokens + output_tokens, pair.target.max_position_embeddings
    reserved, what = context or needed, None
    if reserved < needed:
        what = f"{reserved:,} tokens do not hold {input_tokens:,} + {output_tokens:,}"
    elif reserved > longest:
        what = f"{reserved:,} tokens are more than the {longest:,} of {pair.name}"
    if what is not None:
        raise DflashError(what, where="--context", usage=True)
    requests = Workload(input_tokens, output_tokens, reserved)
    stored = read_calibration()
    layouts = _layouts(chosen, gpus, pair, layout)
    kv_bytes = 1 if kv_dtype == "fp8" else KV_ITEM_BYTES
    site = Site(chosen, gpus, layouts, stored.parameters, kv_bytes)
    decodings = published_decodings(pair, acceptance)
    if output is not None and output.suffix not in (".html", ".png"):
        raise DflashError("must end in .html or .png", where=output, usage=True)
    plan = make_projection(pair, site, requests, asked[0], decodings)
    if output is not None:
        from dflash_perf.projection.projection_page import write_plan

        write_plan(plan, stored, output, measured)
    elif measured is not None:
        raise DflashError("is drawn, which needs -o", where="--measured", usage=True)
    # Of a public pair as published it is known what could run it.
    is_known = target in pair_names() and precision is None
    judged = judge_pair(pair.name, card, gpus) if is_known else None
    from dflash_perf.projection.projection_tables import (
        describe,
        plan_title,
        projected_front,
        sections,
    )
    from dflash_perf.report.report_tables import text_lines

    if as_json:
        fronts = {kind: [asdict(a) for a in projected_front(plan, kind)] for kind in plan.points}
        shown = plan.to_json() | {"fronts": fronts}
        shown["accuracy"] = [asdict(one) for one in stored.accuracy]
        print_json(shown | {"runs": judged and asdict(judged)})
        return
    click.echo(plan_title(plan))
    for line in describe(plan):
        click.echo(f"  {line}")
    for heading, table in sections(plan, stored):
        click.echo(f"\n{heading}")
        for line in text_lines(table):
            click.echo(f"  {line}")
    if judged is not None:
        click.echo(f"\nwhat could run it ({NEVER_RUN})")
        for way in judged.main_ways():
            held = f"{way.users} users of {way.context:,} tokens"
            command = f"dflash-trt build --target {judged.name} {' '.join(way.options)}"
            click.echo(f"  {command}  on {way.gpus} GPU{'s'[: way.gpus > 1]} holds {held}")
        for obstacle in () if judged.ways else judged.obstacles:
            click.echo(f"  nothing: {obstacle}")
    elif precision is not None and not chosen.multiplies(Format(precision)):
        click.echo(f"\nnothing here runs it so: builds for {chosen.title} refuse {precision}")


def _split_count(gpu: str | None) -> tuple[str | None, int]:
    """The name and the number of GPUs in NAMExN; of what names no GPU, all is the name."""
    name, _, count = (gpu or "").lower().rpartition("x")
    if name not in gpu_names() or not count.isdecimal():
        return gpu, 1
    if not 1 <= int(count) <= MOST_GPUS:
        what = f"{one_line(count, 20)} GPUs are not from 1 to {MOST_GPUS}"
        raise DflashError(what, where="--gpu", usage=True)
    return name, int(count)


def _layouts(gpu: Gpu, gpus: int, pair: PairShape, asked: str | None) -> tuple[GpuLayout, ...]:
    """The one asked for; else all that the GPUs and the pair allow."""
    models = [pair.target, pair.draft]
    if asked is None:
        return possible_layouts(gpu, gpus, models)
    kind, size = asked[:2], int(asked[2:]) if asked[2:].isdecimal() else 0
    if kind not in ("tp", "ep") or size < 1:
        what = f"{one_line(asked, 40)!r} is not tpN or epN, as tp4"
        raise DflashError(what, where="--layout", usage=True)
    if gpus % size or size > gpu.link_gpus:
        what = f"replicas of {size} do not fill {gpus} GPUs of which {gpu.link} joins "
        raise DflashError(f"{what}{gpu.link_gpus}", where="--layout", usage=True)
    layout = GpuLayout(size) if kind == "tp" or size == 1 else GpuLayout(size, "data")
    layout.check(*models)
    return (layout,)
