"""The good files that hostile ones are made from: pairs, a bundle, and a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from tests.cli.bigram import BIGRAM_DRAFT, HIDDEN, MASK, TAPS, VOCAB, write_bigram_pair
from tests.importing.files import VOCAB as GGUF_VOCAB
from tests.importing.files import write_gguf
from tests.models.conftest import (
    TARGET_CONFIG,
    draft_shapes,
    layer_shapes,
    merged,
    target_shapes,
    write_checkpoint,
)

_GGUF_CONFIG = merged(
    TARGET_CONFIG,
    {
        "vocab_size": GGUF_VOCAB,
        "num_hidden_layers": 2,
        "model_type": "qwen3",
        "rope_parameters": {"rope_theta": 10000.0},
    },
)
_CHOICES, _RANK = 24, 6
_SIZES = {key: one for key, one in BIGRAM_DRAFT.items() if key != "dflash_config"}
_EAGLE = merged(
    {key: one for key, one in _SIZES.items() if key != "block_size"},
    {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": _CHOICES,
    },
)
_DSPARK = merged(
    _SIZES,
    {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": 7,
        "mask_token_id": MASK,
        "target_layer_ids": [1, 2, 3],
        "enable_confidence_head": True,
        "markov_rank": _RANK,
        "markov_head_type": "vanilla",
    },
)


def write_base(folder: Path) -> None:
    """Writes pair/, other drafts for it in drafters/, bundle/, and hf/ with m.gguf."""
    from dflash_trt.cli.main import main

    config = write_bigram_pair(folder / "pair")
    assert main(["build", "--target", str(config), "-o", str(folder / "bundle")]) == 0
    _write_drafters(folder / "drafters", folder / "pair" / "target")
    hf = write_checkpoint(folder / "hf", _GGUF_CONFIG, target_shapes(_GGUF_CONFIG))
    (hf / "config.json").write_text(json.dumps(_GGUF_CONFIG))
    write_gguf(hf / "m.gguf", hf)


def _write_drafters(folder: Path, target: Path) -> None:
    """Writes eagle/ and dspark/, good drafts for the bigram target."""
    wide = {
        name: [shape[0], 2 * HIDDEN]
        if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj")
        else shape
        for name, shape in layer_shapes(_EAGLE, "", qk_norm=False).items()
    }
    wide |= {"layers.0.hidden_norm.weight": [HIDDEN], "norm.weight": [HIDDEN]}
    wide |= {"fc.weight": [HIDDEN, TAPS * HIDDEN], "lm_head.weight": [_CHOICES, HIDDEN]}
    write_checkpoint(folder / "eagle", _EAGLE, wide)
    spread = np.arange(_CHOICES, dtype=np.int64)
    known = np.isin(np.arange(VOCAB), 2 * spread)
    _add(folder / "eagle", {"d2t": spread, "t2d": known})
    heads = {f"markov_head.markov_w{one}.weight": [VOCAB, _RANK] for one in (1, 2)}
    heads |= {"confidence_head.proj.weight": [1, HIDDEN + _RANK], "confidence_head.proj.bias": [1]}
    write_checkpoint(folder / "dspark", _DSPARK, draft_shapes(_DSPARK, TAPS) | heads)
    owned = load_file(target / "model.safetensors")
    copies = {
        "embed_tokens": owned["model.embed_tokens.weight"],
        "lm_head": owned["lm_head.weight"],
    }
    _add(folder / "dspark", {f"{role}.weight": matrix for role, matrix in copies.items()})


def _add(draft: Path, tensors: dict[str, npt.NDArray[Any]]) -> None:
    """Puts tensors into a draft's file, in place of those of the same names."""
    path = draft / "model.safetensors"
    kept = {**load_file(path), **tensors}
    save_file({name: np.ascontiguousarray(one) for name, one in kept.items()}, path)
