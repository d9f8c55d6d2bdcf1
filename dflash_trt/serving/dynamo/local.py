"""Dynamo on one machine: its frontend with the router, and workers that find each other by files.

For trying it and for tests. Beyond one machine Dynamo's own operator starts the same processes.
"""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from dflash_trt.errors import EXIT_FAILED, DflashError
from dflash_trt.serving.dynamo.packages import CLUSTER
from dflash_trt.serving.server.launcher import LOOPBACK, bind_port, client_address
from dflash_trt.serving.server.supervisor import WINDOW_S

ENDPOINT = "dynamo.backend.generate"
MIGRATIONS = 3
"""How often the frontend may move a request."""
_LOOK_S = 0.25
_ASK_S = 5.0
_SLACK_S = 10.0
_START_S = 600.0
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux's prctl
_NAMESPACES = {"DYN_NAMESPACE", "DYN_NAMESPACE_PREFIX", "DYN_NAMESPACE_WORKER_SUFFIX"}
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOptions:
    """What runs on this machine.

    `worker_arguments` follow `dflash-trt dynamo-worker`; of the requests `page_size` tokens make
    what the router compares, None: caches are linear, and the worker with the least load is next.
    Without a `log_file` the processes write to stderr.
    """

    worker_arguments: tuple[str, ...]
    workers: int
    page_size: int | None
    host: str = LOOPBACK
    port: int = 8000
    drain_s: int = 20
    max_restarts: int = 5
    log_file: Path | None = None


class LocalDynamo:
    """Starts the processes, starts a worker again that has ended, and ends them all.

    The first SIGINT, SIGTERM or SIGHUP lets requests in flight end, as long as the options allow;
    the second ends them at once. `on_event` is told what to show.
    """

    def __init__(self, options: LocalOptions, on_event: Callable[[str], None]) -> None:
        self._options, self._on_event = options, on_event
        self._port, *self._ports = _free_ports(options.workers + 1)
        if options.port:
            bind_port(options.host, options.port, "--openai-port").close()
            self._port = options.port
        self.address = client_address(options.host, self._port)
        self._signals = 0
        self._failures: deque[float] = deque()
        self._frontend: subprocess.Popen[bytes] | None = None
        self._workers: list[subprocess.Popen[bytes]] = []

    @property
    def metrics_urls(self) -> list[str]:
        """Where each worker shows its figures."""
        return [f"http://{LOOPBACK}:{port}/metrics" for port in self._ports]

    def run(self, on_ready: Callable[[], None]) -> int:
        """Returns the exit code when a signal has ended it; calls `on_ready` in between.

        Raises:
            DflashError: the frontend has ended, or workers too often.
        """
        with (
            tempfile.TemporaryDirectory(prefix="dflash-trt-dynamo-") as folder,
            self._heeding(),
            self._open_log() as log,
        ):
            try:
                self._start(Path(folder), log)
                self._watch(Path(folder), log, on_ready)
                return self._drain()
            finally:
                self._kill()

    def _watch(self, folder: Path, log: IO[bytes] | None, on_ready: Callable[[], None]) -> None:
        """Returns when a signal has come."""
        ready, latest = False, time.monotonic() + _START_S
        while not self._signals:
            assert self._frontend is not None
            if (code := self._frontend.poll()) is not None:
                raise DflashError(f"has ended with code {code}", where="Dynamo's frontend")
            for place, worker in enumerate(self._workers):
                if (code := worker.poll()) is not None:
                    self._note_end(place, code, ready=ready)
                    self._workers[place] = self._start_worker(place, folder, log)
            if not ready and self._count_ready() == self._options.workers:
                ready = True
                on_ready()
            if not ready and time.monotonic() > latest:
                what = f"no answer of all workers through the frontend within {_START_S:g} s"
                raise DflashError(what, fix="see what they wrote (DYN_LOG=info for more)")
            time.sleep(_LOOK_S)

    def _note_end(self, place: int, code: int, *, ready: bool) -> None:
        """Says that a worker has ended; DflashError when that was too often, or before any ran."""
        now, most = time.monotonic(), self._options.max_restarts
        self._failures.append(now)
        while now - self._failures[0] > WINDOW_S:
            self._failures.popleft()
        how = f"code {code}" if code >= 0 else signal.Signals(-code).name
        what, where = f"has ended with {how}", f"worker {place + 1}"
        if not ready:
            raise DflashError(what, where=where, fix="see what it wrote before")
        if len(self._failures) > most:
            often = f"{what}: {len(self._failures)} have in {WINDOW_S / 60:g} minutes"
            raise DflashError(often, where=where, fix="see what it wrote before")
        self._on_event(f"{where} {what}; another is started")

    def _count_ready(self) -> int:
        """Workers that the frontend can reach, once it serves their model."""
        if not self._ask("/v1/models").get("data"):
            return 0
        found = self._ask("/health").get("instances", ())
        return sum(one.get("endpoint") == ENDPOINT.split(".")[-1] for one in found)

    def _ask(self, path: str) -> dict[str, list[dict[str, object]]]:
        connection = http.client.HTTPConnection(self.address, timeout=_ASK_S)
        try:
            connection.request("GET", path)
            answer = json.loads(connection.getresponse().read())
            return answer if isinstance(answer, dict) else {}
        except (OSError, http.client.HTTPException, ValueError):
            return {}
        finally:
            connection.close()

    def _start(self, folder: Path, log: IO[bytes] | None) -> None:
        options = self._options
        command = ["--http-host", options.host, "--http-port", str(self._port)]
        command += ["--migration-limit", str(MIGRATIONS)]
        command += ["--router-mode", "least-loaded" if options.page_size is None else "kv"]
        if options.page_size is not None:
            command += ["--kv-cache-block-size", str(options.page_size)]
        self._frontend = _spawn(["dynamo.frontend", *command], self._environment(folder), log)
        for place in range(options.workers):
            self._workers.append(self._start_worker(place, folder, log))

    def _start_worker(
        self, place: int, folder: Path, log: IO[bytes] | None
    ) -> subprocess.Popen[bytes]:
        command = ["dflash_trt", "dynamo-worker", *self._options.worker_arguments]
        more = {"DYN_SYSTEM_PORT": str(self._ports[place])}
        # The frontend has drained before a worker is told to end.
        more["DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS"] = "0"
        command += ["--endpoint", ENDPOINT]
        return _spawn(command, self._environment(folder) | more, log)

    def _environment(self, folder: Path) -> dict[str, str]:
        """Dynamo's variables: discovery by files, and nothing that listens beyond this machine."""
        own = {
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(folder),
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": str(self._options.drain_s),
            "HF_HUB_OFFLINE": "1",
        }
        planes = ("TCP_RPC", "TCP_RESPONSE_STREAM", "EVENT_PLANE", "SYSTEM")
        own |= {f"DYN_{plane}_HOST": LOOPBACK for plane in planes}
        # The frontend looks for a model in any namespace, and workers have that of ENDPOINT. In a
        # pod too they find each other here.
        left_out = {*_NAMESPACES, CLUSTER}
        others = {one: text for one, text in os.environ.items() if one not in left_out}
        return {"DYN_LOG": "error", **others, **own}

    def _drain(self) -> int:
        """Lets requests in flight end; the exit code."""
        assert self._frontend is not None
        self._frontend.terminate()
        self._wait([self._frontend], self._options.drain_s + _SLACK_S)
        for worker in self._workers:
            worker.terminate()
        self._wait(self._workers, _SLACK_S)
        return 0 if self._signals == 1 else EXIT_FAILED

    def _wait(self, processes: list[subprocess.Popen[bytes]], most_s: float) -> None:
        end = time.monotonic() + most_s
        while any(one.poll() is None for one in processes):
            if self._signals > 1 or time.monotonic() > end:
                return
            time.sleep(0.05)

    def _kill(self) -> None:
        for process in filter(None, [self._frontend, *self._workers]):
            process.kill()
            process.wait()

    @contextmanager
    def _open_log(self) -> Iterator[IO[bytes] | None]:
        if self._options.log_file is None:
            yield None
            return
        with self._options.log_file.open("ab") as log:
            yield log

    @contextmanager
    def _heeding(self) -> Iterator[None]:
        """Counts the signals that ask for the end."""

        def count(*_: object) -> None:
            self._signals += 1

        # `nohup` has SIGHUP ignored, and it stays so.
        former = {one: signal.getsignal(one) for one in _SIGNALS}
        heeded = [one for one, handler in former.items() if handler is not signal.SIG_IGN]
        for one in heeded:
            signal.signal(one, count)
        try:
            yield
        finally:
            for one in heeded:
                signal.signal(one, former[one])


def _free_ports(count: int) -> list[int]:
    """Ports below those that connections get: Dynamo reads some as 16 bits with a sign."""
    found: list[int] = []
    candidates = random.sample(range(10000, 1 << 15), 1000)
    while len(found) < count:
        port = candidates.pop()
        with suppress(DflashError), bind_port(LOOPBACK, port, "--dynamo"):
            found.append(port)
    return found


def _spawn(
    module: list[str], environment: dict[str, str], log: IO[bytes] | None
) -> subprocess.Popen[bytes]:
    """Runs a Python module that ends when this process does, whatever ends it."""
    library = ctypes.CDLL(None)
    return subprocess.Popen(
        [sys.executable, "-m", *module],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if log is None else log,
        stderr=log,
        env=environment,
        # A terminal's Ctrl-C reaches this process alone, which decides what follows.
        process_group=0,
        preexec_fn=lambda: library.prctl(_DIE_WITH_PARENT, signal.SIGKILL),
    )
