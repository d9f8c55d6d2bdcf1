"""`dflash-trt generate --url`: the same output, from a model that is served elsewhere."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from urllib.parse import urlsplit

from dflash_trt.cli.generation_output import TextWriter, showable
from dflash_trt.decoding import RequestResult
from dflash_trt.errors import DflashError
from dflash_trt.serving.client.client import GenerationRequest, ServedModel

DEFAULT_GRPC_PORT = 8001
# As many as keep a server busy; a queue is the server's own and may be short.
MAX_IN_FLIGHT = 16


def generate_remote(
    address: str, requests: list[GenerationRequest], *, raw: bool, as_json: bool
) -> None:
    """Runs `requests` on the server at `address` (host:port) and shows what came of them.

    Raises:
        DflashError: no server, a chat template without `raw`, or a request that failed.
    """
    writer = TextWriter(view=False, quiet=as_json, count=len(requests))
    started = time.perf_counter()
    results = asyncio.run(_run(address, requests, writer, raw))
    writer.end(results, time.perf_counter() - started)


def parse_url(url: str) -> str:
    """The address (host:port) in `grpc://HOST[:PORT]`.

    Raises:
        DflashError: another kind of URL (usage).
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or url.rstrip("/") != f"grpc://{parts.netloc}" or "@" in parts.netloc:
        raise DflashError(f"{url!r} is not of the form grpc://HOST:PORT", where="--url", usage=True)
    shown = f"[{host}]" if ":" in host else host
    return f"{shown}:{DEFAULT_GRPC_PORT if port is None else port}"


async def _run(
    address: str, requests: list[GenerationRequest], writer: TextWriter, raw: bool
) -> list[RequestResult]:
    """Results in the order of `requests`; the first failure ends all of them."""
    model = ServedModel(address)
    turn = asyncio.Semaphore(MAX_IN_FLIGHT)

    async def run_one(index: int, request: GenerationRequest) -> RequestResult:
        async with turn, aclosing(model.stream(request)) as deltas:
            async for delta in deltas:
                writer.write(index, showable(delta.text), finished=delta.result is not None)
                result = delta.result
        assert result is not None
        return result

    try:
        if not raw and await model.has_chat_template():
            raise DflashError(
                "the served model has a chat template, which is not known here",
                where=address,
                fix="--raw sends the prompt as it is; chats go to its OpenAI port",
                usage=True,
            )
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(run_one(index, request)) for index, request in enumerate(requests)
            ]
    except* DflashError as errors:
        raise errors.exceptions[0] from None
    finally:
        await model.close()
    return [task.result() for task in tasks]
