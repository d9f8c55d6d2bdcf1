"""A Triton server and, if asked for, the OpenAI front beside it: they live and end together."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from dflash_trt.errors import DflashError
from dflash_trt.serving.openai.server import OpenAiServer
from dflash_trt.serving.server.supervisor import Supervisor

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Service:
    """Runs a server, and a front before it, to their end; use it as a context manager.

    From entering on, the first SIGINT, SIGTERM or SIGHUP (a closed terminal) ends them in order:
    both take no more requests and finish those they have, as long as the server's options allow.
    The second ends them at once, in-flight requests with an error. Enter it before the server is
    started, which no signal must leave behind.
    """

    def __init__(self) -> None:
        self._supervisor: Supervisor | None = None
        self._front: OpenAiServer | None = None
        self._fronting: asyncio.Task[None] | None = None
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
        self, supervisor: Supervisor, front: OpenAiServer | None, on_ready: Callable[[], None]
    ) -> int:
        """Returns the server's exit code once both have ended; calls `on_ready` in between.

        Raises:
            DflashError: the server was never ready, failed for good, or the front ended unasked.
        """
        self._supervisor, self._front = supervisor, front
        try:
            if not self._stopping.is_set():
                await self._serve(supervisor, on_ready)
        finally:
            # The front stays to refuse what comes, and passes on how the server ends the rest.
            code = await supervisor.end()
            if self._front is not None and self._fronting is not None:
                self._front.stop()
                await asyncio.wait({self._fronting})
            await supervisor.close()
        return code

    def _take_signal(self) -> None:
        if self._supervisor is not None and self._stopping.is_set():
            self._supervisor.kill()
        elif self._supervisor is not None and not self._serving:
            self._supervisor.server.send_signal(signal.SIGTERM)
        self._stopping.set()

    async def _serve(self, supervisor: Supervisor, on_ready: Callable[[], None]) -> None:
        """Returns when told to stop, with front and server still there."""
        try:
            await supervisor.start()
        except DflashError:
            if self._stopping.is_set():
                return
            raise
        self._serving = True
        if self._front is not None:
            self._fronting = asyncio.create_task(self._front.run())
            while not (self._front.started or self._fronting.done()):
                await asyncio.sleep(0.01)
        if not self._stopping.is_set():
            on_ready()
        supervising = asyncio.create_task(supervisor.run())
        stopping = asyncio.create_task(self._stopping.wait())
        tasks = {supervising, stopping}
        if self._fronting is not None:
            tasks.add(self._fronting)
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        for task in ended - {stopping}:
            task.result()  # which raises
