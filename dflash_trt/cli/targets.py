"""`dflash-trt targets`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from dflash_trt.cli.options import json_option, print_json
from dflash_trt.models.build_config import load_config, target_names, targets_not_yet

if TYPE_CHECKING:
    from dflash_trt.building.on_gpu import PairOnGpu

OPTIONS_SHOWN = 72
"""Characters of a way's options in one line of the table, which has 120; longer ones take two."""


@click.command("targets")
@click.option(
    "--gpu", help="What of each public pair runs on it, as h100; `here`: on the one here."
)
@json_option
def command(gpu: str | None, as_json: bool) -> None:
    """List the configurations that `build --target` knows, and public pairs that it does not.

    With --gpu: which of the public pairs a GPU holds, in which precision, for how many users, and
    what to build. Nothing is measured.
    """
    if gpu is not None:
        _show_gpu(gpu, as_json=as_json)
        return
    configs = {name: load_config(name)[0] for name in target_names()}
    missing = targets_not_yet()
    if as_json:
        shown = {
            name: {"supported": True, **one.model_dump(exclude={"shape"})}
            for name, one in configs.items()
        }
        shown |= {name: {"supported": False, "reason": why} for name, why in missing.items()}
        print_json(shown)
        return
    width = max(map(len, configs), default=0)
    for name, config in configs.items():
        click.echo(f"{name:<{width}}  {config.description}")
        if config.profiles:
            click.echo(f"{'':<{width}}  profiles: {', '.join(config.profiles)}")
        click.echo(f"{'':<{width}}  verified: {config.verified}")
    for why in dict.fromkeys(missing.values()):
        names = ", ".join(name for name, reason in missing.items() if reason == why)
        click.echo(f"not yet: {names}: {why}")
    click.echo("`dflash-trt targets --gpu h100` says which public pairs a GPU holds")


def _show_gpu(name: str, *, as_json: bool) -> None:
    # Imported here: the list of targets needs none of what executors and graphs bring.
    from dflash_trt.building.on_gpu import NEVER_RUN, capabilities, judge_pairs
    from dflash_trt.hardware.chosen_gpu import choose_card

    card = choose_card(name)
    able, pairs = capabilities(card), judge_pairs(card)
    if as_json:
        shown = {"gpu": asdict(card), "status": NEVER_RUN, "abilities": [asdict(a) for a in able]}
        print_json(shown | {"pairs": {pair.name: asdict(pair) for pair in pairs}})
        return
    found = "" if card.found is None else f", {card.found} here"
    click.echo(f"{card.title} ({card.arch}), {card.memory_bytes / 1e9:,.0f} GB{found}; {NEVER_RUN}")
    width = max(len(one.part) for one in able)
    for one in able:
        click.echo(f"  {'yes' if one.able else 'no '}  {one.part:<{width}}  {one.detail}")
    click.echo()
    for line in _pair_table(pairs):
        click.echo(line)
    if ways := [(pair.name, way) for pair in pairs for way in pair.ways]:
        first, way = min(ways, key=lambda one: one[1].gpus)
        click.echo(f"next: dflash-trt build --target {first} {' '.join(way.options)}")
    if card.gpu is not None:
        asked = f"--target NAME --gpu {card.gpu.name} --interactivity 50"
        click.echo(f"speed: dflash-trt plan {asked}  projects it")
    click.echo("without a GPU: --executor cpu runs every pair that the host's memory holds")


def _pair_table(pairs: list[PairOnGpu]) -> Iterator[str]:
    """Rows of pairs and ways; an obstacle stands where a way would, over its columns."""
    rows: list[tuple[str, ...]] = [
        ("pair", "weights", "GPUs", "users × tokens", "in", "build --target NAME …")
    ]
    for pair in pairs:
        first = (pair.name, f"{pair.published:<5} {pair.weights / 1e9:5,.1f} GB")
        for way in pair.main_ways():
            users = f"{way.users} × {way.context:,}"
            form = way.precision if way.is_native else f"{way.precision} as bf16"
            own, more = way.options, ""
            if len(" ".join(own)) > OPTIONS_SHOWN and "--precision" in own:
                begin, end = own.index("--precision"), own.index("--calibration") + 2
                own, more = own[:begin] + own[end:], " ".join(own[begin:end])
            rows.append((*first, str(way.gpus), users, form, " ".join(own)))
            rows += [("", "", "", "", "", more)] if more else []
            first = ("", "")
        for obstacle in () if pair.ways else pair.obstacles:
            rows.append((*first, "–", obstacle))
            first = ("", "")
    whole = [row for row in rows if len(row) == len(rows[0])]
    widths = [max(map(len, column)) for column in zip(*whole, strict=True)]
    widths[:2] = [max(len(row[number]) for row in rows) for number in (0, 1)]
    for row in rows:
        cells = [
            cell.rjust(width)
            if number == 2 or (number == 3 and row in whole)
            else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=False))
        ]
        yield "  ".join(cells).rstrip()
