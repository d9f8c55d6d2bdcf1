"""A served pair under attack: every attack ends clearly and soon, and the next answer is right."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.serving.attacks import ATTACKS, Attack
from tests.serving.conftest import Generate, wait_idle
from tests.serving.fronts import post
from tests.serving.served import PROMPTS, Served, measure_memory

QUICK = [attack for attack in ATTACKS if not attack.slow]
SEED = 20
GOOD_REQUESTS = 1000
MEMORY_MARGIN = 0.05


@pytest.fixture(scope="module")
def right(generate: Generate) -> list[str]:
    """What some prompts are answered with."""
    texts = [generate(prompt, max_tokens=12).text for prompt in PROMPTS[:8]]
    return [text for text in texts if text is not None]


def _ask_good(served: Served, right: list[str], number: int) -> bool:
    at = number % len(right)
    asked = {"model": "demo", "prompt": PROMPTS[at], "max_tokens": 12, "temperature": 0}
    status, answer, _ = post(served.openai.removesuffix("/v1"), "/v1/completions", asked)
    return status == 200 and json.loads(answer)["choices"][0]["text"] == right[at]


def _attack(served: Served, attacks: list[Attack], seed: int, right: list[str]) -> list[str]:
    wrong: list[str] = []
    for attack in attacks:
        said = attack.check(served.openai, served.address, seed)
        wrong += [said] if said is not None else []
        if not _ask_good(served, right, seed):
            wrong.append(f"{attack.run.__name__} ({seed}): the next answer is wrong")
    return wrong


def test_quick_attacks(served: Served, right: list[str]) -> None:
    assert len(QUICK) > 10
    assert not _attack(served, QUICK, SEED, right)


@pytest.mark.exhaustive
def test_all_attacks(served: Served, right: list[str]) -> None:
    """Of another seed; then good requests, and no more memory than before them."""
    assert not _attack(served, ATTACKS, SEED + 1, right)
    wait_idle(served)
    with ThreadPoolExecutor(8) as pool:
        halves: list[int] = []
        for half in range(2):
            numbers = range(half * GOOD_REQUESTS // 2, (half + 1) * GOOD_REQUESTS // 2)
            good = list(pool.map(lambda number: _ask_good(served, right, number), numbers))
            assert all(good), good.count(False)
            wait_idle(served)
            halves.append(measure_memory(served.pid))
    print(f"heaps {halves[0] >> 20} and {halves[1] >> 20} MiB")
    assert halves[1] < halves[0] * (1 + MEMORY_MARGIN), halves
