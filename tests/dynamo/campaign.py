"""`python -m tests.dynamo.campaign BUNDLE` ends workers under load, and compares every answer.

Two workers serve the bundle behind Dynamo's frontend (`serve --dynamo`). Clients ask for greedy and
seeded answers; some leave early. Workers are killed without a word on the way. All answers that
were waited for must be there, with the tokens of this process, which has no drafts.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dflash_trt
from dflash_trt import LoadedPair, Request, SamplingParams
from tests.dynamo.served import serving

CLIENTS, KILLS = 6, 3
LEAVING = 0.08
"""The share of requests whose client leaves after the first token."""


def make_requests(pair: LoadedPair, count: int) -> list[Request]:
    """Prompts with a number of their own, half of them drawn; the same ones at every run."""
    lines = (Path("real_pair") / "prompts.jsonl").read_text("utf-8").splitlines()
    prompts, dice = [json.loads(one)["prompt"] for one in lines], random.Random(7)
    made = []
    for place in range(count):
        text = f"{place}. {prompts[place % len(prompts)]}"
        drawn = SamplingParams(temperature=0.75, top_p=0.9375, seed=place)
        sampling = drawn if place % 2 else SamplingParams(seed=place)
        tokens = dice.randint(8, 48)
        made.append(pair.request(text, sampling, max_tokens=tokens, ignore_eos=True))
    return made


def run(bundle: Path, count: int) -> dict[str, Any]:
    """The figures of a campaign of `count` requests."""
    with dflash_trt.load(bundle, speculation=False) as pair:
        requests = make_requests(pair, count)
        name = pair.bundle.manifest.name
        expected = [one.token_ids for one in pair.run(requests)]
    dice, done, seen = random.Random(8), 0, Counter[str]()
    leaving = {place for place in range(count) if dice.random() < LEAVING}
    lock = threading.Lock()
    with serving(bundle, "--max-restarts", "10") as dynamo:

        def ask(place: int) -> None:
            nonlocal done
            one = requests[place]
            fields: dict[str, Any] = {"model": name, "max_tokens": one.max_tokens}
            fields |= {"temperature": one.sampling.temperature, "top_p": one.sampling.top_p}
            fields |= {"seed": one.sampling.seed, "ignore_eos": True}
            if place in leaving:
                chunks = dynamo.stream(one.prompt_ids, **fields)
                next(chunks)
                chunks.close()
                how = "left"
            else:
                answer = dynamo.ask(one.prompt_ids, **fields)
                how = f"status {answer.status}"
                if answer.status == 200:
                    how = "equal" if answer.tokens == expected[place] else "different"
                    moved = answer.usage["prompt_tokens"] > len(one.prompt_ids)
                    seen["moved"] += moved
            with lock:
                done += 1
                seen[how] += 1

        def kill() -> None:
            """One worker at a time: with none left there is nowhere to go."""
            for place in range(KILLS):
                while done <= count * (2 * place + 1) // (2 * KILLS):
                    time.sleep(0.1)
                dynamo.wait_whole()
                dynamo.end_busy(least=0)  # clients may be done

        started = time.monotonic()
        with ThreadPoolExecutor(CLIENTS + 1) as pool:
            killing = pool.submit(kill)
            list(pool.map(ask, range(count)))
            killing.result()
        return {
            "bundle": name,
            "requests": count,
            "killed": KILLS,
            "restarted": dynamo.count_restarts(),
            "seconds": round(time.monotonic() - started, 1),
            "output_tokens": sum(map(len, expected)),
            **seen,
        }


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]), int(sys.argv[2]))))
