"""Work that is measured again and again: a bundle's prompts, interleaved runs, their spread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from typing import TypeVar

from dflash_trt.bundle.bundle import Bundle, load_tokenizer
from dflash_trt.decoding import Generator, Request, SamplingParams
from dflash_trt.errors import DflashError
from dflash_trt.text.prompts import encode_prompts, read_prompts

Value = TypeVar("Value")
Key = TypeVar("Key")
SpreadFigures = dict[str, float]


def take_turns(
    ways: Mapping[Key, Callable[[], Value]], runs: int, *, rotate: bool = False
) -> dict[Key, list[Value]]:
    """Runs all `ways` in turn, `runs` times, so that changes of the machine affect all alike.

    With `rotate` each turn begins with another way. Returns the results by way, in run order.
    """
    found: dict[Key, list[Value]] = {name: [] for name in ways}
    order = deque(ways)
    for _ in range(runs):
        for name in order:
            found[name].append(ways[name]())
        order.rotate(rotate)
    return found


def spread(values: Sequence[float]) -> SpreadFigures:
    """Median and range of repeated measurements."""
    return {"median": median(values), "min": min(values), "max": max(values), "runs": len(values)}


def spreads(rows: Sequence[Mapping[str, float]], *names: str) -> dict[str, SpreadFigures]:
    """The spread of each of `names` over `rows`."""
    return {name: spread([row[name] for row in rows]) for name in names}


def spread_of_ratios(above: Sequence[float], below: Sequence[float]) -> SpreadFigures:
    """The spread of `above` / `below`, run by run."""
    return spread([a / b for a, b in zip(above, below, strict=True)])


def show(figures: SpreadFigures, form: str) -> str:
    """A spread as text: `median (least … greatest)`, each in the format `form`."""
    median, low, high = (format(figures[name], form) for name in ("median", "min", "max"))
    return f"{median} ({low} … {high})"


def prompt_file(bundle: Bundle) -> Path:
    """The file of prompts in the bundle.

    Raises:
        DflashError: it has none.
    """
    if bundle.prompts is None:
        raise DflashError("came without prompts", where=bundle.folder, usage=True)
    return bundle.prompts


def requests_of(bundle: Bundle, max_tokens: int, temperature: float = 0.0) -> list[Request]:
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


def decode_all(generator: Generator, requests: Iterable[Request], concurrency: int) -> int:
    """Decodes `requests`, `concurrency` at a time; returns the number of output tokens."""
    waiting = iter(requests)
    tokens, free = 0, concurrency
    while True:
        for request in islice(waiting, free):
            generator.submit(request)
        if not generator.has_work:
            return tokens
        events = generator.step()
        tokens += sum(len(event.token_ids) for event in events)
        free = sum(event.result is not None for event in events)
