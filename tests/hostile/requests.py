"""Hostile prompts, API keys, certificates and arguments: what users give on a command line."""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path
from random import Random

import click

from dflash_trt.errors import DflashError
from tests.hostile.case import OUTSIDE, PROMPT, SECRET, THREAD, Command, HostileCase
from tests.hostile.places import WAYS, spoil_place
from tests.hostile.values import TEXTS, encode, odd_value, spoil, spoil_json

ASKED = ("generate", "bundle", "--max-tokens", "2", *THREAD)
_LINE = b'{"prompt": "cab"}\n'


def damage_prompts(random: Random, path: Path) -> None:
    """Writes lines of JSON that are none, or say odd things."""
    way = random.randrange(3)
    if way == 0:
        path.write_bytes(_LINE + spoil_json(random, _LINE) + _LINE)
    elif way == 1:
        record = {"prompt": random.choice((*TEXTS, odd_value(random)))}
        record |= {random.choice(("answer", "category", "schema")): odd_value(random)}
        path.write_bytes(encode(record) + b"\n" + _LINE)
    else:
        raw = (b"\xff\xfe", b"\0" * 100, b"x" * 100_000, b"\xed\xa0\x80", b"\r\n" * 50, b"")
        path.write_bytes(random.choice((*raw, spoil(random, _LINE), random.randbytes(300))))


def draw_prompt_commands(random: Random) -> tuple[Command, ...]:
    """A command that reads p.jsonl."""
    verify = ("verify", "bundle", "--max-tokens", "2", "--repeats", "0", "--batch", "1", *THREAD)
    return (
        random.choice(
            (
                (*ASKED, "--prompt-file", "p.jsonl"),
                (*verify, "--prompt-file", "p.jsonl"),
                (*verify, "--prompts", "own=p.jsonl"),
            )
        ),
    )


_KEY = b"0123456789abcdef0123456789abcdef\n"
_PEM = b"-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"
_LOCKED = (
    b"-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\n"
    b"DEK-Info: AES-128-CBC,00112233445566778899AABBCCDDEEFF\n\nAAAA\n"
    b"-----END RSA PRIVATE KEY-----\n"
)
_PORTS = ("--grpc-port", "0", "--http-port", "0", "--metrics-port", "0", "--openai-port", "0")


def make_keys(random: Random) -> HostileCase:
    """Keys of any bytes, and certificates that are none; no server starts."""
    odd = (b"", b"\0" * 99, SECRET.encode(), b"\n" * 100_000, random.randbytes(64), b"\xef\xbb\xbf")
    pieces = (*odd, _KEY * 10_001, _KEY[:-1] * 40_000, spoil(random, _KEY * 5), _PEM + _LOCKED)
    is_keys = random.random() < 0.6
    options = ("--api-key-file", "k") if is_keys else ("--tls-cert", "k", "--tls-key", "l")
    way = random.choice(WAYS) if random.random() < 0.3 else None

    def damage(folder: Path) -> None:
        for name in "kl":
            (folder / name).write_bytes(random.choice(pieces))
        if way is not None:
            spoil_place(way, folder / "k", folder.parent / OUTSIDE)

    command = ("serve", "bundle", *_PORTS, *options)
    return HostileCase(options[0], ("bundle",), damage, (command,), before=_start_none)


def _start_none() -> None:
    """What comes after the files have been read is a refusal."""
    from dflash_trt.cli import serve

    def refuse(*given: object) -> None:
        raise DflashError("nothing is served here")

    serve.Supervisor = refuse  # type: ignore[assignment,misc]


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
    *("--url", "--eagle-checkpoint"),  # names of other machines
    *("--repeats", "--max-tokens", "--chat"),  # as long as one asks for
    *("--executor", "--plugins", "--timing-cache", "--arch"),  # TensorRT's, with tests of their own
}
_ARGUMENTS = (
    *(one for one in TEXTS if "\0" not in one),
    *("0", "1", "2", "-5", "64", "99999999999999999999", "1e5", "1.5", "inf", "NaN", "0x10"),
    *("٣", "1_0", " 4", "1,2,,3", "a=b", "=", "auto", "none", "all", "--json", "*", "(a+)+$"),
    *("bundle", "pair", "pair/pair.yaml", "out", "hf/m.gguf", "bundle/manifest.json", ".", "/"),
    *("/dev/null", "/dev/full", "/proc/self/mem", "out/b", "-", "~", "file:///etc/passwd"),
)


def make_arguments(random: Random) -> HostileCase:
    """A command that is right but for one to three options, or a word too many."""
    name = random.choice(sorted(_GOOD))
    words = list(_GOOD[name])
    for _ in range(random.choice((1, 1, 2, 3))):
        way = random.randrange(10)
        if way == 0:
            words.insert(random.randrange(len(words) + 1), random.choice(_ARGUMENTS))
        elif way == 1 and words:
            words.pop(random.randrange(len(words)))
        elif way == 2:
            words += [random.choice(("--nothing", "--", "-x", "--max-batch", "--" + "a" * 5000))]
        else:
            option, takes_value = random.choice(_options(name))
            words += [option, random.choice(_ARGUMENTS)] if takes_value else [option]
    command = (name, *words, *(THREAD if name == "package" else ()))
    about = " ".join(command)[:150]
    return HostileCase(about, ("bundle", "pair", "hf"), lambda folder: None, (command,))


@cache
def _options(name: str) -> list[tuple[str, bool]]:
    """The options of a command, and whether each takes a value."""
    module = importlib.import_module(f"dflash_trt.cli.{name.replace('-', '_')}")
    command: click.Command = module.command
    found: list[tuple[str, bool]] = []
    for one in command.params:
        if isinstance(one, click.Option):
            found += [(text, not one.is_flag) for text in one.opts if text not in _LEFT_OUT]
    return found
