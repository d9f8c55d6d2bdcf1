"""The demo pair's draft: ModelOpt's DFlash mode, trained with the paper's objective.

DFlash: Block Diffusion for Flash Speculative Decoding, arXiv 2602.06036. The target is frozen and
rounded. Its tapped features are computed once for each row (ModelOpt's offline mode); anchors are
drawn anew each time the row is used.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from demo_pair.recipe.recipe_settings import DraftStage, LossReport, TrainingRecipe
from demo_pair.recipe.target import Optimizer, continue_rows, corpus_rows, rate
from demo_pair.recipe.tokenizer import MASK_ID

IGNORED = -100
ROWS_AT_ONCE = 64
PROMPT_LENGTHS = (48, 64, 80, 96)


def attach_draft(recipe: TrainingRecipe, target: Qwen3ForCausalLM) -> Any:
    """A ModelOpt DFlash model over a copy of `target`, which itself stays as it is.

    ModelOpt taps one target layer per draft layer; the z-lab contract allows any number, so the
    draft module is rebuilt here with the recipe's taps.
    """
    from modelopt.torch import speculative  # which takes seconds

    sizes = recipe.draft
    # ModelOpt 0.47 inherits neither dimensions nor the rope base from a transformers 5 target, and
    # a rope base that differs from the exported one ruins acceptance.
    options = {
        "dflash_offline": True,
        "dflash_block_size": recipe.block_size,
        "dflash_mask_token_id": MASK_ID,
        "dflash_loss_objective": "decay",
        "dflash_loss_decay_factor": recipe.draft_loss_gamma,
        "dflash_self_logit_distillation": False,
        "dflash_num_anchors": recipe.draft_anchors,
        "dflash_architecture_config": {
            "num_hidden_layers": len(sizes.layers),
            "num_attention_heads": sizes.layer.heads,
            "num_key_value_heads": sizes.layer.kv_heads,
            "head_dim": sizes.layer.head_dim,
            "intermediate_size": sizes.intermediate_size,
            "max_position_embeddings": recipe.max_length,
            "rope_parameters": {"rope_type": "default", "rope_theta": recipe.rope_theta},
            "initializer_range": sizes.hidden_size**-0.5,
        },
    }
    model: Any = copy.deepcopy(target)
    model.config.num_orig_hidden_layers = model.config.num_hidden_layers
    speculative.convert(model, [("dflash", options)])
    taps = list(recipe.draft_taps)
    model.target_layer_ids = taps
    model.dflash_config.target_layer_ids = taps
    model.dflash_module = model._build_draft_module(model.dflash_config)
    # ModelOpt 0.47 builds this lazily with an argument that transformers 5.23 no longer takes.
    model.dflash_module.rotary_emb = Qwen3RotaryEmbedding(config=model.dflash_config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.startswith("dflash_module.")
        if parameter.requires_grad and name.endswith(("q_norm.weight", "k_norm.weight")):
            # With small heads, a start at 1 keeps attention near flat.
            torch.nn.init.constant_(parameter, recipe.qk_norm_start)
    return model


def training_rows(
    recipe: TrainingRecipe,
    target: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    stage: DraftStage,
    progress: LossReport,
) -> tuple[Tensor, Tensor, Tensor]:
    """Corpus rows and the target's own greedy and sampled continuations [rows, length], labels that
    are -100 over the prompt, and features [rows, length, taps * hidden] in bfloat16."""
    kinds = (
        ("corpus", stage.corpus_rows, None),
        ("greedy", stage.greedy_rows, 0.0),
        ("sampled", stage.sampled_rows, 1.0),
    )
    length = stage.length
    ids, labels, features = [], [], []
    for kind, count, temperature in kinds:
        for first in range(0, count, ROWS_AT_ONCE):
            rows = range(first, min(first + ROWS_AT_ONCE, count))
            some = corpus_rows(tokenizer, recipe.seed, f"draft-{kind}", rows, length)
            prompt = PROMPT_LENGTHS[first // ROWS_AT_ONCE % len(PROMPT_LENGTHS)]
            if temperature is not None:
                begun, seed = some[:, :prompt].tolist(), recipe.seed + first
                some = torch.tensor(
                    continue_rows(
                        target, begun, length - prompt, temperature=temperature, seed=seed
                    )
                )
            ids.append(some)
            labels.append(some.clone())
            labels[-1][:, :prompt] = IGNORED
            for part in torch.split(some, 8):
                with torch.no_grad():
                    states = target.model(input_ids=part, output_hidden_states=True).hidden_states
                tapped = torch.cat([states[tap + 1] for tap in recipe.draft_taps], dim=-1)
                features.append(tapped.bfloat16())
            progress(f"{kind} rows of {length}", rows[-1] + 1, count, 0.0)
    return torch.cat(ids), torch.cat(labels), torch.cat(features)


def train_draft(
    recipe: TrainingRecipe,
    target: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    progress: LossReport,
) -> Any:
    """A ModelOpt DFlash model whose draft is trained for `target`."""
    torch.manual_seed(recipe.seed)
    model = attach_draft(recipe, target)
    generator = torch.Generator().manual_seed(recipe.seed)
    for number, stage in enumerate(recipe.draft_stages):
        ids, labels, stored = training_rows(recipe, target, tokenizer, stage, progress)
        optimizer = Optimizer(recipe, model)
        model.train()
        order = torch.empty(0, dtype=torch.int64)
        for step in range(stage.steps):
            if len(order) < stage.rows:
                order = torch.randperm(len(ids), generator=generator)
            some, order = order[: stage.rows], order[stage.rows :]
            features = stored[some].float()
            outputs = {"aux_hidden_states": features, "base_model_hidden_states": features}
            loss = model(
                input_ids=ids[some], labels=labels[some], base_model_outputs=outputs
            ).loss  # at anchors drawn now
            optimizer.step(loss, rate(stage, step))
            progress(f"draft stage {number + 1}", step + 1, stage.steps, loss.item())
    return model


def export_draft(model: Any, directory: Path) -> None:
    """Write config.json and bf16 model.safetensors in the z-lab contract."""
    from modelopt.torch import export

    export.export_speculative_decoding(model, torch.bfloat16, directory)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    assert config["rope_theta"] == model.dflash_config.rope_parameters["rope_theta"]
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
