"""Tells Dynamo's router which pages of a prompt a worker could share."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from dflash_trt.core.limits import PagePool

_log = logging.getLogger(__name__)


class Publisher(Protocol):
    """What is used of Dynamo's KvEventPublisher."""

    def publish_stored(
        self,
        token_ids: list[int],
        num_block_tokens: list[int],
        block_hashes: list[int],
        parent_hash: int | None = None,
    ) -> None: ...

    def publish_removed(self, block_hashes: list[int]) -> None: ...


class SharedPages:
    """Observes the page tables over `pool` and publishes what they hold.

    A wrong event costs a hit of the prefix cache, and never a token.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self._publisher: Publisher | None = None
        self._lock = threading.Lock()
        self._told: set[int] = set()

    def connect(self, publisher: Publisher) -> None:
        """Publishes to `publisher` from now on; what was stored before is not told."""
        with self._lock:
            self._publisher = publisher

    def stored(self, parent: bytes | None, keys: Sequence[bytes], token_ids: Sequence[int]) -> None:
        """Publishes pages that can be shared; see `PageObserver`."""
        hashes = [_hash(key) for key in keys]
        with self._lock:
            if self._publisher is not None:
                self._told.update(hashes)
                told = partial(
                    self._publisher.publish_stored,
                    token_ids=list(token_ids),
                    num_block_tokens=[self.pool.page_size] * len(keys),
                    block_hashes=hashes,
                    parent_hash=None if parent is None else _hash(parent),
                )
                _try(told)

    def forgotten(self, key: bytes) -> None:
        """Takes back a page that was given to other tokens."""
        with self._lock:
            self._take_back([_hash(key)])

    def clear(self) -> None:
        """Takes back all of them: another executor has opened, with empty caches."""
        with self._lock:
            self._take_back(sorted(self._told))

    def _take_back(self, hashes: list[int]) -> None:
        gone = [one for one in hashes if one in self._told]
        if gone and self._publisher is not None:
            self._told.difference_update(gone)
            _try(partial(self._publisher.publish_removed, gone))


def _try(publish: Callable[[], None]) -> None:
    try:
        publish()
    except Exception:  # the page tables are in the middle of a request
        _log.exception("the router was not told of pages")


def _hash(key: bytes) -> int:
    """A key as the signed 64 bits that Dynamo has for it."""
    return int.from_bytes(key[:8], "little", signed=True)
