"""What FP8 and NVFP4 cost the demo pair, in its text and its acceptance.

Each recipe is built as `dflash-trt build --precision …` builds it, calibrated on the pair's own
prompts, and compared with the pair as it ships: both read the prompts with what the pair as it
ships makes of them, and every target decodes the prompts with every draft, greedily. The CPU
executor rounds weights and inputs as FP8 and FP4 hardware does, so that this is what the formats
cost; it says nothing about speed.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from dflash_perf.bench.base import Figures, Work, bench
from dflash_perf.bench.bundles import requests_of
from dflash_perf.bench.process import build
from dflash_trt.bundle.bundle import Bundle, open_bundle
from dflash_trt.bundle.summary import precision_line
from dflash_trt.core.progress import SilentProgress
from dflash_trt.pair import LoadedPair
from dflash_trt.proof.twin_comparison import Bounds, TwinComparison, compare
from dflash_trt.proof.twins import check_twins
from dflash_trt.runtime import Request, SamplingParams

# Attention's linears are a quarter of a layer's weights; ModelOpt's name is NVFP4_MLP_ONLY.
_MLP = ("--exclude", "*.self_attn.*")
RECIPES: dict[str, tuple[str, ...]] = {
    "FP8": ("--precision", "fp8"),
    "NVFP4, all linears": ("--precision", "nvfp4"),
    "NVFP4, all linears; draft FP8": ("--precision", "nvfp4", "--draft-precision", "fp8"),
    "NVFP4, MLPs": ("--precision", "nvfp4", *_MLP),
    "NVFP4, MLPs; draft FP8, all linears": (
        *("--precision", "nvfp4", "--draft-precision", "fp8"),
        *("--exclude", "model.*.self_attn.*"),
    ),
}
"""Options of `build` by the name of the recipe."""


def build_demo(folder: Path, *options: str) -> Bundle:
    """A bundle of the demo pair in `folder`."""
    build("demo", folder, *options)
    return open_bundle(folder)


def continue_prompts(bundle: Bundle, requests: list[Request], threads: int) -> list[list[int]]:
    """Each prompt with the bundle's greedy continuation, as token ids."""
    with LoadedPair(bundle, threads=threads) as pair:
        results = pair.run(requests)
    return [
        [*request.prompt_ids, *result.token_ids]
        for request, result in zip(requests, results, strict=True)
    ]


@bench()
def measure(work: Work, *, max_tokens: int = 192, threads: int = 1) -> Figures:
    twin = build_demo(work.folder / "twin")
    requests = requests_of(twin, max_tokens)
    prompts = [list(request.prompt_ids) for request in requests]
    texts = continue_prompts(twin, requests, threads)
    figures: list[Figures] = []
    for number, (name, options) in enumerate(RECIPES.items()):
        bundle = build_demo(work.folder / f"recipe-{number}", *options)
        comparison = compare(
            check_twins(bundle, twin),
            prompts,
            texts,
            SamplingParams(),
            max_tokens=max_tokens,
            threads=threads,
            bounds=Bounds(agreement=None, tau_loss=None),
            progress=SilentProgress(),
        )
        figures.append(_figures(name, options, bundle, comparison))
    for line in _table(figures):
        click.echo(line)
    return {"recipes": figures}


def _figures(
    name: str, options: tuple[str, ...], bundle: Bundle, comparison: TwinComparison
) -> Figures:
    manifest, kinds = bundle.manifest, {True: "high precision", False: "quantised"}
    return {
        "recipe": name,
        "options": list(options),
        "precision": precision_line(manifest).removesuffix(", "),
        "weight_bytes": {
            "target": manifest.target.weight_bytes,
            "draft": manifest.draft.weight_bytes,
        },
        "text": asdict(comparison.text),
        "acceptance": [
            {
                "target": kinds[one.target == "twin"],
                "draft": kinds[one.draft == "twin"],
                "acceptance_length": one.statistics.acceptance_length,
                "loss_percent": comparison.find_loss(one),
                "steps": one.statistics.steps,
                "tokens": one.statistics.step_tokens,
            }
            for one in comparison.acceptances
        ],
    }


def _table(figures: list[Figures]) -> list[str]:
    """A Markdown table with one row per recipe."""
    lines = [
        "| recipe | target + draft, KiB | same likeliest token | KL, nats | perplexity | "
        "acceptance length: neither quantised | draft quantised | target quantised | both | loss |",
        "|" + "---|" * 10,
    ]
    for one in figures:
        text, lengths = one["text"], [row["acceptance_length"] for row in one["acceptance"]]
        change = text["perplexity"] / text["twin_perplexity"] - 1
        size = " + ".join(f"{count / 1024:,.0f}" for count in one["weight_bytes"].values())
        cells = [
            one["recipe"],
            size,
            f"{text['agreement']:.2%}",
            f"{text['mean_kl']:.4f}",
            f"{change:+.2%}",
            *(f"{length:.2f}" for length in lengths),
            f"{one['acceptance'][-1]['loss_percent']:.1f} %",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines
