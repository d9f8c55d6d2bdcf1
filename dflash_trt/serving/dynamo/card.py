"""What Dynamo's frontend reads of a model before it sees a token: tokenizer and config.json.

A bundle keeps those apart. They are copied to a folder of the user's cache that is named by their
content: workers of one bundle must name the same folder, or the frontend takes them for two models.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from dflash_trt.bundle.bundle import Bundle
from dflash_trt.bundle.manifest import TOKENIZER_FOLDER
from dflash_trt.core.publish import replace_file
from dflash_trt.core.user_cache import user_cache_file

_CONFIG = "weights/target/config.json"


def write_card(bundle: Bundle) -> Path:
    """Writes the folder, where it is not there yet; returns it.

    Raises:
        OSError: the user's cache cannot be written.
    """
    names = [file.path for file in bundle.manifest.files]
    kept = [one for one in names if one == _CONFIG or one.startswith(f"{TOKENIZER_FOLDER}/")]
    files = {Path(one).name: bundle.find(one).read_bytes() for one in sorted(kept)}
    digest = hashlib.sha256()
    for name, content in files.items():
        digest.update(f"{name} {len(content)} ".encode() + content)
    folder = user_cache_file(f"dynamo-cards/{digest.hexdigest()[:32]}")
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        replace_file(folder / name, content)  # as often as you like: they are the same
    return folder
