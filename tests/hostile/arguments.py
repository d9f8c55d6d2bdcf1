"""Arguments that no one means: odd values of every option of the commands that take files."""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path
from random import Random

import click

from tests.hostile.case import PROMPT, THREAD, Command, HostileCase
from tests.hostile.values import TEXTS

COUNT = 220
_GOOD: dict[str, Command] = {
    "build": ("--target", "pair/pair.yaml", "-o", "out/b"),
    "generate": ("bundle", *PROMPT),
    "import-gguf": ("hf/m.gguf", "-o", "out/hf"),
    "inspect": ("bundle",),
    "package": ("bundle", "-o", "out/r"),
    "quantize": ("--checkpoint", "pair/target", "--precision", "fp8", "-o", "out/q", "--help"),
    "verify": ("bundle", *PROMPT, "--repeats", "0", "--batch", "1"),
    "plan": ("--target", "qwen3-8b", "--gpu", "b200"),
}
_LEFT_OUT = {
    "--url",  # names of other machines
    *("--repeats", "--max-tokens", "--chat"),  # as long as one asks for
    *("--executor", "--plugins", "--arch"),  # TensorRT's, with tests of their own
}
_VALUES = (
    *(one for one in TEXTS if "\0" not in one),
    *("0", "1", "2", "3", "-5", "64", "99999999999999999999", "1e5", "1.5", "inf", "NaN", "0x10"),
    *("٣", "1_0", " 4", "1,2,,3", "a=b", "=", "auto", "none", "all", "--json", "*", "(a+)+$"),
    *("bundle", "pair", "pair/pair.yaml", "out", "hf/m.gguf", "bundle/manifest.json", ".", "/"),
    *("/dev/null", "/dev/full", "/proc/self/mem", "out/b", "-", "~", "file:///etc/passwd"),
)


def make(random: Random, number: int) -> HostileCase:
    """A command that is right but for one to three options, or a word too many."""
    name = random.choice(sorted(_GOOD))
    words = list(_GOOD[name])
    if "-o" in words and random.random() < 0.15:
        words[words.index("-o") + 1] = random.choice(_VALUES)
    for _ in range(random.choice((1, 1, 2, 3))):
        way = random.randrange(10)
        if way == 0:
            words.insert(random.randrange(len(words) + 1), random.choice(_VALUES))
        elif way == 1 and words:
            words.pop(random.randrange(len(words)))
        elif way == 2:
            words += [random.choice(("--nothing", "--", "-x", "--max-batch", "--" + "a" * 5000))]
        else:
            option, takes_value = random.choice(_options(name))
            words += [option, random.choice(_VALUES)] if takes_value else [option]
    words = [*words, *(THREAD if name == "package" else ())]
    command = (name, *words)
    about = " ".join(command)[:150]
    return HostileCase(about, ("bundle", "pair", "hf"), _touch, (command,))


def _touch(folder: Path) -> None:
    """Nothing is hostile but the arguments."""


@cache
def _options(name: str) -> list[tuple[str, bool]]:
    """The options of a command, and whether each takes a value."""
    command: click.Command = importlib.import_module(
        f"dflash_trt.cli.{name.replace('-', '_')}"
    ).command
    found: list[tuple[str, bool]] = []
    for one in command.params:
        if isinstance(one, click.Option):
            found += [(text, not one.is_flag) for text in one.opts if text not in _LEFT_OUT]
    return found
