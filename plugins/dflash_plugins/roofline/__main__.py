"""What each kernel should take on a GPU, on paper: time, and share of the memory's bandwidth.

    python -m dflash_plugins.roofline --gpu b200 --pair qwen3-8b --context 4096

Kernels are compiled for it, once, without a GPU; --check needs no compiler.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import click

from dflash_plugins.compile import check_compiler
from dflash_plugins.operation import DType
from dflash_plugins.public import public_pairs
from dflash_plugins.roofline.published import published_arithmetic, published_times
from dflash_plugins.roofline.rates import GpuRates, find_rates
from dflash_plugins.roofline.recurrence import describe_recurrences, recurrence_cells
from dflash_plugins.roofline.steps import SMALL_KERNELS, step_parts
from dflash_plugins.roofline.table import (
    AttentionCell,
    attention_cells,
    describe_arithmetic,
    describe_attention,
    describe_classes,
    describe_errors,
    describe_formula,
    describe_steps,
)
from dflash_trt.core.user_cache import user_cache_file
from dflash_trt.errors import DflashError, nearest, one_line, refuse_options

GPUS = ("h200", "b200", "b300", "rtx-pro-6000")
BATCHES, CONTEXTS = (1, 8, 64), (512, 2048, 8192, 32_768, 131_072)
STEP_BATCHES, STEP_CONTEXTS = (1, 32), (4096,)
ATTENTION, RECURRENCE = "block_attention", "gated_delta_step"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What to predict: names that are known."""

    gpus: list[GpuRates]
    pairs: list[str]
    kernels: list[str]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    cache: str
    paged: bool

    def tables(self) -> Iterator[tuple[list[str], list[dict[str, Any]], list[AttentionCell]]]:
        """Of every GPU and pair: lines for a terminal, the same as JSON, cells of attention."""
        folder = user_cache_file("kernels")
        for one in self.gpus:
            if RECURRENCE in self.kernels:
                layers = list(recurrence_cells(one, self.batches or BATCHES, folder))
                yield list(describe_recurrences(layers)), [x.as_json() for x in layers], []
            for pair in self.pairs:
                if ATTENTION in self.kernels:
                    cells = list(
                        attention_cells(
                            one,
                            pair,
                            self.batches or BATCHES,
                            self.contexts or CONTEXTS,
                            folder,
                            cache=CACHES[self.cache],
                            is_paged=self.paged,
                        )
                    )
                    yield list(describe_attention(cells)), [x.as_json() for x in cells], cells
                if set(SMALL_KERNELS) & set(self.kernels):
                    parts = [
                        part
                        for context in self.contexts or STEP_CONTEXTS
                        for part in step_parts(
                            one, pair, self.kernels, self.batches or STEP_BATCHES, context, folder
                        )
                    ]
                    rows = [part.as_json(one.name) for part in parts]
                    yield list(describe_steps(one, parts)), rows, []


@click.command(help=(__doc__ or "").partition("\n")[0])
@click.option("--gpu", "gpus", multiple=True, help=f"One of {', '.join(GPUS)} …; repeatable.")
@click.option("--pair", "pairs", multiple=True, help="A public pair's heads; repeatable.")
@click.option("--kernel", "kernels", multiple=True, help="Only this one; repeatable.")
@click.option("--batch", "batches", multiple=True, type=click.IntRange(1, 1024), help="Sequences.")
@click.option(
    "--context", "contexts", multiple=True, type=click.IntRange(1, 1 << 20), help="Tokens."
)
@click.option("--cache", type=click.Choice(list(CACHES)), help="Attention's caches; bf16 unasked.")
@click.option("--paged", is_flag=True, help="Attention over paged caches.")
@click.option("--check", is_flag=True, help="The errors on published measurements, and no more.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(
    gpus: tuple[str, ...],
    pairs: tuple[str, ...],
    kernels: tuple[str, ...],
    batches: tuple[int, ...],
    contexts: tuple[int, ...],
    cache: str | None,
    paged: bool,
    check: bool,
    as_json: bool,
) -> None:
    try:
        if check:
            given = {"--gpu": gpus, "--pair": pairs, "--kernel": kernels, "--batch": batches}
            given |= {"--context": contexts}
            refuse_options(given, "--check prints every published measurement; leave this out")
            _print_check(as_json)
            return
        asked = _Asked(
            gpus=[find_rates(name) for name in gpus or GPUS],
            pairs=_known("--pair", pairs, list(public_pairs())),
            kernels=_known("--kernel", kernels, (ATTENTION, RECURRENCE, *SMALL_KERNELS)),
            batches=batches,
            contexts=contexts,
            cache=cache or "bf16",
            paged=paged,
        )
        if ATTENTION not in asked.kernels:
            given_forms = {"--cache": cache, "--paged": paged}
            refuse_options(given_forms, f"is for {ATTENTION}, which --kernel leaves out")
        check_compiler()
        _print_tables(asked, as_json)
    except DflashError as error:
        click.echo(f"Error: {error.message}", err=True)
        raise click.exceptions.Exit(error.exit_code) from error


def _print_tables(asked: _Asked, as_json: bool) -> None:
    """As they are computed: the first of each kernel is compiled, which takes a second."""
    cells: list[AttentionCell] = []
    rows: list[dict[str, Any]] = []
    for lines, own, found in asked.tables():
        cells, rows = cells + found, rows + own
        if not as_json:
            click.echo("\n".join([*lines, ""]))
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    click.echo("\n".join([*describe_classes(cells), "", *describe_formula()]))


def _print_check(as_json: bool) -> None:
    times, prompts = published_times(), published_arithmetic()
    if as_json:
        told = {
            "decode": [one.as_json() for one in times],
            "prompts": [one.as_json() for one in prompts],
        }
        click.echo(json.dumps(told, indent=2))
        return
    click.echo("\n".join([*describe_errors(times), "", *describe_arithmetic(prompts)]))


if __name__ == "__main__":
    main()
