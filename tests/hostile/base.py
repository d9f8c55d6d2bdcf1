"""The good files that hostile ones are made from: pairs, a bundle, and a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path

from tests.checkpoints.conftest import TARGET_CONFIG, merged, target_shapes, write_checkpoint
from tests.cli.bigram import write_bigram_pair
from tests.hostile.drafters import write_drafters
from tests.importing.files import VOCAB, write_gguf

_GGUF_CONFIG = merged(
    TARGET_CONFIG,
    {
        "vocab_size": VOCAB,
        "num_hidden_layers": 2,
        "model_type": "qwen3",
        "rope_parameters": {"rope_theta": 10000.0},
    },
)


def write_base(folder: Path) -> None:
    """Writes pair/, other drafts for it in drafters/, bundle/, and hf/ with m.gguf."""
    from dflash_trt.cli.main import main

    config = write_bigram_pair(folder / "pair")
    assert main(["build", "--target", str(config), "-o", str(folder / "bundle")]) == 0
    write_drafters(folder / "drafters", folder / "pair" / "target")
    hf = write_checkpoint(folder / "hf", _GGUF_CONFIG, target_shapes(_GGUF_CONFIG))
    (hf / "config.json").write_text(json.dumps(_GGUF_CONFIG))
    write_gguf(hf / "m.gguf", hf)
