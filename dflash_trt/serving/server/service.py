"""A Triton server and, if asked for, the OpenAI front beside it: they live and end together."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from dflash_trt.errors import EXIT_FAILED, DflashError
from dflash_trt.serving.openai.server import OpenAiServer
from dflash_trt.serving.server.launcher import TritonServer

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ServerEndedError(DflashError):
    """The server ended unasked; the command ends with its exit code."""

    def __init__(self, server: TritonServer) -> None:
        super().__init__(f"ended by itself: {server.last_error()}", where=server.origin)
        self._code = server.exit_code

    @property
    def exit_code(self) -> int:
        return self._code or EXIT_FAILED


class Service:
    """Runs a server, and a front before it, to their end; use it as a context manager.

    From entering on, the first SIGINT, SIGTERM or SIGHUP (a closed terminal) ends them in order:
    the front takes no more requests and finishes those it has, then the server does the same. The
    second ends them at once. Enter it before the server is started, which no signal must leave
    behind.
    """

    def __init__(self) -> None:
        self._server: TritonServer | None = None
        self._front: OpenAiServer | None = None
        self._stopping = asyncio.Event()
        self._serving = False
        # `nohup` has SIGHUP ignored, and it stays so.
        self._signals = [
            number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN
        ]

    def __enter__(self) -> Service:
        for number in self._signals:
            asyncio.get_running_loop().add_signal_handler(number, self._take_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        for number in self._signals:
            asyncio.get_running_loop().remove_signal_handler(number)

    async def run(
        self, server: TritonServer, front: OpenAiServer | None, on_ready: Callable[[], None]
    ) -> int:
        """Returns the server's exit code once both have ended; calls `on_ready` in between.

        Raises:
            DflashError: the server was never ready, or one of the two ended unasked.
        """
        self._server, self._front = server, front
        try:
            if not self._stopping.is_set():
                await self._serve(server, on_ready)
        finally:
            # In a thread: until all have gone, a second signal must reach this loop.
            code = await asyncio.to_thread(server.close)
        return code

    def _take_signal(self) -> None:
        if self._server is not None and self._stopping.is_set():
            if self._front is not None:
                self._front.stop(force=True)
            self._server.send_signal(signal.SIGKILL)
        elif self._server is not None and not self._serving:
            self._server.send_signal(signal.SIGTERM)
        self._stopping.set()

    async def _serve(self, server: TritonServer, on_ready: Callable[[], None]) -> None:
        """Returns when told to stop, with the front ended and the server still there."""
        try:
            await asyncio.to_thread(server.wait_ready)
        except DflashError:
            if self._stopping.is_set():
                return
            raise
        self._serving = True
        fronting = await self._start_front()
        if not self._stopping.is_set():
            on_ready()
        ended = asyncio.create_task(asyncio.to_thread(server.wait))
        stopping = asyncio.create_task(self._stopping.wait())
        tasks = {ended, stopping} | ({fronting} if fronting is not None else set())
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if self._front is not None and fronting is not None:
            self._front.stop(force=ended.done())
            await fronting
        if ended.done() and not self._stopping.is_set():
            raise ServerEndedError(server)

    async def _start_front(self) -> asyncio.Task[None] | None:
        if self._front is None:
            return None
        fronting = asyncio.create_task(self._front.run())
        while not (self._front.started or fronting.done()):
            await asyncio.sleep(0.01)
        return fronting
