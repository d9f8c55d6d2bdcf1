"""Connections to servers: closed once their server has gone and their requests have ended."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import aclosing

import pytest

pytest.importorskip("tritonclient.grpc", reason="the perf extra is not installed")

from dflash_perf.bench.kill_campaign import own_memory

from dflash_trt.serving.client.client import GenerationRequest, TextDelta
from dflash_trt.serving.client.errors import ServedModelError
from dflash_trt.serving.server.connection import Connection
from tests.perf.stub import Stub, run_stub


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stub]:
    with run_stub(tmp_path_factory.mktemp("stub") / "truth.jsonl") as stub:
        yield stub


REQUEST = GenerationRequest(prompt="host", max_tokens=300)


def test_is_closed_when_its_last_request_has_ended(stub: Stub) -> None:
    async def use() -> list[TextDelta]:
        connection = Connection(stub.grpc)
        waiting = connection.stream(REQUEST)
        async with aclosing(connection.stream(REQUEST)) as deltas:
            found = [await anext(deltas)]
            assert connection.requests == 1 and not await connection.close_if_idle()
            found += [delta async for delta in deltas]
        assert connection.requests == 0 and await connection.close_if_idle()
        with pytest.raises(ServedModelError, match="has failed") as refused:
            await anext(waiting)
        assert refused.value.problem == "unavailable"
        await connection.close()  # as often as one likes
        return found

    *_, last = asyncio.run(use())
    assert last.result is not None and last.result.statistics.output_tokens == 300


def test_a_client_that_leaves_holds_nothing(stub: Stub) -> None:
    async def leave() -> None:
        connection = Connection(stub.grpc)
        async with aclosing(connection.stream(REQUEST)) as deltas:
            await anext(deltas)
        assert await connection.close_if_idle()

    asyncio.run(leave())


def test_a_hundred_connections_take_no_more_memory_than_ten(stub: Stub) -> None:
    """One that stays open takes about 65 KiB."""

    async def connect(count: int) -> int:
        for _ in range(count):
            connection = Connection(stub.grpc)
            async with aclosing(connection.stream(REQUEST)) as deltas:
                await anext(deltas)
            assert await connection.close_if_idle()
        return own_memory(os.getpid())

    async def grow() -> int:
        return -await connect(10) + await connect(90)

    assert asyncio.run(grow()) < 90 * (16 << 10)
