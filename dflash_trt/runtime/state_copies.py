"""Copies of recurrent states at the ends of prompt chunks: what a shared prefix goes on from."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from dflash_trt.backends.base import StatefulExecutor


class StateCopies:
    """Says which of an executor's copies stands for which tokens.

    A key stands for all tokens up to a page's end, as a page's does. Where all copies are taken,
    the one that was used least lately gives way.
    """

    def __init__(self, executor: StatefulExecutor) -> None:
        self._executor = executor
        self._copy_of: OrderedDict[bytes, int] = OrderedDict()  # the first was used least lately

    def can_keep(self, slot: int, position: int) -> bool:
        """Whether what `slot` has is a state to go on from at `position`."""
        return self._executor.states.can_resume(slot, position)

    def keep(self, key: bytes, slot: int, instead_of: bytes | None = None) -> bool:
        """Copies what `slot` has, the state behind the tokens that `key` stands for.

        Returns whether nobody had.
        """
        copy = self._copy_of.pop(key, None)
        is_new = copy is None
        if copy is None:
            if instead_of is not None and instead_of in self._copy_of:
                copy = self._copy_of.pop(instead_of)
            elif len(self._copy_of) < self._executor.limits.state_copies:
                copy = len(self._copy_of)
            else:
                _, copy = self._copy_of.popitem(last=False)
            self._executor.states.keep(slot, copy)
        self._copy_of[key] = copy
        return is_new

    def restore(self, key: bytes, slot: int) -> None:
        """Gives `slot` the state behind the tokens that `key`, one that is kept, stands for."""
        self._copy_of.move_to_end(key)
        self._executor.states.restore(self._copy_of[key], slot)

    def count_leading(self, keys: Sequence[bytes]) -> int:
        """How many of `keys`, in order of position, there are up to the last that is kept."""
        kept = (count for count in range(len(keys), 0, -1) if keys[count - 1] in self._copy_of)
        return next(kept, 0)
