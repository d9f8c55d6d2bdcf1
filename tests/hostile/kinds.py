"""The kinds of hostile inputs, and each of them by its name."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from random import Random

from tests.hostile import (
    arguments,
    bundles,
    configs,
    drafters,
    files,
    gguf_files,
    graphs,
    headers,
    keys,
    pairs,
    prompts,
    templates,
    tokenizers,
    weights,
)
from tests.hostile.case import HostileCase, Make

KINDS: dict[str, tuple[int, Make]] = {
    "headers": (headers.COUNT, headers.make),
    "configs": (configs.COUNT, configs.make),
    "pairs": (pairs.COUNT, pairs.make),
    "drafters": (drafters.COUNT, drafters.make),
    "weights": (weights.COUNT, weights.make),
    "tokenizers": (tokenizers.COUNT, tokenizers.make),
    "templates": (templates.COUNT, templates.make),
    "bundles": (bundles.COUNT, bundles.make),
    "graphs": (graphs.COUNT, graphs.make),
    "gguf": (gguf_files.COUNT, gguf_files.make),
    "files": (files.COUNT, files.make),
    "prompts": (prompts.COUNT, prompts.make),
    "keys": (keys.COUNT, keys.make),
    "arguments": (arguments.COUNT, arguments.make),
}


@dataclass(frozen=True, slots=True)
class Name:
    """By which a case is found again."""

    seed: int
    kind: str
    number: int


def make_case(name: Name) -> HostileCase:
    """The case of that name: always the same, and the same input."""
    _, make = KINDS[name.kind]
    return make(Random(f"{name.seed} {name.kind} {name.number}"), name.number)


def case_names(seed: int, share: float, kinds: Collection[str]) -> list[Name]:
    """All of these kinds; of a `share` below 1 a sample of each, without the slow ones."""
    names: list[Name] = []
    for kind in kinds:
        count, _ = KINDS[kind]
        every = [Name(seed, kind, number) for number in range(count)]
        if share < 1:
            quick = [one for one in every if not make_case(one).is_slow]
            every = Random(f"{seed} {kind}").sample(quick, max(1, round(count * share)))
        names += every
    return names
