"""Work that is measured again and again: bundles' prompts, processes in turn, their spread."""

from __future__ import annotations

import json
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from statistics import median
from threading import Timer
from typing import Any, TypeVar

import numpy as np

from dflash_trt.bundle.bundle import Bundle, load_tokenizer, open_bundle
from dflash_trt.decoding import Request, SamplingParams
from dflash_trt.errors import DflashError, one_line
from dflash_trt.text.prompts import encode_prompts, read_prompts

Value = TypeVar("Value")
SpreadFigures = dict[str, float]
RESAMPLED = 10_000
ANSWER_LIMIT_S, END_LIMIT_S = 600.0, 20.0


class Worker:
    """A process that answers each line of JSON with one, and ends when its stdin does.

    `log` takes what it writes to stderr, else the terminal does; `options` are those of Popen.
    """

    def __init__(self, command: Sequence[str], log: Path | None = None, **options: Any) -> None:
        self._name, self._log = Path(command[0]).name, log
        options |= {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with log.open("wb") if log else nullcontext() as said:
            self._process = subprocess.Popen(command, stderr=said, **options)

    def ask(self, question: object = None) -> Any:
        """The answer to `question`, or without one what it says next.

        Raises:
            DflashError: it ended, is silent for 10 minutes, or says what is no JSON.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        timer, began = Timer(ANSWER_LIMIT_S, self._process.kill), time.monotonic()
        timer.start()
        try:
            if question is not None:
                self._process.stdin.write(f"{json.dumps(question)}\n")
                self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if not line:
            said = self._log.read_text("utf-8", "replace").split("\n") if self._log else []
            last = one_line(next((one for one in reversed(said) if one.strip()), ""))
            self._process.kill()  # it may have closed its output alone
            what = f"its process ended with exit code {self._process.wait()} {last}".rstrip()
            if time.monotonic() - began >= ANSWER_LIMIT_S:
                what = f"it was silent for {ANSWER_LIMIT_S:g} s"
            raise DflashError(what, where=self._name)
        try:
            return json.loads(line)
        except ValueError:
            raise DflashError(f"says {one_line(line, 60)!r}", where=self._name) from None

    def close(self) -> None:
        """Ends the process."""
        with suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self._process.communicate(timeout=END_LIMIT_S)
        self._process.kill()
        self._process.wait()


def take_turns(
    ways: Mapping[str, Callable[[], Value]], runs: int, *, warm_up: bool = False
) -> dict[str, list[Value]]:
    """Runs all `ways` in turn, `runs` times, so that changes of the machine affect all alike.

    Each turn begins with another way; a turn that warms up is not returned.
    """
    found: dict[str, list[Value]] = {name: [] for name in ways}
    order = deque(ways)
    for turn in range(-1 if warm_up else 0, runs):
        for name in order:
            value = ways[name]()
            if turn >= 0:
                found[name].append(value)
        order.rotate()
    return found


def spread(values: Sequence[float]) -> SpreadFigures:
    """Median and range of repeated measurements."""
    return {"median": median(values), "min": min(values), "max": max(values), "runs": len(values)}


def spread_of_ratios(above: Sequence[float], below: Sequence[float]) -> SpreadFigures:
    """The spread of `above` / `below`, run by run."""
    return spread([a / b for a, b in zip(above, below, strict=True)])


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """The middle 95 % of the medians of `ratios` drawn anew with replacement."""
    drawn = np.random.default_rng(0).choice(ratios, (RESAMPLED, len(ratios)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return float(low), float(high)


def show(figures: SpreadFigures, form: str) -> str:
    """A spread as text: `median (least … greatest)`, each in the format `form`."""
    median, low, high = (format(figures[name], form) for name in ("median", "min", "max"))
    return f"{median} ({low} … {high})"


def prompt_file(bundle: Bundle) -> Path:
    """The file of prompts in the bundle; raises DflashError where it has none."""
    if bundle.prompts is None:
        raise DflashError("came without prompts", where=bundle.folder, usage=True)
    return bundle.prompts


def requests_of(bundle: Bundle, max_tokens: int, temperature: float) -> list[Request]:
    """A request for each of the bundle's prompts, through its chat template where it has one."""
    texts = read_prompts(prompt_file(bundle))
    return [
        Request(
            prompt_ids=tuple(ids),
            max_tokens=max_tokens,
            sampling=SamplingParams(temperature=temperature, seed=seed),
        )
        for seed, ids in enumerate(encode_prompts(load_tokenizer(bundle), texts, raw=False))
    ]


def read_named_bundles(texts: Sequence[str], target: Bundle | None) -> dict[str, Bundle]:
    """The bundles of NAME=BUNDLE texts, by name.

    Raises:
        DflashError: one that cannot be read, or whose target is not that of `target`, or of the
            first where there is none (usage).
    """
    found: dict[str, Bundle] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not (name and equals and path) or name in found:
            raise DflashError(f"{text!r} is not one NAME=BUNDLE", usage=True)
        found[name] = open_bundle(Path(path))
        target = target or found[name]
        if _target_of(found[name]) != _target_of(target):
            what = f"has another target than {target.folder}"
            raise DflashError(what, where=path, usage=True)
    return found


def _target_of(bundle: Bundle) -> list[tuple[int, str | None]]:
    """What tells a bundle's target from others: sizes and headers of its weight files."""
    files = bundle.manifest.files
    return [
        (one.bytes, one.header_sha256) for one in files if one.path.startswith("weights/target/")
    ]
