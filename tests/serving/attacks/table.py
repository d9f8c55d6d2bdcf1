"""What an attack is, where it goes, and whether it ended as it should."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

SOON_S = 20.0
AT_ONCE = 64
_PATIENCE_S = 60.0


@dataclass(frozen=True)
class Target:
    """Where a pair is served: URL of OpenAI's API, host:port of gRPC."""

    openai: str
    grpc: str

    @property
    def front(self) -> str:
        return urlsplit(self.openai).netloc


Ending = int | str
"""A status of HTTP, "closed" without one, or how gRPC ended: "refused", "answered"."""
Run = Callable[[Target, random.Random], set[Ending]]


@dataclass(frozen=True)
class Attack:
    """`run` returns how it ended, which must be among `endings`; a `slow` one takes a while."""

    name: str
    run: Run
    endings: frozenset[Ending]
    slow: bool = False


ATTACKS: list[Attack] = []


def attack(*endings: Ending, slow: bool = False) -> Callable[[Run], Run]:
    def add(run: Run) -> Run:
        ATTACKS.append(Attack(run.__name__, run, frozenset(endings), slow))
        return run

    return add


def check(one: Attack, target: Target, seed: int) -> str | None:
    """What was wrong with its ending; None: nothing."""
    started = time.monotonic()
    endings = one.run(target, random.Random(f"{one.name} {seed}"))
    took = time.monotonic() - started
    if not endings <= one.endings:
        return f"{one.name} ({seed}): {endings - one.endings}, not {set(one.endings)}"
    if took > SOON_S:
        return f"{one.name} ({seed}): took {took:.1f} s"
    return None


@contextmanager
def connected(address: str) -> Iterator[socket.socket]:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=_PATIENCE_S) as client:
        yield client
