"""What the configs of both families' targets have in common."""

from __future__ import annotations

import math
from typing import Any

from dflash_trt.training.recipe import ExpertShape, Shape, TrainingRecipe
from dflash_trt.training.tokenizer import END_ID


def decoder_fields(
    recipe: TrainingRecipe, shape: Shape | ExpertShape, layers: int
) -> dict[str, Any]:
    """Arguments of a transformers config for a fresh target with `layers` layers of `shape`."""
    return {
        "vocab_size": recipe.vocab_size,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": recipe.max_length,
        "bos_token_id": None,
        "eos_token_id": END_ID,
        "pad_token_id": END_ID,
        "initializer_range": 1 / math.sqrt(shape.hidden),
        "use_cache": False,
    }
