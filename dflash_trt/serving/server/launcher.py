"""Starts a Triton server as a child process, waits until it serves, and ends it."""

from __future__ import annotations

import http.client
import os
import re
import secrets
import signal
import socket
import subprocess
import time
from collections import deque
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from dflash_trt.core.files import resolved
from dflash_trt.decoding.worker import Phase
from dflash_trt.errors import DflashError, one_line, printable
from dflash_trt.serving.server.heartbeat import HEARTBEAT_VARIABLE, has_dead_child, read_heartbeat
from dflash_trt.serving.server.tritonserver import (
    find_tritonserver,
    prepare_backends,
    server_environment,
)

LOOPBACK = "127.0.0.1"
# They would register memory, write files, or load and unload models for anyone who asks.
RESTRICTED = ("shared-memory", "trace", "logging", "model-repository")


def restriction_options() -> list[str]:
    """Options of `tritonserver` that close RESTRICTED, over both protocols, to everybody.

    The word that would open them is another one for every server, and nobody is told.
    """
    rule = f"{','.join(RESTRICTED)}:dflash-trt={secrets.token_hex(16)}"
    return [f"--http-restricted-api={rule}", f"--grpc-restricted-protocol={rule}"]


def bind_port(host: str, port: int, option: str) -> socket.socket:
    """A TCP socket bound to the address; an error names the `option` that the port came from."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, ValueError) as error:  # ValueError: no name can be like that
        reason = getattr(error, "strerror", None) or one_line(error, 80)
        what = f"{one_line(repr(host), 80)}: {reason}"
        raise DflashError(what, where="--host", usage=True) from error
    try:
        # As servers do: connections that a former one has just closed do not hold the port.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        what = f"{host}:{port}: {error.strerror}"
        raise DflashError(what, where=option, fix="choose another", usage=True) from error
    return bound


def numeric_address(protocol: str, host: str) -> str:
    """The host as Triton server takes it, which would read a name as 255.255.255.255."""
    if ":" not in host:
        return host
    return f"[{host}]" if protocol == "grpc" else f"ipv6:{host}"


def client_address(host: str, port: int) -> str:
    """`host:port` as a client on this machine writes it."""
    # What listens everywhere is reached here by the loopback address.
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{reached}]:{port}" if ":" in reached else f"{reached}:{port}"


_POLL_S = 0.1
_ANSWER_S = 10.0
# A server whose time is over ends with this code, or hangs.
_OVERDUE = 1
_OVERTIME_S = 2
_LAST_WORDS_S = 5.0
# Waits until nobody holds the other end of its input; then nobody is left to end the server.
_GUARD = """
trap '' INT TERM HUP
read -r group && read -r end
kill -9 -"$group"
sleep 0.3
rm -rf "$@" /dev/shm/"$0"*
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How to start a server on a model repository, as `package` writes it.

    A port of 0 takes any free one. Triton server's own HTTP listens at `host` with `expose_http`
    alone. Without a `log_file` the output is kept for error
    messages only. After SIGTERM, requests in flight may go on for `exit_timeout_s`. If this
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

    @property
    def places(self) -> dict[str, tuple[str, int]]:
        """Host and port by protocol."""
        return {
            "grpc": (self.host, self.grpc_port),
            "http": (self.host if self.expose_http else LOOPBACK, self.http_port),
            "metrics": (self.host, self.metrics_port),
        }


@dataclass(frozen=True, slots=True)
class ServerAddresses:
    """`host:port` of each protocol, as a client on this machine writes it."""

    http: str
    grpc: str
    metrics: str


class TritonServer:
    """A running server, from construction on; use it as a context manager."""

    def __init__(self, options: ServerOptions) -> None:
        binary = find_tritonserver()
        if not options.repository.is_dir():
            raise DflashError("is not a model repository", where=options.repository, usage=True)
        self.origin = binary.path
        self._exit_timeout_s = options.exit_timeout_s
        with ExitStack() as stack:
            folder = TemporaryDirectory(prefix="dflash-trt-server-", ignore_cleanup_errors=True)
            self._folder = Path(stack.enter_context(folder))
            self._name = self._folder.name  # unique: the prefix of the server's shared memory
            self.log_file = (options.log_file or self._folder / "server.log").absolute()
            self.heartbeat_file = self._folder / "heartbeat"
            # The server needs seconds to bind its own sockets beside these, which it may since
            # nobody listens here; until then the system gives the ports to nobody else.
            self._held_ports = {
                name: stack.enter_context(bind_port(host, port, f"--{name}-port"))
                for name, (host, port) in options.places.items()
            }
            bound = {name: one.getsockname() for name, one in self._held_ports.items()}
            self.ports = {f"{name}_port": address[1] for name, address in bound.items()}
            self.addresses = ServerAddresses(
                **{
                    name: client_address(options.places[name][0], one[1])
                    for name, one in bound.items()
                }
            )
            # Models' processes get their arguments split at spaces, which this path has none of.
            repository = self._folder / "repository"
            repository.symlink_to(resolved(options.repository))
            command = [
                str(binary.path),
                f"--id={self._name}",
                f"--model-repository={repository}",
                *prepare_backends(binary, self._folder),
                f"--backend-config=python,shm-region-prefix-name={self._name}",
                "--disable-auto-complete-config",
                f"--exit-timeout-secs={options.exit_timeout_s}",
                *restriction_options(),
            ]
            for name, (host, port, *_) in bound.items():
                command += [f"--{name}-address={numeric_address(name, host)}"]
                command += [f"--{name}-port={port}"]
            doomed = map(str, (self._folder, *(one.absolute() for one in options.removed_with)))
            guard = stack.enter_context(
                subprocess.Popen(
                    ["/bin/sh", "-c", _GUARD, self._name, *doomed],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    process_group=0,
                )
            )
            stack.callback(guard.kill)  # before its input closes
            # Appended to: what a former server said last is why there is another.
            with self.log_file.open("ab") as log:
                self._log_start = log.tell() if log.seekable() else None  # /dev/stderr, say
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=server_environment(binary) | {HEARTBEAT_VARIABLE: str(self.heartbeat_file)},
                    # The stub looks for modules in its working folder first.
                    cwd=self._folder,
                    # A terminal's Ctrl-C reaches the launcher alone, which decides what follows.
                    process_group=0,
                )
            assert guard.stdin is not None
            with suppress(BrokenPipeError):
                guard.stdin.write(b"%d\n" % self._process.pid)
                guard.stdin.flush()
            self._resources = stack.pop_all()
        self._closed_with: int | None = None

    def __enter__(self) -> TritonServer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

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
        """Its figures, as Prometheus reads them; nothing where it tells none."""
        return _get(self.addresses.metrics, "/metrics") or b""

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Returns once the server is ready, as `is_ready` has it.

        Triton server 2.51 waits for ever for a model whose process is killed while it loads: it is
        killed too. One that fails to load ends its process, and the server, which says why.
        """
        started, lost_since = time.monotonic(), None
        while not self.is_ready():
            now, problem = time.monotonic(), None
            if has_dead_child(self.pid):
                lost_since = lost_since or now
            if lost_since is not None and now - lost_since > _LAST_WORDS_S:
                self.kill()
            if self.exit_code is not None:
                problem = f"ended with exit code {self.exit_code} before it was ready"
            elif timeout_s is not None and now - started > timeout_s:
                problem = f"was not ready within {timeout_s:g} s"
            if problem is not None:
                raise DflashError(f"{problem}: {self.last_error()}", where=self.origin)
            time.sleep(_POLL_S)
        for held in self._held_ports.values():
            held.close()

    def send_signal(self, number: int) -> None:
        """Passes a signal on to the server; nothing when it has ended."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Ends the server and its models at once, stopped ones too; `close` cleans up."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> int:
        """Ends the server: SIGTERM, and SIGKILL once its time is over; its exit code.

        0 also where its time was over but our model had no request left: Triton server 2.51
        sometimes loses a stream that is cancelled as it ends, and can then not unload the model.
        """
        if (code := self.exit_code) is not None:
            return code
        self.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(self._exit_timeout_s + _OVERTIME_S)
        if (code := self.exit_code) not in (None, _OVERDUE):
            return code
        self.kill()
        beat = read_heartbeat(self.heartbeat_file)
        return 0 if beat is not None and beat.phase is not Phase.TURN else _OVERDUE

    def close(self) -> int:
        """Ends the server and what it leaves behind; its exit code. May be called again."""
        if self._closed_with is None:
            self._closed_with = self.stop()
            self.kill()  # models outlive a server that was killed
            for region in Path("/dev/shm").glob(f"{self._name}*"):
                region.unlink(missing_ok=True)
            self._resources.close()
        return self._closed_with

    def last_error(self) -> str:
        """What the log gives as the reason: a model's, else the server's, else its last line."""
        if self._log_start is None:
            return f"{self.log_file} says why"
        try:
            with self.log_file.open(encoding="utf-8", errors="replace") as log:
                log.seek(self._log_start)
                lines = deque((line for line in log if line.strip()), maxlen=200)
        except OSError as error:
            return f"its log cannot be read ({error.strerror})"
        if not lines:
            return "it printed nothing"
        reason = lines[-1]
        for mark in ("failed to load '", "error: ", "failed to start "):
            if found := [line for line in lines if mark in line and line[0] in "Ee"]:
                reason = found[-1]
                break
        # Without its time stamp and the Python traceback at its end.
        text = re.sub(r"^[IWE]\d{4} [\d:.]+ \d+ [\w.]+:\d+\] ", "", reason).strip().strip('"')
        return one_line(printable(text.partition(r"\n\nAt:")[0]))


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
