"""The demo pair's target: a deep and thin Qwen3 trained on the corpus, then rounded to bf16.

The draft learns from its continuations and is measured on them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from demo_pair.recipe.corpus import TRAIN_STREAM, document
from demo_pair.recipe.gpt_oss import build_gpt_oss, round_experts
from demo_pair.recipe.recipe_settings import LossReport, Stage, TrainingRecipe
from demo_pair.recipe.tokenizer import END_ID


def build_target(recipe: TrainingRecipe, layers: int) -> Qwen3ForCausalLM:
    """A fresh target with `layers` layers; residual outputs start small, as depth asks."""
    if recipe.target.experts is not None:
        expert_model: Qwen3ForCausalLM = build_gpt_oss(recipe, layers)
        return expert_model
    config = transformers.Qwen3Config(
        **recipe.target_fields(layers),
        rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
        tie_word_embeddings=True,
    )
    model: Qwen3ForCausalLM = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(1 / math.sqrt(2 * layers))
            layer.mlp.down_proj.weight.mul_(1 / math.sqrt(2 * layers))
            layer.self_attn.q_norm.weight.fill_(recipe.qk_norm_start)
            layer.self_attn.k_norm.weight.fill_(recipe.qk_norm_start)
    return model


def deepen(recipe: TrainingRecipe, model: Qwen3ForCausalLM, layers: int) -> Qwen3ForCausalLM:
    """The same function with `layers` layers: copies whose outputs are zeroed, spread evenly."""
    deep = build_target(recipe, layers)
    old = model.model.layers
    ratio = layers / len(old)
    source = [int(i / ratio) for i in range(layers)]
    with torch.no_grad():
        deep.model.embed_tokens.load_state_dict(model.model.embed_tokens.state_dict())
        deep.model.norm.load_state_dict(model.model.norm.state_dict())
        for i, layer in enumerate(deep.model.layers):
            layer.load_state_dict(old[source[i]].state_dict())
            if i > 0 and source[i] == source[i - 1]:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
    return deep


def corpus_rows(
    tokenizer: PreTrainedTokenizerFast, seed: int, stream: str, rows: range, length: int
) -> Tensor:
    """Rows of documents, joined by the end token, as int64 ids [len(rows), length]."""
    found = []
    for index in rows:
        ids: list[int] = []
        for part in count():
            if len(ids) >= length:
                break
            text = document(seed, f"{stream}/{part}", index)
            ids += [*tokenizer(text)["input_ids"], END_ID]
        found.append(ids[:length])
    return torch.tensor(found)


def rate(stage: Stage, step: int) -> float:
    """The learning rate of `step`: linear warm-up, then linear decay to `lr * floor`."""
    if step < stage.warmup:
        return stage.lr * (step + 1) / stage.warmup
    left = (stage.steps - step) / max(stage.steps - stage.warmup, 1)
    return stage.lr * (stage.floor + (1 - stage.floor) * left)


class Optimizer:
    """Muon for the hidden matrices, AdamW for embeddings, experts, routers and norms.

    The embeddings learn `recipe.embedding_rate` times slower. Before the network can copy, names
    of one kind look alike to the loss; at the full rate it pulls their embeddings into one point,
    after which nothing is left to copy by.
    """

    def __init__(self, recipe: TrainingRecipe, model: Any) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        kinds: dict[str, list[Any]] = {"matrix": [], "embedding": [], "experts": [], "other": []}
        for name, parameter in named:
            kinds[_kind(name, parameter.ndim)].append(parameter)
        slow: dict[str, Any] = {"params": kinds["embedding"], "scale": recipe.embedding_rate}
        experts: dict[str, Any] = {"params": kinds["experts"], "scale": recipe.expert_rate}
        self.weights = [p for _, p in named]
        self.clip = recipe.clip
        self.parts = [
            torch.optim.Muon(
                kinds["matrix"], weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(
                [{"params": kinds["other"]}, *(one for one in (slow, experts) if one["params"])],
                betas=(0.9, 0.95),
                weight_decay=0.0,
            ),
        ]

    def step(self, loss: Tensor, lr: float) -> None:
        """Back-propagate `loss`, clip, update at `lr`, clear the gradients."""
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.weights, self.clip)
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr * group.get("scale", 1.0)
            part.step()
            part.zero_grad()


def _kind(name: str, dimensions: int) -> str:
    """How a parameter is trained; experts are stacked, which Muon does not take."""
    if "embed" in name or "lm_head" in name:
        return "embedding"
    if dimensions > 2:
        return "experts"
    if dimensions == 2 and name.endswith(".weight") and "router" not in name:
        return "matrix"
    return "other"


def train_target(
    recipe: TrainingRecipe, tokenizer: PreTrainedTokenizerFast, progress: LossReport
) -> Qwen3ForCausalLM:
    """The trained target, weights rounded to bf16 values and held in float32."""
    torch.manual_seed(recipe.seed)
    model = build_target(recipe, recipe.target_stages[0].layers or len(recipe.target.layers))
    row = 0
    for number, stage in enumerate(recipe.target_stages):
        if stage.layers and stage.layers != model.config.num_hidden_layers:
            model = deepen(recipe, model, stage.layers)
        if stage.round_experts:
            round_experts(model)
        optimizer = Optimizer(recipe, model)
        model.train()
        for step in range(stage.steps):
            rows = range(row, row + stage.rows)
            row += stage.rows
            ids = corpus_rows(tokenizer, recipe.seed, TRAIN_STREAM, rows, stage.length)
            loss = model(input_ids=ids, labels=ids).loss
            optimizer.step(loss, rate(stage, step))
            progress(f"target stage {number + 1}", step + 1, stage.steps, loss.item())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16).to(parameter.dtype))
    model.train(False)
    return model


def continue_rows(
    target: Qwen3ForCausalLM,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[list[int]]:
    """Each prompt with `new_tokens` of the target's own tokens after it.

    Rows of unequal prompts run together: a row that is still inside its prompt is fed the
    prompt's next token instead of the chosen one. The end token does not stop a row.

    Args:
        temperature: 0 takes the likeliest token, else the softmax of logits / temperature.
    """
    cache_type = transformers.StaticCache
    generator = torch.Generator().manual_seed(seed)
    rows = [list(prompt) for prompt in prompts]
    lengths = [len(prompt) + new_tokens for prompt in prompts]
    start, end = min(map(len, rows)), max(lengths)
    cache = cache_type(config=target.config, max_cache_len=end)
    fed = torch.tensor([row[:start] for row in rows])
    out = [row[:start] for row in rows]
    with torch.no_grad():
        for position in range(start, end):
            logits = target(
                input_ids=fed, past_key_values=cache, use_cache=True, logits_to_keep=1
            ).logits[:, -1]
            if temperature > 0:
                weights = (logits / temperature).softmax(dim=-1)
                chosen = torch.multinomial(weights, 1, generator=generator)[:, 0].tolist()
            else:
                chosen = logits.argmax(dim=-1).tolist()
            for row, done, token in zip(rows, out, chosen, strict=True):
                done.append(row[position] if position < len(row) else token)
            fed = torch.tensor([[done[-1]] for done in out])
    return [done[:length] for done, length in zip(out, lengths, strict=True)]
