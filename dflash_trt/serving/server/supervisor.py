"""Keeps a Triton server running: notices when it has failed, and starts another in its place."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from dflash_trt.decoding.worker import Phase
from dflash_trt.errors import EXIT_FAILED, DflashError
from dflash_trt.serving.client.client import GenerationRequest, ServedModel, TextDelta
from dflash_trt.serving.client.errors import ServedModelError
from dflash_trt.serving.server.heartbeat import SilenceWatch, find_models, read_heartbeat, runs
from dflash_trt.serving.server.launcher import ServerOptions, TritonServer
from dflash_trt.serving.server.repository import identify_bundle

if TYPE_CHECKING:  # the front is an extra
    from dflash_trt.serving.openai.server import OpenAiServer

LOOK_S = 0.25
WINDOW_S = 600.0
MAX_RESTARTS = 5
HANG_S = 300.0
"""Without progress. The longest turn of a generator is a chunk of a prompt: 512 tokens of a model
of 8 billion parameters take two CPU cores about three minutes."""
_LONGEST_DELAY_S = 8.0


class ServerFailedError(DflashError):
    """The server failed and is not started again; a code of its own ends the command."""

    def __init__(self, what: str, server: TritonServer, code: int | None) -> None:
        super().__init__(what, where=server.origin)
        self._code = code

    @property
    def exit_code(self) -> int:
        return self._code or EXIT_FAILED


class Supervisor:
    """Runs a server, and another when it fails, on the same ports; from construction on.

    It is what the OpenAI front asks: it passes requests on to the server that runs, and refuses
    them while there is none. Another is started until more than `max_restarts` have failed within
    WINDOW_S. `on_event` is told what to show to whoever started it.

    Raises:
        DflashError: the first server cannot be started.
    """

    def __init__(
        self,
        options: ServerOptions,
        on_event: Callable[[str], None] = lambda _: None,
        max_restarts: int = MAX_RESTARTS,
    ) -> None:
        self._bundle = identify_bundle(options.repository)
        self.server = TritonServer(options)
        self._max_restarts, self._on_event = max_restarts, on_event
        self._options = replace(options, **self.server.ports)
        self.failures = 0  # of servers, since the start
        self._recent: deque[float] = deque()
        self._expected: set[str] = set()
        self._model: ServedModel | None = None
        self._former: list[ServedModel] = []
        self._refusal = "the model is being loaded"
        self._ending = asyncio.Event()
        self._restarting = asyncio.Lock()

    async def is_ready(self) -> bool:
        """Whether a request would be answered now; known without asking the server."""
        if self._model is None:
            return False
        beat = read_heartbeat(self.server.heartbeat_file)
        return beat is None or beat.phase in (Phase.IDLE, Phase.TURN)

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[TextDelta, None]:
        """The answer of the server that runs now; ServedModelError where there is none."""
        if self._model is None:
            raise ServedModelError(self._refusal, "unavailable")
        async with aclosing(self._model.stream(request)) as deltas:
            async for delta in deltas:
                yield delta

    async def start(self) -> None:
        """Returns when the first server is ready."""
        await asyncio.to_thread(self.server.wait_ready)
        self._check_bundle()
        if not self._ending.is_set():
            self._model = ServedModel(self.server.addresses.grpc)

    async def run(self) -> None:
        """Watches and restarts, until `end`, or raises ServerFailedError."""
        while not self._ending.is_set():
            trouble = await self._watch()
            async with self._restarting:
                while trouble is not None and not self._ending.is_set():
                    code = self.server.exit_code
                    self._refuse("the model server has failed and is being restarted")
                    await asyncio.to_thread(self.server.kill)
                    await asyncio.to_thread(self.server.close)
                    trouble = await self._restart(self._plan_restart(trouble, code))

    async def end(self) -> int:
        """Takes no more requests, lets those in flight end within their time; the exit code."""
        self._ending.set()
        self._refuse("the server is shutting down")
        is_starting = self._restarting.locked()  # it has no requests
        if is_starting:
            self.kill()
        async with self._restarting:
            code = await asyncio.to_thread(self.server.close)
        return 0 if is_starting else code

    def kill(self) -> None:
        """Ends the server at once; whoever waits for an answer gets an error."""
        self.server.send_signal(signal.SIGKILL)

    async def close(self) -> None:
        """Closes the connections, when nobody waits for an answer."""
        for model in self._former:
            await model.close()

    def _refuse(self, why: str) -> None:
        """Requests are refused from now on; those in flight go on, and so do their connections."""
        if self._model is not None:
            self._former.append(self._model)
        self._model, self._refusal = None, why

    def _plan_restart(self, trouble: str, code: int | None) -> float:
        """How long to wait before the next start; the longer, the more of them have failed."""
        now = time.monotonic()
        self.failures += 1
        self._recent.append(now)
        while now - self._recent[0] > WINDOW_S:
            self._recent.popleft()
        count, most = len(self._recent), self._max_restarts
        if count > most:
            times = f"failed {count} times in {WINDOW_S / 60:g} minutes, the last time: "
            raise ServerFailedError((times if most else "") + trouble, self.server, code)
        delay_s = min(2.0 ** (count - 2), _LONGEST_DELAY_S) if count > 1 else 0.0
        self._on_event(f"{trouble}; starting again in {delay_s:g} s ({count} of {most})")
        return delay_s

    async def _restart(self, delay_s: float) -> str | None:
        """Starts another server; what kept it from being ready, if anything did."""
        await self._pause(delay_s)
        if self._ending.is_set():
            return None
        started = time.monotonic()
        try:
            self._check_bundle()
            self.server = await asyncio.to_thread(TritonServer, self._options)
            if self._ending.is_set():
                self.kill()
            await self.start()
        except ServerFailedError:
            raise
        except DflashError as error:
            return error.message
        self._on_event(f"ready again after {time.monotonic() - started:.1f} s")
        return None

    def _check_bundle(self) -> None:
        """Raises ServerFailedError where another bundle lies in the place of the one served.

        The front has the name, the tokenizer and the limits of that one.
        """
        place = self._options.repository
        if place.is_dir() and identify_bundle(place) != self._bundle:
            what = f"{place} holds another bundle than the one that was served"
            raise ServerFailedError(f"{what}: start `serve` again for it", self.server, None)

    async def _watch(self) -> str | None:
        """Returns what is wrong with the server, once something is; None when it is to end."""
        server, model = self.server, self._model
        models = find_models(server.pid)
        self._expected |= set(models.values())
        lost = self._expected - set(models.values())
        if model is None:  # it is to end
            return None
        silence = SilenceWatch(model.ping, HANG_S)
        try:
            while not self._ending.is_set():
                lost |= {name for pid, name in models.items() if not runs(pid, server.pid)}
                if server.exit_code is not None:  # and its models with it
                    how = "ended by itself"
                    with suppress(ValueError):
                        how = f"was ended by {signal.Signals(server.exit_code - 128).name}"
                    return f"{how}: {server.last_error()}"
                if lost:
                    return f"the process of the model {lost.pop()} has died"
                beat = read_heartbeat(server.heartbeat_file)
                if (trouble := silence.find_trouble(beat, time.monotonic())) is not None:
                    return trouble
                await self._pause(LOOK_S)
        finally:
            await silence.close()
        return None

    async def _pause(self, seconds: float) -> None:
        """Waits, or until this is to end."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ending.wait(), seconds)


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
        """Returns the server's exit code once both have ended; calls `on_ready` in between."""
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
