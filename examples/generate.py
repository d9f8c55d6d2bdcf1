"""Continue prompts with a pair in this process: all at once, as a stream, and from asyncio.

Needs a bundle: dflash-trt build --target demo -o demo-bundle
Run it: python examples/generate.py demo-bundle
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing

import dflash_trt
from dflash_trt import LoadedPair, SamplingParams

PROMPTS = ["fleet #6400 to #6410 in kyiv at load 5\n", "route #5399 to #5409", "hosts: mad"]


async def race(pair: LoadedPair) -> str:
    """Two answers grow together; whichever has 40 characters first ends the other."""

    async def grow(seed: int) -> str:
        sampling, text = SamplingParams(temperature=1.0, seed=seed), ""
        async with aclosing(pair.astream(PROMPTS[0], sampling, max_tokens=100)) as events:
            async for event in events:
                text += event.text
                if len(text) >= 40:
                    break
        return text

    tasks = [asyncio.create_task(grow(seed)) for seed in (1, 2)]
    done, late = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in late:
        task.cancel()
    return done.pop().result()


def main(folder: str) -> None:
    with dflash_trt.load(folder) as pair:
        print("# all at once")
        for prompt, result in zip(PROMPTS, pair.generate(PROMPTS, max_tokens=32), strict=True):
            figures = result.statistics
            print(f"{prompt!r} → {result.text!r} ({result.finish_reason})")
            print(f"  {figures.output_tokens} tokens in {figures.steps} steps", end="")
            print(f", acceptance length {figures.acceptance_length:.2f}")
        print("# as a stream, drafted tokens in brackets")
        for event in pair.stream(PROMPTS[1], max_tokens=32):
            drafted = "".join(event.pieces[: event.accepted_tokens])
            print(f"[{drafted}]" + "".join(event.pieces[event.accepted_tokens :]), end="")
        print("\n# two from asyncio")
        print(repr(asyncio.run(race(pair))))


if __name__ == "__main__":
    main(*sys.argv[1:])
