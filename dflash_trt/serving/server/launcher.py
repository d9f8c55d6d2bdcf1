"""Starts a Triton server as a child process, waits until it serves, and ends it."""

from __future__ import annotations

import http.client
import re
import signal
import subprocess
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dflash_trt.core.files import resolved
from dflash_trt.decoding.worker import Phase
from dflash_trt.errors import DflashError, one_line
from dflash_trt.serving.server.addresses import (
    LOOPBACK,
    bind_port,
    choose_http_host,
    client_address,
    numeric_address,
    restriction_options,
)
from dflash_trt.serving.server.guard import Guard
from dflash_trt.serving.server.heartbeat import HEARTBEAT_VARIABLE, read_heartbeat
from dflash_trt.serving.server.tritonserver import (
    TritonServerBinary,
    find_tritonserver,
    prepare_backends,
    server_environment,
)

_POLL_S = 0.1
_ANSWER_S = 30.0
# A server whose time is over ends with this code, or hangs.
_OVERDUE = 1
_OVERTIME_S = 2
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How to start a server on a model repository, as `package` writes it.

    A port of 0 takes any free one. Triton server's own HTTP listens where
    `choose_http_host` says, the other two on `host`. Without a `log_file` the output is kept for
    error messages only. After SIGTERM, requests in flight may go on for `exit_timeout_s`. If this
    process is killed, the server ends and the folders `removed_with` go too.
    """

    repository: Path
    host: str = LOOPBACK
    expose_http: bool = False
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    log_file: Path | None = None
    exit_timeout_s: int = 10
    removed_with: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class ServerAddresses:
    """`host:port` of each protocol, as a client on this machine writes it."""

    http: str
    grpc: str
    metrics: str

    def ports(self) -> dict[str, Any]:
        """The ports under the names that ServerOptions has for them."""
        each = asdict(self).items()
        return {f"{name}_port": int(address.rpartition(":")[2]) for name, address in each}


class TritonServer:
    """A running server, from construction on; use it as a context manager.

    Raises:
        DflashError: no tritonserver, no such repository, or a port that is taken.
    """

    def __init__(self, options: ServerOptions) -> None:
        binary = find_tritonserver()
        if not options.repository.is_dir():
            raise DflashError("is not a model repository", where=options.repository, usage=True)
        self.origin = binary.path
        self._exit_timeout_s = options.exit_timeout_s
        http_host = choose_http_host(options.host, expose=options.expose_http)
        places = {
            "http": (http_host, options.http_port),
            "grpc": (options.host, options.grpc_port),
            "metrics": (options.host, options.metrics_port),
        }
        with ExitStack() as stack:
            folder = TemporaryDirectory(prefix="dflash-trt-server-", ignore_cleanup_errors=True)
            self._folder = Path(stack.enter_context(folder))
            # Unique: the server's id, and the prefix of its shared memory.
            self._name = self._folder.name
            self.log_file = (options.log_file or self._folder / "server.log").absolute()
            # The server needs seconds to bind its own sockets beside these, which it may since
            # nobody listens here; until then the system gives the ports to nobody else.
            self._held_ports = {
                protocol: stack.enter_context(bind_port(host, port, f"--{protocol}-port"))
                for protocol, (host, port) in places.items()
            }
            self.addresses = ServerAddresses(
                *(
                    client_address(host, held.getsockname()[1])
                    for (host, _), held in zip(
                        places.values(), self._held_ports.values(), strict=True
                    )
                )
            )
            shared_memory = _SHARED_MEMORY / self._name
            self._guard = Guard([self._folder, shared_memory, *options.removed_with])
            stack.callback(self._guard.end_group)
            self.heartbeat_file = self._folder / "heartbeat"
            # Appended to: what a former server said last is why there is another.
            with self.log_file.open("ab") as log:
                self._log_start = log.tell()
                self._process = subprocess.Popen(
                    self._command(binary, options),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=server_environment(binary) | {HEARTBEAT_VARIABLE: str(self.heartbeat_file)},
                    # The stub looks for modules in its working folder first: an empty one.
                    cwd=self._folder,
                    # A terminal's Ctrl-C reaches the launcher alone, which decides what follows.
                    process_group=self._guard.group,
                )
            self._resources = stack.pop_all()
        self._closed_with: int | None = None

    def _command(self, binary: TritonServerBinary, options: ServerOptions) -> list[str]:
        command = [
            str(binary.path),
            f"--id={self._name}",
            f"--model-repository={self._spaceless(resolved(options.repository))}",
            *prepare_backends(binary, self._folder),
            f"--backend-config=python,shm-region-prefix-name={self._name}",
            "--disable-auto-complete-config",
            f"--exit-timeout-secs={options.exit_timeout_s}",
            *restriction_options(),
        ]
        for protocol, held in self._held_ports.items():
            host, port = held.getsockname()[:2]
            address = numeric_address(protocol, host)
            command += [f"--{protocol}-address={address}", f"--{protocol}-port={port}"]
        return command

    def __enter__(self) -> TritonServer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _spaceless(self, repository: Path) -> Path:
        """A path to the repository that Triton server 2.51 can start Python models from.

        Their processes get their arguments split at spaces, end at once, and are waited for.
        """
        if not re.search(r"\s", str(repository)):
            return repository
        link = self._folder / "repository"
        link.symlink_to(repository)
        return link

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; as a shell gives it (128 + signal) when a signal ended it."""
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    def is_ready(self) -> bool:
        """Whether the server and all its models take requests, and its metrics can be read.

        Triton server opens the metrics' port after it has said that it is ready. Another server,
        started on these ports meanwhile, may answer instead: it has another name.
        """
        return (
            _get(self.addresses.http, "/v2/health/ready") is not None
            and self._name.encode() in (_get(self.addresses.http, "/v2") or b"")
            and _get(self.addresses.metrics, "/metrics") is not None
        )

    def read_metrics(self) -> bytes:
        """Its figures, as Prometheus reads them; OSError where it tells none."""
        found = _get(self.addresses.metrics, "/metrics")
        if found is None:
            raise OSError("the server tells no figures")
        return found

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Returns once the server is ready, as `is_ready` has it.

        Raises:
            DflashError: it ended, or was not ready within `timeout_s`.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.is_ready():
            problem = None
            if self.exit_code is not None:
                problem = f"ended with exit code {self.exit_code} before it was ready"
            elif deadline is not None and time.monotonic() > deadline:
                problem = f"was not ready within {timeout_s:g} s"
            if problem is not None:
                raise DflashError(f"{problem}: {self.last_error()}", where=self.origin)
            time.sleep(_POLL_S)
        for held in self._held_ports.values():
            held.close()

    def wait(self, timeout_s: float | None = None) -> int:
        """Waits until the server has ended; its exit code.

        Raises:
            subprocess.TimeoutExpired: it runs on.
        """
        self._process.wait(timeout_s)
        assert self.exit_code is not None
        return self.exit_code

    def send_signal(self, number: int) -> None:
        """Passes a signal on to the server; nothing when it has ended."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Ends the server and its models at once, stopped ones too; `close` cleans up."""
        self._guard.end_group()
        self.wait()

    def keep_guard(self) -> None:
        """Sees to it that the server ends with this process, should it be killed."""
        self._guard.keep()

    def stop(self) -> int:
        """Ends the server: SIGTERM, and SIGKILL once its time is over; its exit code.

        0 also where its time was over but our model had no request left: Triton server 2.51
        sometimes loses a stream that is cancelled as it ends, and can then not unload the model.
        """
        if self.exit_code is not None:
            return self.exit_code
        self.send_signal(signal.SIGTERM)
        try:
            code = self.wait(self._exit_timeout_s + _OVERTIME_S)
        except subprocess.TimeoutExpired:
            self.send_signal(signal.SIGKILL)
            self.wait()
            code = _OVERDUE
        beat = read_heartbeat(self.heartbeat_file)
        was_idle = beat is not None and beat.phase is not Phase.TURN
        return 0 if code == _OVERDUE and was_idle else code

    def close(self) -> int:
        """Ends the server and what it leaves behind; its exit code. May be called again."""
        if self._closed_with is not None:
            return self._closed_with
        self._closed_with = self.stop()
        self._guard.end_group()  # models outlive a server that was killed
        for region in _SHARED_MEMORY.glob(f"{self._name}*"):
            region.unlink(missing_ok=True)
        self._resources.close()
        return self._closed_with

    def last_error(self) -> str:
        """What the log gives as the reason: a model's, else the server's, else its last line.

        That may be of a model that has outlived its server by a moment, and tells nothing.
        """
        try:
            lines = self._last_lines()
        except OSError as error:
            return f"its log cannot be read ({error.strerror})"
        for mark in ("failed to load '", "error: ", "failed to start "):
            if found := [line for line in lines if mark in line and line[0] in "Ee"]:
                return _reason(found[-1])
        return _reason(lines[-1]) if lines else "it printed nothing"

    def _last_lines(self) -> deque[str]:
        with self.log_file.open(encoding="utf-8", errors="replace") as log:
            log.seek(self._log_start)
            return deque((line for line in log if line.strip()), maxlen=200)


def _reason(line: str) -> str:
    """A line of the log without its time stamp and the Python traceback at its end."""
    text = re.sub(r"^[IWE]\d{4} [\d:.]+ \d+ [\w.]+:\d+\] ", "", line).strip().strip('"')
    return one_line(text.partition(r"\n\nAt:")[0])


def _get(address: str, path: str) -> bytes | None:
    """What a GET is answered with, if with 200."""
    connection = http.client.HTTPConnection(address, timeout=_ANSWER_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.read() if response.status == http.HTTPStatus.OK else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
