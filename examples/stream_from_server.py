"""Stream answers from a served model, and stop one early: closing a stream frees its slot.

Needs a server, and the client's extra (pip install -e '.[serve]'):
    dflash-trt serve demo-bundle
Run it: python examples/stream_from_server.py localhost:8001
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing

from dflash_trt import SamplingParams
from dflash_trt.serving.client.client import GenerationRequest, ServedModel

MOST_CHARACTERS = 60


async def tell(model: ServedModel, prompt: str) -> str:
    """The answer's beginning; the rest is never computed."""
    request = GenerationRequest(
        prompt=prompt, max_tokens=200, sampling=SamplingParams(temperature=0.8, seed=1)
    )
    text = ""
    async with aclosing(model.stream(request)) as deltas:
        async for delta in deltas:
            text += delta.text
            if delta.result is not None:
                length = delta.result.statistics.acceptance_length
                return f"{text}  (whole, acceptance length {length:.2f})"
            if len(text) >= MOST_CHARACTERS:
                break
    return f"{text} …"


async def ask(address: str) -> None:
    model = ServedModel(address)
    try:
        prompts = ["fleet #6400 to #6410 in kyiv at load 5\n", "route #5399 to #5409", "hosts: mad"]
        answers = await asyncio.gather(*(tell(model, prompt) for prompt in prompts))
    finally:
        await model.close()
    for prompt, answer in zip(prompts, answers, strict=True):
        print(f"{prompt!r} → {answer!r}")


if __name__ == "__main__":
    asyncio.run(ask(*sys.argv[1:]))
