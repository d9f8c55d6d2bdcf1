"""What may end an output, and how much of it one request may ask for.

Every token of an answer is compared with all stop strings of its request, in the thread that all
requests share: what has no limit here slows everybody.
"""

from __future__ import annotations

from collections.abc import Sequence

from dflash_trt.errors import DflashError

MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 4096
MAX_STOP_IDS = 256


def check_stop_strings(stop_strings: Sequence[str], where: str = "stop_strings") -> None:
    """Raises DflashError (usage) for more, or longer, stop strings than a request may have.

    Also for one that is not Unicode: it could never be found.
    """
    if len(stop_strings) > MAX_STOP_STRINGS:
        raise _too_much(where, f"{len(stop_strings):,} stop strings", MAX_STOP_STRINGS)
    characters = sum(map(len, stop_strings))
    if characters > MAX_STOP_CHARACTERS:
        what = f"{characters:,} characters of stop strings"
        raise _too_much(where, what, MAX_STOP_CHARACTERS)
    for text in stop_strings:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            what = f"{text[:40]!a} is not Unicode text at character {error.start}"
            raise DflashError(what, where=where, usage=True) from error


def check_stop_ids(token_ids: Sequence[int], where: str = "stop_token_ids") -> None:
    """Raises DflashError (usage) for more stop tokens than a request may have."""
    if len(token_ids) > MAX_STOP_IDS:
        raise _too_much(where, f"{len(token_ids):,} stop tokens", MAX_STOP_IDS)


def _too_much(where: str, what: str, most: int) -> DflashError:
    return DflashError(f"{what} are more than {most:,}", where=where, fix="send fewer", usage=True)
