"""Where a Triton server listens, and what of it others may reach."""

from __future__ import annotations

import secrets
import socket

from dflash_trt.errors import DflashError, one_line

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
    """A TCP socket bound to the address.

    Raises:
        DflashError: `option` names a port that is taken, or the host is no address of this
            machine (usage).
    """
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
