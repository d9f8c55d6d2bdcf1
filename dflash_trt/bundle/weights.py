"""weights/target and weights/draft of a bundle are checkpoints again: config, index, shards."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from dflash_trt.checkpoints.folder import CONFIG_NAME, INDEX_NAME, Checkpoint
from dflash_trt.checkpoints.target import GENERATION_CONFIG_NAME

DESCRIBING_FILES = (CONFIG_NAME, GENERATION_CONFIG_NAME, "hf_quant_config.json")


def describe_weights(folder: Path, checkpoint: Checkpoint, shards: Mapping[Path, str]) -> None:
    """Makes `folder` a Hugging Face checkpoint of its own.

    `shards` maps each shard of `checkpoint` that lies in the folder to its name there.
    """
    for name in DESCRIBING_FILES:
        if (checkpoint.path / name).is_file():
            shutil.copyfile(checkpoint.path / name, folder / name)
    placed = {name: entry for name, entry in checkpoint.tensors.items() if entry.file in shards}
    index = {
        "metadata": {"total_size": sum(entry.length for entry in placed.values())},
        "weight_map": {name: shards[entry.file] for name, entry in sorted(placed.items())},
    }
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", "utf-8")
