"""The demo pair's model card."""

from __future__ import annotations

from pathlib import Path

from demo_pair.recipe.evaluate import DraftMetrics
from demo_pair.recipe.recipe_settings import DraftStage, Stage, TrainingRecipe

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
