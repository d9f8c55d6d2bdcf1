"""`dflash-trt targets`."""

from __future__ import annotations

import click

from dflash_trt.cli.options import json_option, print_json
from dflash_trt.config import (
    BuildConfig,
    HardwareProfile,
    load_config,
    target_names,
    targets_not_yet,
)


@click.command("targets")
@json_option
def command(as_json: bool) -> None:
    """List the configurations that `build --target` knows, and public pairs that it does not."""
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
        for number, line in enumerate(_describe(config)):
            click.echo(f"{'' if number else name:<{width}}  {line}")
    for why in dict.fromkeys(missing.values()):
        names = ", ".join(name for name, reason in missing.items() if reason == why)
        click.echo(f"not yet: {names}: {why}")


def _describe(config: BuildConfig) -> list[str]:
    profiles = [name + _split(one) for name, one in config.profiles.items()]
    return [
        config.description,
        *([f"profiles: {', '.join(profiles)}"] if profiles else []),
        f"verified: {config.verified}",
    ]


def _split(profile: HardwareProfile) -> str:
    """How a profile of several GPUs splits a model."""
    if profile.gpus == 1:
        return ""
    ways = [f"TP {profile.tensor_parallel}"]
    if profile.expert_parallel is not None:
        ways.append(f"EP {profile.expert_parallel}")
    if profile.nodes > 1:
        ways.append(f"{profile.nodes} nodes")
    return f" ({', '.join(ways)})"
