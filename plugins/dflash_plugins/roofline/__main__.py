"""What each kernel should take on a GPU, on paper: time, and share of the memory's bandwidth.

    python -m dflash_plugins.roofline --gpu b200 --pair qwen3-8b --context 4096

Kernels are compiled for it, once, without a GPU; --check needs no compiler.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import click

from dflash_plugins.compile import check_compiler
from dflash_plugins.operation import DType
from dflash_plugins.public import public_pairs
from dflash_plugins.roofline.published import published_times
from dflash_plugins.roofline.rates import find_rates
from dflash_plugins.roofline.steps import STEP_PAIR, step_parts
from dflash_plugins.roofline.table import (
    AttentionCell,
    attention_cells,
    describe_attention,
    describe_classes,
    describe_errors,
    describe_formula,
    describe_steps,
)
from dflash_trt.core.user_cache import user_cache_file
from dflash_trt.errors import DflashError, nearest, one_line

GPUS = ("h200", "b200", "b300", "rtx-pro-6000")
BATCHES, CONTEXTS = (1, 8, 64), (512, 2048, 8192, 32_768, 131_072)
STEP_BATCHES, STEP_CONTEXT = (1, 32), 4096
ATTENTION = "block_attention"
SMALL = ("accept", "kv_cache_update", "kv_feature_injection", "row_sample")
CACHES = {"bf16": DType.BFLOAT16, "fp8": DType.FLOAT8}


def _known(where: str, names: Sequence[str], known: Sequence[str]) -> list[str]:
    """`names`, or all where there are none; DflashError (usage) for one that is not known."""
    for name in names:
        if name not in known:
            raise DflashError(
                f"{one_line(name, 40)!r} is not known{nearest(name, list(known))}",
                where=where,
                fix=f"choose of {', '.join(known)}",
                usage=True,
            )
    return list(names or known)


@click.command(help=(__doc__ or "").partition("\n")[0])
@click.option("--gpu", "gpus", multiple=True, help=f"One of {', '.join(GPUS)} …; repeatable.")
@click.option("--pair", "pairs", multiple=True, help="Of public pairs, those heads; repeatable.")
@click.option("--kernel", "kernels", multiple=True, help="Only this one; repeatable.")
@click.option("--batch", "batches", multiple=True, type=click.IntRange(1, 1024), help="Sequences.")
@click.option(
    "--context", "contexts", multiple=True, type=click.IntRange(1, 1 << 20), help="Tokens."
)
@click.option(
    "--cache", type=click.Choice(list(CACHES)), default="bf16", help="Attention's caches."
)
@click.option("--paged", is_flag=True, help="Attention over paged caches.")
@click.option("--check", is_flag=True, help="The errors on published measurements, and no more.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(
    gpus: tuple[str, ...],
    pairs: tuple[str, ...],
    kernels: tuple[str, ...],
    batches: tuple[int, ...],
    contexts: tuple[int, ...],
    cache: str,
    paged: bool,
    check: bool,
    as_json: bool,
) -> None:
    try:
        if check:
            _print_check(as_json)
            return
        rates = [find_rates(name) for name in gpus or GPUS]
        named = _known("--pair", pairs, list(public_pairs()))
        chosen = _known("--kernel", kernels, (ATTENTION, *SMALL))
        check_compiler()
        folder = user_cache_file("kernels")
        cells: list[AttentionCell] = []
        rows: list[dict[str, Any]] = []
        lines: list[str] = []
        for one in rates:
            for pair in named if ATTENTION in chosen else ():
                found = list(
                    attention_cells(
                        one,
                        pair,
                        batches or BATCHES,
                        contexts or CONTEXTS,
                        folder,
                        cache=CACHES[cache],
                        is_paged=paged,
                    )
                )
                cells += found
                rows += [cell.as_json() for cell in found]
                lines += [*describe_attention(found), ""]
            if STEP_PAIR in named and set(chosen) & set(SMALL):
                tokens = contexts[0] if contexts else STEP_CONTEXT
                every = step_parts(one, batches or STEP_BATCHES, tokens, folder)
                parts = [part for part in every if part.kernel in chosen]
                rows += [part.as_json(one.name) for part in parts]
                lines += [*describe_steps(one, parts, tokens), ""]
    except DflashError as error:
        click.echo(f"Error: {error.message}", err=True)
        raise click.exceptions.Exit(error.exit_code) from error
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    for line in _all_lines(lines, cells):
        click.echo(line)


def _all_lines(lines: Sequence[str], cells: Sequence[AttentionCell]) -> Iterator[str]:
    yield from lines
    yield from describe_classes(cells)
    yield ""
    yield from describe_formula()


def _print_check(as_json: bool) -> None:
    times = published_times()
    if as_json:
        click.echo(json.dumps([one.as_json() for one in times], indent=2))
        return
    for line in describe_errors(times):
        click.echo(line)


if __name__ == "__main__":
    main()
