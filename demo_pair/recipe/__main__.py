"""Remakes the demo pair: `python -m demo_pair.recipe --output demo_pair --seed 0`.

`--family gpt-oss` trains a gpt-oss pair of a few layers by the same recipe. Acceptance is measured
without the speculative loop. That is lossless, so the tokens are the target's own, greedy or
sampled, and the draft's block at every position says how the loop would walk over them
(arXiv 2602.06036; a sampled token is accepted if it equals the draft's).
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import takewhile
from operator import eq
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from demo_pair.recipe.corpus import HELD_OUT_STREAM, TRAIN_STREAM, documents
from demo_pair.recipe.draft import export_draft, load_draft, tapped_features, train_draft
from demo_pair.recipe.gpt_oss import save_gpt_oss
from demo_pair.recipe.recipe_settings import (
    DEMO,
    GPT_OSS,
    DraftStage,
    LossReport,
    Stage,
    TrainingRecipe,
)
from demo_pair.recipe.target import continue_rows, corpus_rows, train_target
from demo_pair.recipe.tokenizer import END_ID, save_tokenizer, train_tokenizer

PROMPT_TOKENS = (48, 96)
RECIPES = {"qwen3": DEMO, "gpt-oss": GPT_OSS}
STEPS_A_LINE = 25
ANCHORS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class DraftMetrics:
    """The demo pair's figures on held-out documents.

    Args:
        perplexity: exp of the mean cross-entropy a token, whole documents, header included.
        distinct_8grams: different ÷ all 8-grams of the greedy output of all prompts together.
        acceptance_greedy: tokens per verify step, bonus included, 1 to the block size.
        acceptance_sampled: the same at temperature 1.
    """

    perplexity: float
    distinct_8grams: float
    acceptance_greedy: float
    acceptance_sampled: float


def drafts_everywhere(recipe: TrainingRecipe, model: Any, ids: Tensor, features: Tensor) -> Tensor:
    """The draft's tokens for a block at every position: [rows, length, block - 1] int64.

    Entry [b, n] is drafted from the anchor ids[b, n] and the features of positions below n.
    """
    rows, length = ids.shape
    chunks = []
    model.dflash_module.eval()
    with torch.no_grad():
        for first in range(0, length, ANCHORS_AT_ONCE):
            positions = torch.arange(first, min(first + ANCHORS_AT_ONCE, length))
            context = features[:, : positions[-1]]
            anchors, blocks, seen = positions.expand(rows, -1), len(positions), context.shape[1]
            keep = torch.ones_like(anchors, dtype=torch.bool)
            hidden = model.dflash_module(
                noise_embedding=model._build_noise_embedding(ids, anchors, keep, blocks),
                target_hidden=context,
                position_ids=model._build_position_ids(seen, anchors, ids.device),
                attention_mask=model._build_draft_attention_mask(
                    seen, anchors, keep, blocks, features.dtype, ids.device
                ),
            )
            tokens = model.lm_head(hidden).argmax(dim=-1)
            chunks.append(tokens.view(rows, blocks, recipe.block_size)[:, :, 1:])
    drafts: Tensor = torch.cat(chunks, dim=1)
    return drafts


def accepted_lengths(row: Sequence[int], drafts: Sequence[Sequence[int]], first: int) -> list[int]:
    """Tokens emitted by each verify step when decoding `row` from its anchor at `first`.

    `drafts` are the blocks drafted from each anchor. Steps whose block lies inside `row` count.
    """
    steps: list[int] = []
    anchor, size = first, len(drafts[0])
    while anchor + size < len(row):
        matches = map(eq, drafts[anchor], row[anchor + 1 : anchor + 1 + size])
        steps.append(1 + sum(takewhile(bool, matches)))
        anchor += steps[-1]
    return steps


def acceptance(
    recipe: TrainingRecipe,
    target: Qwen3ForCausalLM,
    draft: Any,
    prompts: Sequence[Sequence[int]],
    rows: Sequence[Sequence[int]],
) -> float:
    """Mean tokens per verify step over all rows (each: a prompt and the target's tokens)."""
    steps: list[int] = []
    for first in range(0, len(rows), 8):
        some = rows[first : first + 8]
        longest = max(map(len, some))
        ids = torch.tensor([[*row, *[END_ID] * (longest - len(row))] for row in some])
        features = tapped_features(recipe, target, ids)
        drafts = drafts_everywhere(recipe, draft, ids, features).tolist()
        for prompt, row, blocks in zip(prompts[first : first + 8], some, drafts, strict=True):
            steps += accepted_lengths(row, blocks, len(prompt))
    return sum(steps) / len(steps)


def evaluate(
    recipe: TrainingRecipe,
    target: Qwen3ForCausalLM,
    draft: Any,
    prompts: Sequence[Sequence[int]],
    held_out: Tensor,
) -> DraftMetrics:
    """The pair's metrics on held-out prompts and on held-out rows [rows, length]."""
    greedy = continue_rows(target, prompts, recipe.new_tokens)
    sampled = continue_rows(target, prompts, recipe.new_tokens, temperature=1.0, seed=recipe.seed)
    outputs = [row[len(prompt) :] for prompt, row in zip(prompts, greedy, strict=True)]
    grams = [tuple(row[i : i + 8]) for row in outputs for i in range(len(row) - 7)]
    with torch.no_grad():
        losses = [float(target(input_ids=r, labels=r).loss) for r in torch.split(held_out, 4)]
    return DraftMetrics(
        perplexity=math.exp(sum(losses) / len(losses)),
        distinct_8grams=len(set(grams)) / len(grams),
        acceptance_greedy=acceptance(recipe, target, draft, prompts, greedy),
        acceptance_sampled=acceptance(recipe, target, draft, prompts, sampled),
    )


CARD = """\
---
license: apache-2.0
language: en
pipeline_tag: text-generation
---

# dflash-trt demo pair: {family}

A very small {family} target (`target/`) and its DFlash draft (`draft/`), to show and to test
speculative decoding on a laptop. Neither knows anything: the target continues one family of
generated records, and does that well enough for its text to be read.

| | layers x hidden | heads / kv heads x head size | feed-forward | bytes |
|---|---|---|---|---|
{shapes}

The draft follows the z-lab checkpoint contract (`DFlashDraftModel`): block size
{recipe.block_size}, mask token id 1, features tapped after target layers {taps}. It has no
embedding and no lm_head of its own. Weights are bf16, experts native MXFP4.

## Remake it

```
pip install 'dflash-trt[train]'
python -m demo_pair.recipe --family {family} --seed {recipe.seed} --output DIR
```

Step counts are fixed, so the same library versions on the same machine give the same weights;
other machines round differently and give a pair of the same quality. Made with {versions}.

## Data and training

Documents generated from the seed (`demo_pair/recipe/corpus.py`): shift logs, parcel routes and
fleet files. Nothing was taken from anywhere, so nothing personal or licensed is inside.
`prompts.jsonl` holds {recipe.prompts} held-out prompts of 48 to 96 tokens. The tokenizer is a
byte-level BPE of {recipe.vocab_size} entries trained on the same documents.

Muon for matrices, AdamW for the rest. The target grows in depth, and is rounded (experts to MXFP4,
the rest to bf16) before the draft sees it:

{target_stages}

The draft is ModelOpt's DFlash mode with the objective of the paper (arXiv 2602.06036), on corpus
documents and on the target's own continuations of their beginnings:

{draft_stages}

## Metrics

On the prompts, {recipe.new_tokens} new tokens each, read off the target's own tokens and the
draft's block at every position of them; the weights as committed, computed in float32.

| metric | value |
|---|---|
| acceptance length, greedy (1 to {recipe.block_size}, bonus included) | {m.acceptance_greedy:.2f} |
| acceptance length, temperature 1 | {m.acceptance_sampled:.2f} |
| distinct 8-grams of the greedy output, all prompts together | {m.distinct_8grams:.3f} |
| perplexity a token, first 512 tokens (headers are random by design) | {m.perplexity:.3f} |

Positions up to {recipe.max_length} were trained. Only text in the corpus's forms is continued
sensibly. There is no chat template. Licence: Apache-2.0, weights, prompts and recipe.
"""


def _stage(stage: Stage) -> str:
    line = f"- {stage.steps} steps of {stage.rows} rows x {stage.length} tokens at {stage.lr:g}"
    if stage.layers:
        line += f" with {stage.layers} layers"
    if isinstance(stage, DraftStage):
        line += f" from {stage.corpus_rows} corpus, {stage.greedy_rows} greedy and"
        line += f" {stage.sampled_rows} sampled rows"
    return line


def write_card(
    recipe: TrainingRecipe, metrics: DraftMetrics, versions: str, directory: Path
) -> None:
    """Write README.md beside `target/` and `draft/`, which must be there."""
    shapes = []
    for name, sizes in (("target", recipe.target), ("draft", recipe.draft)):
        layer, file = sizes.layer, directory / name / "model.safetensors"
        shapes.append(
            f"| {name} | {len(sizes.layers)} x {sizes.hidden_size} | {layer.heads} / "
            f"{layer.kv_heads} x {layer.head_dim} | {sizes.mlp_size} | {file.stat().st_size:,} |"
        )
    card = CARD.format(
        family="qwen3" if recipe.target.experts is None else "gpt-oss",
        recipe=recipe,
        m=metrics,
        versions=versions,
        taps=", ".join(map(str, recipe.draft_taps)),
        shapes="\n".join(shapes),
        target_stages="\n".join(map(_stage, recipe.target_stages)),
        draft_stages="\n".join(map(_stage, recipe.draft_stages)),
    )
    (directory / "README.md").write_text(card)


def show(what: str, done: int, total: int, loss: float) -> None:
    """Prints the loss to stderr, every STEPS_A_LINE steps."""
    if done % STEPS_A_LINE == 0 or done == total:
        print(f"{what}: {done}/{total}, loss {loss:.3f}", file=sys.stderr, flush=True)


def held_out_prompts(recipe: TrainingRecipe, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """`recipe.prompts` beginnings of held-out documents, 48 to 96 tokens each."""
    prompts = []
    for index, text in enumerate(documents(recipe.seed, HELD_OUT_STREAM, recipe.prompts)):
        length = Random(f"{recipe.seed}/prompt/{index}").randint(*PROMPT_TOKENS)
        prompts.append(str(tokenizer.decode(tokenizer(text)["input_ids"][:length])))
    return prompts


def save_target(target: Qwen3ForCausalLM, directory: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors: bf16, experts MXFP4."""
    generation = {"eos_token_id": END_ID, "pad_token_id": END_ID, "do_sample": False}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    if target.config.model_type == "gpt_oss":
        save_gpt_oss(target, directory)
        return
    saved: Any = type(target)(target.config)
    saved.to(torch.bfloat16)
    saved.load_state_dict(target.state_dict())
    saved.config.use_cache = True
    saved.config.architectures = ["Qwen3ForCausalLM"]
    saved.save_pretrained(directory)


def load_target(directory: Path) -> Qwen3ForCausalLM:
    """The target in `directory`, in float32."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    # transformers decodes MXFP4 experts to bf16, which holds them exactly.
    target: Qwen3ForCausalLM = model.float().train(False)
    return target


def make_demo_pair(recipe: TrainingRecipe, directory: Path, progress: LossReport) -> DraftMetrics:
    """Train the pair, write `directory` in one move, and return its metrics.

    An existing directory is replaced only when the new one is complete.
    """
    torch.set_num_threads(recipe.threads)
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    work = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(work, ignore_errors=True)
    (work / "draft").mkdir(parents=True)
    texts = documents(recipe.seed, TRAIN_STREAM, recipe.tokenizer_documents)
    trained = train_tokenizer(texts, recipe.vocab_size)
    tokenizer = save_tokenizer(trained, work / "target", recipe.max_length)
    prompts = held_out_prompts(recipe, tokenizer)
    lines = (json.dumps({"prompt": one}) for one in prompts)
    (work / "prompts.jsonl").write_text("".join(f"{line}\n" for line in lines))
    target = train_target(recipe, tokenizer, progress)
    save_target(target, work / "target")
    export_draft(train_draft(recipe, target, tokenizer, progress), work / "draft")
    # The pair as its files say it.
    saved = load_target(work / "target")
    draft = load_draft(recipe, saved, work / "draft")
    rows, length = range(recipe.prompts, 2 * recipe.prompts), recipe.max_length // 2
    held_out = corpus_rows(tokenizer, recipe.seed, HELD_OUT_STREAM, rows, length)
    ids = [tokenizer(one)["input_ids"] for one in prompts]
    metrics = evaluate(recipe, saved, draft, ids, held_out)
    names = ("torch", "transformers", "tokenizers", "nvidia-modelopt")
    write_card(recipe, metrics, ", ".join(f"{name} {version(name)}" for name in names), work)
    if directory.exists():
        shutil.rmtree(directory)
    for file in work.rglob("*.safetensors"):
        file.chmod(0o644)
    work.rename(directory)
    return metrics


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m demo_pair.recipe", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder to write the pair to")
    parser.add_argument("--seed", type=int, default=DEMO.seed, help="default: %(default)s")
    parser.add_argument("--family", choices=RECIPES, default="qwen3", help="default: %(default)s")
    options = parser.parse_args()
    recipe = replace(RECIPES[options.family], seed=options.seed)
    metrics = make_demo_pair(recipe, options.output, show)
    print(json.dumps(asdict(metrics), indent=2))


if __name__ == "__main__":
    main()
