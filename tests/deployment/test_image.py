"""The image's files against the code: what Docker would see, and what it would run."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from dflash_trt.cli.serve import command

TREE = Path(__file__).parents[2]


def read_dockerfile() -> dict[str, str]:
    """The last of each instruction, its lines joined."""
    text = re.sub(r"\\\n", " ", read("deploy/Dockerfile"))
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {name: rest for name, _, rest in (line.partition(" ") for line in lines)}


def read_serve(arguments: list[str]) -> dict[str, Any]:
    """What `serve` makes of these arguments; it refuses what it does not know."""
    return command.make_context("serve", list(arguments)).params


def test_the_command_is_one_that_serve_takes() -> None:
    image = read_dockerfile()
    assert json.loads(image["ENTRYPOINT"])[-2:] == ["dflash-trt", "serve"]
    options = read_serve(json.loads(image["CMD"]))
    ports = [options[f"{name}_port"] for name in ("openai", "grpc", "metrics")]
    assert image["EXPOSE"].split() == list(map(str, ports))
    assert options["host"] == "0.0.0.0" and not options["expose_http"]
    assert f"http://127.0.0.1:{options['openai_port']}/health" in image["HEALTHCHECK"]
    assert image["USER"] == "10001:10001" and "--uid 10001" in read("deploy/install.sh")


def test_a_build_sees_what_the_wheel_is_made_of() -> None:
    project = tomllib.loads(read("pyproject.toml"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {*wheel["packages"], *wheel["force-include"], *project["project"]["license-files"]}
    needed |= {project["project"]["readme"], "pyproject.toml", "constraints.txt"}
    lines = read(".dockerignore").splitlines()
    assert {line[1:] for line in lines if line.startswith("!")} == needed | {"deploy/install.sh"}


def read(name: str) -> str:
    return (TREE / name).read_text(encoding="utf-8")
