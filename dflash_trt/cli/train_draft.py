"""`dflash-trt train-draft`."""

from __future__ import annotations

from typing import Any

import click

from dflash_trt.cli.options import (
    FOLDER,
    json_option,
    option_group,
    print_json,
    template_option,
    threads_option,
)
from dflash_trt.cli.training_watch import TerminalWatch
from dflash_trt.core.limits import MAX_COUNT
from dflash_trt.errors import DflashError
from dflash_trt.hardware.cores import AUTO, ThreadChoice, available_cores
from dflash_trt.text.hub_prompts import EXAMPLE
from dflash_trt.training.extras import training_module
from dflash_trt.training.request import (
    ANSWER_TOKENS,
    MAX_LENGTH,
    DataOptions,
    EndpointOptions,
    RecipeOptions,
    ShapeOptions,
    TrainRequest,
)

_COUNT = click.IntRange(1, MAX_COUNT)


def _read_taps(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    if value is None:
        return None
    items = [item.strip() for item in value.split(",")]
    if not all(item.isdecimal() and len(item) < 6 for item in items):
        raise DflashError(f"{value!r} is no list of layers, as 1,8,15", where="--taps", usage=True)
    return tuple(int(item) for item in items)


_data = option_group(
    "data",
    DataOptions,
    click.option(
        "--prompts",
        metavar="[NAME=]FILE",
        multiple=True,
        required=True,
        help='A set of prompts: .jsonl with a "prompt" or "messages" a line, or '
        f"{EXAMPLE}; repeatable.",
    ),
    click.option(
        "--held-out",
        metavar="[NAME=]FILE",
        multiple=True,
        help="Prompts to measure on; repeatable.  [default: 5 % of the others, 16 to 100 of them, "
        "so that a measurement is sure to a few per cent and costs little]",
    ),
    click.option(
        "--given-answers",
        is_flag=True,
        help="Each line's \"answer\" (a text or token ids) is the target's own. Otherwise the "
        "target is asked: a draft learns what it is shown, and only the target's own words are "
        "accepted.",
    ),
    click.option("--system-prompt", help="Stands before every conversation, as it is served."),
    template_option(
        ": a draft that was trained in another thinking mode than is served is worth little"
    ),
    click.option("--raw", is_flag=True, help="Send prompts without the chat template."),
    click.option(
        "--max-length",
        type=click.IntRange(32, MAX_COUNT),
        default=MAX_LENGTH,
        help="Tokens of a row at most: the paper's.",
    ),
    click.option(
        "--answer-tokens",
        type=click.IntRange(8, MAX_COUNT),
        default=ANSWER_TOKENS,
        help="Tokens of an answer at most: more prompts teach more than longer answers.",
    ),
    click.option(
        "--temperature",
        type=click.FloatRange(0, 10),
        default=0.0,
        help="Of the answers; greedy ones are what greedy serving says.",
    ),
    click.option(
        "--rows",
        type=_COUNT,
        help="Prompts to train on.  [default: what 35 % of the hours can answer]",
    ),
)
_endpoint = option_group(
    "endpoint",
    EndpointOptions,
    click.option(
        "--answers-from",
        "url",
        metavar="URL",
        help="An OpenAI-compatible server of the target that gives the answers.  [default: this "
        "process, through the target's graphs]",
    ),
    click.option("--endpoint-model", "model", help="Which of its models.  [default: the only one]"),
)
_shape = option_group(
    "shape",
    ShapeOptions,
    click.option(
        "--kind",
        type=click.Choice(["dflash", "dspark", "eagle3"]),
        help="Of draft: dspark has a head that knows the token before, eagle3 is a chain.  "
        "[default: dflash]",
    ),
    click.option(
        "--layers",
        type=click.IntRange(1, 64),
        help="Of the draft.  [default: 5, the paper's; up to 4 h on a CPU 2, which cost less]",
    ),
    click.option(
        "--block-size",
        type=click.IntRange(2, 4096),
        help="Rows of a verify step, anchor included.  [default: 16, the paper's; up to 4 h on a "
        "CPU 8, as its steps grow with their rows]",
    ),
    click.option(
        "--taps",
        metavar="LAYERS",
        callback=_read_taps,
        help="Target layers, from 0, whose outputs feed the draft.  [default: five, evenly from 1 "
        "to N - 3, the paper's]",
    ),
    click.option(
        "--ffn",
        "intermediate_size",
        type=_COUNT,
        help="Width of the draft's MLPs.  [default: the target's; three hidden sizes where the "
        "target is a mixture of experts]",
    ),
    click.option(
        "--mask-token-id",
        type=click.IntRange(0, MAX_COUNT),
        help="Stands where tokens are to be drafted.  [default: a reserved or unused token; which "
        "and why is said]",
    ),
    click.option(
        "--markov-rank",
        type=_COUNT,
        help="Of DSpark's head.  [default: 256, the paper's; the hidden size where that is less]",
    ),
)
_recipe = option_group(
    "recipe",
    RecipeOptions,
    click.option(
        "--anchors",
        type=_COUNT,
        help="Blocks of a row in a step.  [default: 512, the paper's; on a CPU 64, where blocks "
        "cost the time]",
    ),
    click.option(
        "--gamma",
        type=click.FloatRange(0.1, 1000),
        help="Slot k's loss weighs exp(-(k-1)/gamma).  [default: the paper's 4, 5 and 7 for blocks "
        "of 8, 10 and 16]",
    ),
    click.option(
        "--learning-rate",
        type=click.FloatRange(1e-7, 1),
        help="At the top of the schedule.  [default: what the optimiser was measured with; half of "
        "it with --from]",
    ),
    click.option(
        "--batch-rows",
        type=click.IntRange(1, 4096),
        help="Rows of a step.  [default: 16; on a CPU 4, as more steps learn more in the time]",
    ),
    click.option(
        "--draft-tokens",
        type=click.IntRange(0, MAX_COUNT),
        help="The draft chooses among so many tokens, the commonest; 0 is all. Answers stay the "
        "same, a step reads less.  [default: all; 4096 on a CPU with a large vocabulary]",
    ),
    click.option(
        "--steps",
        type=_COUNT,
        help="Of training, all of them.  [default: what 45 % of the hours pay for, until "
        "acceptance has stopped rising]",
    ),
)


@click.command("train-draft")
@click.option(
    "--target",
    required=True,
    help="A checkpoint's folder, a bundle's (whose weights, quantized or not, are the target "
    "then), or a name from `targets`.",
)
@_data
@click.option("--hours", type=float, required=True, help="Wall time for everything.")
@click.option(
    "--from", "start", type=FOLDER, help="A draft to go on with; it brings its shape along."
)
@_endpoint
@_shape
@_recipe
@click.option(
    "--online",
    is_flag=True,
    help="Compute features whenever a row is used: slower, but no disk holds them.",
)
@threads_option
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, help="Of everything drawn.")
@click.option(
    "--work",
    type=FOLDER,
    help="Where stages keep what they finished.  [default: .DRAFT.work beside the output]",
)
@click.option("--overwrite", is_flag=True, help="Replace a draft and a bundle that exist.")
@click.option("--plan", "only_plan", is_flag=True, help="Print the plan, and stop.")
@json_option
@click.option(
    "-o",
    "--output",
    type=FOLDER,
    required=True,
    help="The draft's folder; the pair's bundle goes into DRAFT-bundle beside it.",
)
def command(only_plan: bool, as_json: bool, threads: ThreadChoice, **given: Any) -> None:
    """Train a DFlash draft for a target, from prompts to a proven pair.

    The prompts are rendered as serving sends them, answered by the target, and turned into
    features by the graphs that serve; then a draft is trained, measured after each epoch by
    replaying held-out answers through those graphs, and the best one is built and proven. The plan
    comes first. A run that was interrupted goes on when the same command is given again.
    """
    # Imported here: PyTorch takes seconds, and `--help` needs none of it.
    training_module("torch")
    from dflash_trt.training.run import train_draft

    # PyTorch has work for all cores, however small the target.
    chosen = available_cores() if threads == AUTO else threads
    request = TrainRequest(**given, threads=chosen)
    with TerminalWatch(request.output.name, as_json=as_json) as watch:
        watch.say(f"{chosen} CPU thread{'s'[: chosen > 1]}")
        pair = train_draft(request, watch, only_plan=only_plan)
    if as_json:
        print_json(watch.to_json(pair))
    elif pair is not None:
        watch.show_result(pair)
