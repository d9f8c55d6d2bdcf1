"""Refusals: the exit code, the place and the remedy of each, not what is said of the mistake.

Each is one line on stderr and leaves nothing behind. What is refused stands in refused/*.txt and
in broken_files.py.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from dflash_trt.errors import DflashError
from tests.cli.bigram import write_bigram_pair
from tests.frozen import canonical
from tests.frozen.broken_files import (
    BROKEN_PAIRS,
    DAMAGED_BUNDLES,
    DAMAGED_PAIRS,
    DEPLOYED,
    DEPLOYED_SCHEDULES,
    PROFILES,
    PROMPTS,
    SCHEDULES,
    YAML,
    write_odd_files,
)
from tests.frozen.command_line import run, run_well

TABLES = Path(__file__).parent / "refused"
DEPLOYMENT = "build --executor trtllm --target qwen3-8b --profile b200x1".split()
_OPTION = re.compile(r"--?[a-z][\w-]*|'[^']*'")


def refusal_facts(bundles: Path) -> dict[str, Any]:
    """Code, place and remedy by what was asked; `bundles` is the folder of `write_bundles`."""
    work = _Workplace(bundles, bundles / "refused")
    return {name: _refusal(work, words) for name, words in work.cases()}


def _refusal(work: _Workplace, words: list[str]) -> dict[str, Any]:
    before = work.names()
    with _noted_errors() as errors:
        outcome = run(*words)
    assert outcome.code in (1, 2), (words, outcome.out, outcome.err)
    assert outcome.out == "" and work.names() == before, words
    *others, line = outcome.err.splitlines()
    assert line.startswith("error: ") and line.isprintable() and len(line) < 600, line
    assert not [one for one in others if one.startswith(("error: ", "Traceback"))], outcome.err
    line = line.removeprefix("error: ")
    for error in reversed(errors):
        if error.message == line:
            where, fix = (work.masked(text) for text in (error.where, error.fix))
            return {"exit": outcome.code, "where": where, "fix": fix}
    named = _OPTION.search(line)
    return {"exit": outcome.code, "names": work.masked(named and named.group())}


@contextmanager
def _noted_errors() -> Iterator[list[DflashError]]:
    """Every error of the project's that is made inside the block, in its order."""
    made: list[DflashError] = []
    original = DflashError.__init__

    def note(error: DflashError, *arguments: Any, **options: Any) -> None:
        original(error, *arguments, **options)
        made.append(error)

    with mock.patch.object(DflashError, "__init__", note):
        yield made


class _Workplace:
    """The files that commands are about."""

    def __init__(self, bundles: Path, folder: Path) -> None:
        self._folder, self._bundles = folder, bundles
        self._count = 0
        self._pair = write_bigram_pair(folder / "pair")
        self._files = {
            "PAIRS": self._pair.parent,
            "PAIR": self._pair,
            "PROMPTS": self._pair.parent / "prompts.jsonl",
            "DEMO": bundles / "demo",
            "GPT_OSS": canonical.ROOT / "demo_pair" / "gpt_oss" / "target",
            **write_odd_files(folder),
        }
        self._bundle(self._pair, "BUNDLE")
        run_well(*DEPLOYMENT, "-o", self._place("deployment"))
        self._files["DEPLOYMENT"] = self._folder / f"deployment-{self._count}"
        for name, damage in DAMAGED_PAIRS.items():
            copy = self._copy(self._pair.parent)
            damage(copy)
            self._bundle(copy / "pair.yaml", name)
        for name, damage in DAMAGED_BUNDLES.items():
            self._files[name] = self._copy(self._files["BUNDLE"])
            damage(self._files[name])

    def _bundle(self, pair: Path, name: str) -> None:
        self._files[name] = self._folder / name.lower()
        run_well("build", "--target", pair, "-o", self._files[name])

    def names(self) -> list[str]:
        """Files and folders that lie here now, and in the folder that is somebody's own."""
        return sorted(path.name for one in ("", "mine") for path in (self._folder / one).iterdir())

    def masked(self, text: str | None) -> str | None:
        if text is None:
            return None
        text = re.sub(rf"{re.escape(str(self._folder))}/(copy|new|deployment)-\d+", r"\1", text)
        return canonical.masked(text, self._folder).replace(str(self._bundles), "BUNDLES")

    def cases(self) -> Iterator[tuple[str, list[str]]]:
        """What is asked, in words, and the command line."""
        for line in _table("commands"):
            yield line, [self._word(word) for word in shlex.split(line)]
        for line in _table("configs"):
            yield f"config: {line}", self._build(lambda pair, line=line: _edit(pair, line))
        for name, damage in BROKEN_PAIRS.items():
            yield name, self._build(damage)
        for name, text in YAML.items():
            yield f"YAML: {name}", ["build", "--target", str(self._write("pair.yaml", text))]
        for name, content in PROMPTS.items():
            file = self._write(name, content)
            yield f"prompts: {name}", self._generate("--prompt-file", str(file))
        for name, schedule in SCHEDULES.items():
            yield f"schedule: {name}", self._generate("--prompt", "a", *self._schedule(schedule))
        for name, schedule in DEPLOYED_SCHEDULES.items():
            words = [*DEPLOYMENT, *self._schedule(schedule), "-o", self._word("NEW")]
            yield f"deployed schedule: {name}", words
        for name, profile in PROFILES.items():
            file = self._write("own.yaml", DEPLOYED.format(profile=profile))
            words = ["--executor", "trtllm", "--target", str(file), "-o", self._word("NEW")]
            yield f"profile: {name}", ["build", *words]
        for line in _table("manifests"):
            copy = self._copy(self._files["BUNDLE"])
            _edit(copy, line)
            yield line, ["inspect", str(copy)]

    def _word(self, word: str) -> str:
        if word == "NEW":
            return str(self._place("new"))
        name, separator, rest = word.partition("/")
        stem, dot, suffix = name.partition(".")
        return f"{self._files.get(stem, stem)!s}{dot}{suffix}{separator}{rest}"

    def _schedule(self, schedule: Any) -> list[str]:
        return ["--block-schedule", str(self._write("schedule.json", json.dumps(schedule)))]

    def _generate(self, *words: str) -> list[str]:
        return ["generate", str(self._files["BUNDLE"]), *words]

    def _build(self, damage: Callable[[Path], object]) -> list[str]:
        copy = self._copy(self._pair.parent)
        damage(copy)
        return ["build", "--target", str(copy / "pair.yaml"), "-o", str(self._place("new"))]

    def _copy(self, folder: Path) -> Path:
        return Path(shutil.copytree(folder, self._place()))

    def _write(self, name: str, content: str | bytes) -> Path:
        place = self._place()
        place.mkdir()
        data = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
        (place / name).write_bytes(data)
        return place / name

    def _place(self, kind: str = "copy") -> Path:
        self._count += 1
        return self._folder / f"{kind}-{self._count}"


def _table(name: str) -> list[str]:
    lines = (TABLES / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def _edit(folder: Path, line: str) -> None:
    """Makes the changes of a line of configs.txt or manifests.txt."""
    owner, _, changes = line.partition(" ")
    path = folder / ("manifest.json" if owner == "manifest" else f"{owner}/config.json")
    fields = json.loads(path.read_text(encoding="utf-8"))
    for change in changes.split(" ; "):
        place, given, value = change.partition("=")
        *outer, key = place.split(".")
        inner: Any = fields
        for name in outer:
            inner = inner[int(name) if isinstance(inner, list) else name]
        if given:
            inner[key] = json.loads(value)
        else:
            del inner[key]
    path.write_text(json.dumps(fields), encoding="utf-8")
