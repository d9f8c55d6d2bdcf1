"""What one client's large request costs its neighbours on OpenAI's port.

Each run asks a served bundle twice. Streams in closed loops and `/health` are timed without and
beside a list of prompts with echo, logprobs and prompt_logprobs. Then one request is timed alone,
beside single ones that hold all other slots (its share), and beside one of n samples.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import numpy as np

from dflash_perf.bench.base import Figures, Work, bench
from dflash_perf.bench.kill_campaign import own_memory, serve
from dflash_perf.extra import require
from dflash_trt.bundle.bundle import open_bundle
from dflash_trt.errors import DflashError

if TYPE_CHECKING:
    from aiohttp import ClientSession

_LOOK_S = 0.02
_BEGUN_S = 0.5
T = TypeVar("T")


class Neighbours:
    """A served bundle, as several clients see it."""

    def __init__(self, session: ClientSession, url: str, model: str, pid: int) -> None:
        self._session, self._url, self._model, self._pid = session, url, model, pid
        self.largest = 0  # bytes of an answer

    async def ask(self, *, gaps: list[float] | None = None, **fields: Any) -> None:
        """Asks for a completion; `gaps` gets the pauses of a stream."""
        body = {"model": self._model, "prompt": "host", "temperature": 1, "ignore_eos": True}
        size, last = 0, 0.0
        url = f"{self._url}/v1/completions"
        async with self._session.post(url, json=body | fields) as answer:
            async for part in answer.content.iter_any():
                now = time.perf_counter()
                size += len(part)
                if part.startswith(b":"):  # it waits for its turn
                    continue
                if gaps is not None and last:
                    gaps.append(now - last)
                last = now
            if answer.status != 200:
                raise DflashError(f"HTTP {answer.status}")
        self.largest = max(self.largest, size)

    async def timed(self, **fields: Any) -> float:
        """Seconds that a request takes."""
        began = time.perf_counter()
        await self.ask(**fields)
        return time.perf_counter() - began

    @asynccontextmanager
    async def beside(self, work: Awaitable[Any]) -> AsyncGenerator[None, None]:
        """While `work` goes on, which has begun; it is ended after."""
        task = asyncio.ensure_future(work)
        await asyncio.sleep(_BEGUN_S)
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def watch(self, work: Awaitable[T], streams: int, tokens: int) -> tuple[T, Figures]:
        """What `work` returns, and how `streams` and `/health` fare until then."""
        gaps: list[float] = []
        health: list[float] = []
        memory: list[int] = []

        async def stream() -> None:
            while True:
                await self.ask(gaps=gaps, stream=True, max_tokens=tokens)

        async def look() -> None:
            while True:
                began = time.perf_counter()
                async with self._session.get(f"{self._url}/health") as answer:
                    await answer.read()
                health.append(time.perf_counter() - began)
                memory.append(own_memory(self._pid))
                await asyncio.sleep(_LOOK_S)

        async with self.beside(asyncio.gather(look(), *(stream() for _ in range(streams)))):
            done = await work
            await asyncio.sleep(_BEGUN_S)  # what was held up comes now
        return done, {
            "health_ms": {"p50": _ms(health, 50), "most": _ms(health, 100)},
            "gap_ms": {"p50": _ms(gaps, 50), "p99": _ms(gaps, 99), "most": _ms(gaps, 100)},
            "serve_mib": round(max(memory) / 2**20),
        }


def _ms(seconds: list[float], percentile: float) -> float:
    return round(1e3 * float(np.percentile(seconds, percentile)), 1)


@bench(runs=3)
def measure(
    work: Work,
    bundle: Path,
    *,
    streams: int = 16,
    prompts: int = 64,
    samples: int = 64,
    max_tokens: int = 128,
) -> Figures:
    require("neighbours", "aiohttp")
    manifest = open_bundle(bundle).manifest
    limits = manifest.limits
    shape = (prompts, limits.max_seq_len - 8)
    ids = np.random.default_rng(0).integers(2, manifest.target.vocab_size, shape).tolist()
    large = {"prompt": ids, "echo": True, "logprobs": 5, "prompt_logprobs": 20, "max_tokens": 1}
    long = min(8 * max_tokens, limits.max_seq_len // 2)
    runs: list[Figures] = []

    async def measure_served(url: str, pid: int) -> None:
        import aiohttp

        connector, no_limit = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=no_limit) as session:
            them = Neighbours(session, url, manifest.name, pid)
            for _ in range(work.runs):
                _, alone = await them.watch(asyncio.sleep(10), streams, max_tokens)
                seconds, beside = await them.watch(them.timed(**large), streams, max_tokens)
                waits = {"alone": await them.timed(max_tokens=max_tokens)}
                others = [them.ask(max_tokens=long) for _ in range(limits.max_batch - 1)]
                async with them.beside(asyncio.gather(*others)):
                    waits["its share"] = await them.timed(max_tokens=max_tokens)
                async with them.beside(them.ask(n=samples, max_tokens=max_tokens)):
                    waits[f"beside n = {samples}"] = await them.timed(max_tokens=max_tokens)
                found: Figures = {"streams": alone, "beside a large answer": beside}
                found |= {"answer_mb": round(them.largest / 1e6, 1), "answer_s": round(seconds, 1)}
                found["request_s"] = {name: round(value, 3) for name, value in waits.items()}
                click.echo(found)
                runs.append(found)

    with serve(bundle) as (process, hosts):
        asyncio.run(measure_served(f"http://{hosts['OpenAI']}", process.pid))
    return {
        "limits": {"max_batch": limits.max_batch, "max_seq_len": limits.max_seq_len},
        "each": runs,
    }
