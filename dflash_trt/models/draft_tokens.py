"""draft_tokens.json: the tokens that a draft chooses among, where they are not all.

The target's output head is most of what a small draft of a large vocabulary reads. Over the
commonest tokens it is a tenth of that, and what speculation says stays the same: a token that the
draft cannot name is the target's to say. Readers that do not know the file use the whole head.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from dflash_trt.core.files import exists
from dflash_trt.core.limits import MAX_COUNT
from dflash_trt.core.strict_json import read_json_object
from dflash_trt.errors import DflashError

DRAFT_TOKENS_NAME = "draft_tokens.json"
_KEY = "token_ids"


def read_draft_tokens(folder: Path) -> tuple[int, ...] | None:
    """The token ids, ascending; None where the draft in `folder` chooses among all.

    Raises:
        DflashError: a file that says something else.
    """
    path = folder / DRAFT_TOKENS_NAME
    if not exists(path):
        return None
    content = read_json_object(path)
    ids = content.get(_KEY)
    if (
        list(content) != [_KEY]
        or not isinstance(ids, list)
        or not ids
        or not all(type(one) is int and 0 <= one <= MAX_COUNT for one in ids)
        or any(after <= before for before, after in pairwise(ids))
    ):
        what = f'must hold "{_KEY}" alone, a list of ascending token ids'
        raise DflashError(what, where=path, fix="without the file the draft uses the whole head")
    return tuple(ids)


def write_draft_tokens(token_ids: Sequence[int], folder: Path) -> None:
    """Writes the ascending `token_ids` into a draft's folder."""
    (folder / DRAFT_TOKENS_NAME).write_text(json.dumps({_KEY: list(token_ids)}) + "\n", "utf-8")
