"""What the configs of both families' targets have in common."""

from __future__ import annotations

import math
from typing import Any

from dflash_trt.checkpoints.sizes import DecoderSizes
from dflash_trt.training.recipe import TrainingRecipe
from dflash_trt.training.tokenizer import END_ID


def decoder_fields(recipe: TrainingRecipe, sizes: DecoderSizes, layers: int) -> dict[str, Any]:
    """Arguments of a transformers config for a fresh target with `layers` layers of `sizes`."""
    return {
        "vocab_size": recipe.vocab_size,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.mlp_size,
        "num_hidden_layers": layers,
        "num_attention_heads": sizes.layer.heads,
        "num_key_value_heads": sizes.layer.kv_heads,
        "head_dim": sizes.layer.head_dim,
        "max_position_embeddings": recipe.max_length,
        "bos_token_id": None,
        "eos_token_id": END_ID,
        "pad_token_id": END_ID,
        "initializer_range": 1 / math.sqrt(sizes.hidden_size),
        "use_cache": False,
    }
