"""`dflash-trt train-draft`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dflash_trt.cli.options import (
    FOLDER,
    LAYERS,
    json_option,
    print_json,
    template_option,
    threads_option,
)
from dflash_trt.cli.training_watch import TerminalWatch
from dflash_trt.core.limits import MAX_COUNT
from dflash_trt.errors import DflashError, import_extra, nearest, one_line
from dflash_trt.hardware.cores import AUTO, ThreadChoice, available_cores
from dflash_trt.models.dflash2 import MAX_CANDIDATES, MAX_RANK
from dflash_trt.text.hub_prompts import EXAMPLE
from dflash_trt.training.training_request import TrainRequest

_COUNT = click.IntRange(1, MAX_COUNT)


_SETTINGS: dict[str, click.ParamType] = {  # type: ignore[type-arg]
    "anchors": _COUNT,
    "answer-tokens": click.IntRange(8, MAX_COUNT),
    "batch-rows": click.IntRange(1, 4096),
    "draft-tokens": click.IntRange(0, MAX_COUNT),
    "endpoint-model": click.STRING,
    "ffn": _COUNT,
    "gamma": click.FloatRange(0.1, 1000),
    "layers": click.IntRange(1, 64),
    "learning-rate": click.FloatRange(1e-7, 1),
    "markov-rank": _COUNT,
    "mask-token-id": click.IntRange(0, MAX_COUNT),
    "max-length": click.IntRange(32, MAX_COUNT),
    "online": click.BOOL,
    "raw": click.BOOL,
    "rows": _COUNT,
    "selector-rank": click.IntRange(1, MAX_RANK),
    "selector-top-k": click.IntRange(1, MAX_CANDIDATES),
    "seed": click.IntRange(0, 2**31 - 1),
    "steps": _COUNT,
    "taps": LAYERS,
    "temperature": click.FloatRange(0, 10),
    "topics": click.Path(path_type=Path),
    "work": FOLDER,
}
"""Types of the values of the recipe, by name."""


def _read_settings(
    context: click.Context, parameter: click.Parameter, given: tuple[str, ...]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in given:
        name, equals, text = item.partition("=")
        if not equals or name not in _SETTINGS:
            known = list(_SETTINGS)
            what = f"{one_line(item, 60)!r} is not NAME=VALUE{nearest(name, known)}"
            fix = f"names are {', '.join(known)}"
            raise DflashError(what, where="--set", fix=fix, usage=True)
        found[name.replace("-", "_")] = _SETTINGS[name].convert(text, parameter, context)
    return found


@click.command("train-draft")
@click.option(
    "--target",
    required=True,
    help="A checkpoint's folder, a bundle's (whose weights, quantized or not, are the target "
    "then), or a name from `targets`.",
)
@click.option(
    "--prompts",
    metavar="[NAME=]SOURCE[:SHARE]",
    multiple=True,
    required=True,
    help='A set of prompts: .jsonl with a "prompt" or "messages" a line, '
    f"{EXAMPLE}, or self[:COUNT], which the target writes as its users would; SHARE, 0.4 say, is "
    "its part of the rows to train on; repeatable.",
)
@click.option(
    "--held-out",
    metavar="[NAME=]FILE",
    multiple=True,
    help="Prompts to measure on; repeatable.  [default: 5 % of the others, 16 to 100 of them, "
    "so that a measurement is sure to a few per cent and costs little]",
)
@click.option(
    "--given-answers",
    is_flag=True,
    help="Each line's \"answer\" (a text or token ids) is the target's own. Otherwise the "
    "target is asked: a draft learns what it is shown, and only the target's own words are "
    "accepted.",
)
@click.option("--system-prompt", help="Stands before every conversation, as it is served.")
@template_option(
    ": a draft that was trained in another thinking mode than is served is worth little"
)
@click.option("--hours", type=float, required=True, help="Wall time for everything.")
@click.option(
    "--from",
    "start",
    type=FOLDER,
    help="A draft to go on with; it brings its shape along. With --kind dflash2 a DFlash draft "
    "goes on as one of DFlash 2.",
)
@click.option(
    "--answers-from",
    "url",
    metavar="URL",
    help="An OpenAI-compatible server of the target that gives the answers.  [default: this "
    "process, through the target's graphs]",
)
@click.option(
    "--kind",
    type=click.Choice(["dflash", "dflash2", "dspark", "eagle3", "mtp"]),
    help="Of draft: dflash2 chooses among each slot's likeliest tokens by the one before, dspark "
    "has a head that knows it, eagle3 is a chain, mtp goes on with a Qwen3.5's own layer.  "
    "[default: dflash]",
)
@click.option(
    "--block-size",
    type=click.IntRange(2, 4096),
    help="Rows of a verify step, anchor included.  [default: 16, the paper's; up to 4 h on a "
    "CPU 8, as its steps grow with their rows]",
)
@click.option(
    "--set",
    "settings",
    metavar="NAME=VALUE",
    multiple=True,
    callback=_read_settings,
    help=f"Replace a value of the recipe: {', '.join(_SETTINGS)} (docs/training.md); repeatable.",
)
@threads_option
@click.option("--overwrite", is_flag=True, help="Replace a draft and a bundle that exist.")
@click.option(
    "--plan",
    "only_plan",
    is_flag=True,
    help="Print the plan, and stop; prompts of `self` are written first.",
)
@json_option
@click.option(
    "-o",
    "--output",
    type=FOLDER,
    required=True,
    help="The draft's folder; the pair's bundle goes into DRAFT-bundle beside it.",
)
def command(
    only_plan: bool,
    as_json: bool,
    threads: ThreadChoice,
    settings: dict[str, Any],
    **given: Any,
) -> None:
    """Train a DFlash draft for a target, from prompts to a proven pair.

    The prompts are rendered as serving sends them, answered by the target, and turned into
    features by the graphs that serve; then a draft is trained, measured after each epoch by
    replaying held-out answers through those graphs, and the best one is built and proven. The plan
    comes first. A run that was interrupted goes on when the same command is given again.
    """
    # Imported here: PyTorch takes seconds, and `--help` needs none of it.
    import_extra("torch", "train", "training")
    from dflash_trt.training.run import train_draft

    # PyTorch has work for all cores, however small the target.
    chosen = available_cores() if threads == AUTO else threads
    request = TrainRequest(**given, **settings, threads=chosen)
    with TerminalWatch(request.output.name, as_json=as_json) as watch:
        watch.say(f"{chosen} CPU thread{'s'[: chosen > 1]}")
        pair = train_draft(request, watch, only_plan=only_plan)
    if as_json:
        print_json(watch.to_json(pair))
    elif pair is not None:
        watch.show_result(pair)
