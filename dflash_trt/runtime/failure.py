"""The error of one request among those of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dflash_trt.errors import DflashError


class RequestFailedError(DflashError):
    """Request `request_id` cannot continue. The others can, once it is cancelled."""

    def __init__(self, request_id: int, error: DflashError) -> None:
        super().__init__(error.what, where=error.where, fix=error.fix, usage=error.usage)
        self.request_id = request_id


@contextmanager
def blaming(request_id: int) -> Iterator[None]:
    """Turns an error about a request into one that names it."""
    try:
        yield
    except DflashError as error:
        raise RequestFailedError(request_id, error) from error
