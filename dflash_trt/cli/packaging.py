"""How a bundle becomes a model repository: options of `package`, and of `serve` for a bundle."""

from __future__ import annotations

from dataclasses import fields

import click

from dflash_trt.cli.options import (
    block_schedule_option,
    drafter_option,
    option_group,
    threads_option,
)
from dflash_trt.errors import refuse_options
from dflash_trt.serving.server.repository import RepositoryOptions

_DEFAULTS = RepositoryOptions()
_NO_SPECULATION = "--no-speculation"

packaging_options = option_group(
    "packaging",
    RepositoryOptions,
    click.option(
        _NO_SPECULATION,
        "speculation",
        is_flag=True,
        flag_value=False,
        default=_DEFAULTS.speculation,
        help="Serve the autoregressive baseline, the target alone.",
    ),
    block_schedule_option,
    drafter_option,
    click.option(
        "--max-queue-size",
        type=click.IntRange(0, 1 << 20),
        default=_DEFAULTS.max_queue_size,
        help="Requests that may wait for a slot; more are refused at once.",
    ),
    click.option(
        "--request-seconds",
        type=click.IntRange(0, 86400),
        default=_DEFAULTS.request_seconds,
        help="After so long, from its arrival on, a request ends with an error; 0: never.",
    ),
    threads_option,
)


def refuse_packaging(given: RepositoryOptions) -> None:
    """Raises DflashError (usage) where an option asks for what a repository has decided."""
    for field in fields(given):
        option = f"--{field.name.replace('_', '-')}"
        name = _NO_SPECULATION if field.name == "speculation" else option
        differs = getattr(given, field.name) != getattr(_DEFAULTS, field.name)
        refuse_options(
            {name: differs},
            "is a model repository, whose config.pbtxt says how to decode",
            f"pass a BUNDLE, or use `dflash-trt package {name}`",
        )
