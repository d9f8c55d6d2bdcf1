"""`dflash-trt targets`."""

from __future__ import annotations

import json

import click

from dflash_trt.config import load_config, target_names


@click.command("targets", short_help="List the configurations that `build --target` knows.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool) -> None:
    """List the configurations that `build --target` knows."""
    configs = {name: load_config(name)[0] for name in target_names()}
    if as_json:
        click.echo(
            json.dumps({name: config.model_dump() for name, config in configs.items()}, indent=2)
        )
        return
    width = max(map(len, configs), default=0)
    for name, config in configs.items():
        click.echo(f"{name:<{width}}  {config.description}")
        click.echo(f"{'':<{width}}  verified: {config.verified}")
