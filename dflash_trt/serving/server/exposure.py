"""What of a Triton server others may reach: its flags, and where its own HTTP may listen."""

from __future__ import annotations

import ipaddress
import secrets
import socket

from dflash_trt.errors import DflashError

LOOPBACK = "127.0.0.1"
# They would register memory, write files, or load and unload models for anyone who asks.
RESTRICTED = ("shared-memory", "trace", "logging", "model-repository")
_HEADER = "dflash-trt"


def restriction_options() -> list[str]:
    """Options of `tritonserver` that close RESTRICTED, over both protocols, to everybody.

    The word that would open them is another one for every server, and nobody is told.
    """
    rule = f"{','.join(RESTRICTED)}:{_HEADER}={secrets.token_hex(16)}"
    return [f"--http-restricted-api={rule}", f"--grpc-restricted-protocol={rule}"]


def choose_http_host(host: str, http_host: str | None, *, expose: bool) -> str:
    """Where Triton server's own HTTP listens; others reach it only if that is asked for twice.

    `http_host` None is `host` where that is a loopback address, else LOOPBACK.

    Raises:
        DflashError: an address that others reach, without `expose` (usage).
    """
    if http_host is None:
        return host if is_loopback(host) else LOOPBACK
    if not expose and not is_loopback(http_host):
        raise DflashError(
            f"{http_host!r} lets others reach Triton server's own HTTP, where one request can end "
            "a server older than 2.69 (docs/security.md)",
            where="--http-host",
            fix="leave it out and offer --openai-port or gRPC, or add --expose-http",
            usage=True,
        )
    return http_host


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`; False too where it is no address at all."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, ValueError):
        return False
    return all(ipaddress.ip_address(str(one[4][0])).is_loopback for one in found)
