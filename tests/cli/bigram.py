"""A pair whose text is known by heart: the next token depends on the last one only.

Attention and feed-forward outputs are zero, so the logits after token t are the lm_head times
the embedding of t: `NEXT` is a table. Every mask row of the drafter proposes "b". So:

- after "b" comes "abab…", and of every block the first draft is right: two tokens a step;
- after "9" comes "0123…", and no draft is right: one token a step;
- after "x" come "y", "z" and the end of the sequence;
- after byte 0xC3 comes 0xA9 and again 0xC3: "é" in two tokens.

Everything else repeats itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.models.conftest import (
    DRAFT_CONFIG,
    TARGET_CONFIG,
    Arrays,
    draft_shapes,
    merged,
    target_shapes,
)
from tests.text.tokenizers import ALPHABET, make_plain

VOCAB, HIDDEN, TAPS = 300, 64, 3
END, MASK = 256, 299
BLOCK = 8


def token(char: str) -> int:
    """The id of a printable ASCII character, or of the byte it stands for in byte-level BPE."""
    return ALPHABET[char]


NEXT = {index: index for index in range(VOCAB)}
NEXT |= {token("a"): token("b"), token("b"): token("a"), MASK: token("b")}
NEXT |= {token(str(digit)): token(str((digit + 1) % 10)) for digit in range(10)}
NEXT |= {token("x"): token("y"), token("y"): token("z"), token("z"): END}
NEXT |= {token("Ã"): token("©"), token("©"): token("Ã")}

BIGRAM_TARGET = merged(
    TARGET_CONFIG, {"vocab_size": VOCAB, "hidden_size": HIDDEN, "eos_token_id": END}
)
BIGRAM_DRAFT: dict[str, Any] = merged(
    DRAFT_CONFIG,
    {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "block_size": BLOCK,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 2, 3]},
    },
)


def write_bigram_pair(
    folder: Path, *, template: str | None = None, head_dim: int = 8, layers: int = 6
) -> Path:
    """Writes target/, draft/, prompts.jsonl and pair.yaml; returns the YAML's path."""
    target_config = merged(BIGRAM_TARGET, {"head_dim": head_dim, "num_hidden_layers": layers})
    draft_config = merged(BIGRAM_DRAFT, {"head_dim": head_dim, "num_target_layers": layers})
    target = _random_arrays(target_shapes(target_config))
    embedding = target["model.embed_tokens.weight"]
    embedding /= np.linalg.norm(embedding, axis=1, keepdims=True)
    head = np.zeros_like(embedding)
    for index, following in NEXT.items():
        head[following] += 2 * embedding[index]
    target["lm_head.weight"] = head
    _write(folder / "target", target_config, target)
    _write(folder / "draft", draft_config, _random_arrays(draft_shapes(draft_config, TAPS)))
    write_tokenizer(folder / "target", template)
    (folder / "prompts.jsonl").write_text('{"prompt": "cab"}\n{"prompt": "129"}\n')
    config = folder / "pair.yaml"
    config.write_text(
        "description: bigrams\ntarget: {checkpoint: target}\ndraft: {checkpoint: draft}\n"
        "max_batch: 4\nmax_seq_len: 64\nprompts: prompts.jsonl\n"
    )
    return config


def write_tokenizer(folder: Path, template: str | None = None) -> None:
    """A byte-level tokenizer without merges, and a chat template if given."""
    make_plain("<end>").save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<end>"} | ({} if template is None else {"chat_template": template})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _random_arrays(shapes: dict[str, list[int]]) -> Arrays:
    generator = np.random.default_rng(1)
    arrays: Arrays = {}
    for name, shape in shapes.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            arrays[name] = np.zeros(shape, np.float32)
        elif name.endswith("norm.weight"):
            arrays[name] = np.ones(shape, np.float32)
        else:
            arrays[name] = generator.standard_normal(shape).astype(np.float32)
    return arrays


def _write(folder: Path, config: dict[str, Any], arrays: Arrays) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(arrays, folder / "model.safetensors")
