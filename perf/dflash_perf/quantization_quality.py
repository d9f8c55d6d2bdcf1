"""What FP8 and NVFP4 cost the demo pair, in its text and its acceptance.

    python -m dflash_perf.quantization_quality --output perf/results

Each recipe is built as `dflash-trt build --precision …` builds it, calibrated on the pair's own
prompts, and compared with the pair as it ships: both read the prompts with what the pair as it
ships makes of them, and every target decodes the prompts with every draft, greedily. The CPU
executor rounds weights and inputs as FP8 and FP4 hardware does, so that this is what the formats
cost; it says nothing about speed.
"""

from __future__ import annotations

import tempfile
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from dflash_perf.record import write_record
from dflash_trt.bundle.bundle import Bundle, open_bundle
from dflash_trt.bundle.summary import precision_line
from dflash_trt.bundle.tokenizer import load_tokenizer
from dflash_trt.bundle.twins import check_twins
from dflash_trt.cli import main as run_command
from dflash_trt.commands.against import Bounds, Comparison, compare
from dflash_trt.commands.options import encode_prompts
from dflash_trt.executors import open_executor
from dflash_trt.runtime import Engine, Request, SamplingParams
from dflash_trt.runtime.comparison import AcceptanceFigures, find_loss


@dataclass(frozen=True, slots=True)
class Recipe:
    """Options of `build`, and a name for them."""

    name: str
    options: tuple[str, ...]


# Attention's linears are a quarter of a layer's weights; ModelOpt's name is NVFP4_MLP_ONLY.
_MLP = ("--exclude", "*.self_attn.*")
RECIPES = (
    Recipe("FP8", ("--precision", "fp8")),
    Recipe("NVFP4, all linears", ("--precision", "nvfp4")),
    Recipe("NVFP4, all linears; draft FP8", ("--precision", "nvfp4", "--draft-precision", "fp8")),
    Recipe("NVFP4, MLPs", ("--precision", "nvfp4", *_MLP)),
    Recipe(
        "NVFP4, MLPs; draft FP8, all linears",
        ("--precision", "nvfp4", "--draft-precision", "fp8", "--exclude", "model.*.self_attn.*"),
    ),
)


def build(folder: Path, *options: str) -> Bundle:
    """A bundle of the demo pair in `folder`."""
    code = run_command(["build", "--target", "demo", "-o", str(folder), *options])
    if code:
        raise click.ClickException(f"building failed with exit code {code}")
    return open_bundle(folder)


def continue_prompts(
    bundle: Bundle, prompts: list[list[int]], max_tokens: int, threads: int
) -> list[list[int]]:
    """Each prompt and what the bundle makes of it, greedily, as token ids."""
    manifest = bundle.manifest
    with closing(open_executor(bundle, threads=threads)) as executor:
        engine = Engine(executor, eos_token_ids=manifest.target.eos_token_ids)
        requests = [Request(prompt_ids=tuple(ids), max_tokens=max_tokens) for ids in prompts]
        results = engine.generate(requests)
    return [[*ids, *result.token_ids] for ids, result in zip(prompts, results, strict=True)]


def measure(
    bundle: Bundle,
    twin: Bundle,
    prompts: list[list[int]],
    texts: list[list[int]],
    max_tokens: int,
    threads: int,
) -> Comparison:
    """The bundle beside its twin: reading `texts`, continuing `prompts`."""
    return compare(
        check_twins(bundle, twin),
        prompts,
        texts,
        SamplingParams(),
        max_tokens=max_tokens,
        threads=threads,
        bounds=Bounds(agreement=None, tau_loss=None),
    )


@click.command()
@click.option("--max-tokens", type=click.IntRange(2), default=192, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="Folder to record the run in.")
def main(max_tokens: int, threads: int, output: Path | None) -> None:
    """Compare the demo pair in FP8 and NVFP4 with the pair in high precision."""
    figures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        twin = build(Path(name) / "twin")
        prompts = encode_prompts(load_tokenizer(twin), None, None, twin.prompts, raw=False)
        texts = continue_prompts(twin, prompts, max_tokens, threads)
        for number, recipe in enumerate(RECIPES):
            bundle = build(Path(name) / f"recipe-{number}", *recipe.options)
            comparison = measure(bundle, twin, prompts, texts, max_tokens, threads)
            figures.append(_figures(recipe, bundle, comparison))
    for line in _table(figures):
        click.echo(line)
    if output is not None:
        record = {"max_tokens": max_tokens, "temperature": 0.0, "recipes": figures}
        module = "dflash_perf.quantization_quality"
        click.echo(write_record(output, "quantization-quality", module, record))


def _figures(recipe: Recipe, bundle: Bundle, comparison: Comparison) -> dict[str, Any]:
    reference = comparison.acceptances[0]
    models = (bundle.manifest.target, bundle.manifest.draft)
    return {
        "recipe": recipe.name,
        "options": list(recipe.options),
        "precision": precision_line(bundle.manifest).removesuffix(", "),
        "weight_bytes": {"target": models[0].weight_bytes, "draft": models[1].weight_bytes},
        "text": asdict(comparison.text),
        "acceptance": [_acceptance(reference, one) for one in comparison.acceptances],
    }


def _acceptance(reference: AcceptanceFigures, figures: AcceptanceFigures) -> dict[str, Any]:
    return {
        "target": "high precision" if figures.target == "twin" else "quantised",
        "draft": "high precision" if figures.draft == "twin" else "quantised",
        "acceptance_length": figures.statistics.acceptance_length,
        "loss_percent": find_loss(reference, figures),
        "steps": figures.statistics.steps,
        "tokens": figures.tokens,
    }


def _table(figures: list[dict[str, Any]]) -> list[str]:
    """A Markdown table: a recipe a row."""
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


if __name__ == "__main__":
    main()
