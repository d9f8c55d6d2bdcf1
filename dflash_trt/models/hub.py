"""Finds a checkpoint's folder: a local one, or a download from the Hugging Face hub.

`download` is the only way to that hub.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from dflash_trt.errors import DflashError, one_line

HUB_NAME = re.compile(r"^[\w.-]+/[\w.-]+$")
# Weights and what describes them; never pickles, never code.
ALLOWED_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt"]


def find_checkpoint(name: str, *, base: Path, revision: str | None, option: str) -> Path:
    """The folder of checkpoint `name`: a path relative to `base`, else `owner/name` on the hub.

    Args:
        revision: hub branch, tag or commit; None for the default.
        option: the command-line option that takes a local folder, for the error.
    """
    fix = f"with no network, pass a local folder with {option}"
    local = local_checkpoint(name, base=base)
    return local or download(name, ALLOWED_FILES, revision=revision, fix=fix)


def local_checkpoint(name: str, *, base: Path) -> Path | None:
    """The folder of checkpoint `name`; None where that is a hub name.

    Raises:
        DflashError: it is neither a folder nor looks like `owner/name` (usage).
    """
    if not name.strip():  # else it would be `base` itself
        raise DflashError("is empty", where="checkpoint", fix="name a folder", usage=True)
    try:
        local = base / Path(name).expanduser()
    except RuntimeError as error:  # ~user of an unknown user
        raise DflashError("there is no such home folder", where=name, usage=True) from error
    if local.is_dir():
        return local
    if not HUB_NAME.match(name) or name.startswith((".", "/")):
        raise DflashError("there is no such checkpoint folder", where=local, usage=True)
    return None


def download(
    name: str,
    patterns: Sequence[str],
    *,
    revision: str | None,
    fix: str,
    kind: Literal["model", "dataset"] = "model",
) -> Path:
    """The folder of a snapshot of `owner/name`, with the files that match one of `patterns`.

    A snapshot that is in the hub's own cache may have more files. `revision` is a branch, tag or
    commit, None for the default.

    Raises:
        DflashError: it cannot be fetched; `fix` says what to do without a network.
    """
    # Imported here: it takes a third of a second, which local checkpoints need not pay.
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            name, repo_type=kind, revision=revision, allow_patterns=list(patterns)
        )
    except Exception as error:
        what = f"cannot be fetched from the Hugging Face hub ({one_line(error, 160)})"
        raise DflashError(what, where=name, fix=fix) from error
    return Path(found)
