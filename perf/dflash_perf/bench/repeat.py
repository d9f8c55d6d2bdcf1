"""Work that is measured again and again: bundles' prompts, interleaved runs, their spread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TypeVar

from dflash_trt.bundle.bundle import Bundle, load_tokenizer, open_bundle
from dflash_trt.decoding import Request, SamplingParams
from dflash_trt.errors import DflashError
from dflash_trt.text.prompts import encode_prompts, read_prompts

Value = TypeVar("Value")
SpreadFigures = dict[str, float]


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
