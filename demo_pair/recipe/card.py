"""The demo pair's model card."""

from __future__ import annotations

from pathlib import Path

from demo_pair.recipe.evaluate import DraftMetrics
from demo_pair.recipe.recipe_settings import DraftStage, Stage, TrainingRecipe
from dflash_trt.models.sizes import DecoderSizes

CARD = """\
---
license: apache-2.0
language: en
pipeline_tag: text-generation
---

# dflash-trt demo pair{title}

A very small {style}-style target (`target/`) and its DFlash draft (`draft/`), to show and to test
speculative decoding on a laptop. Neither knows anything: the target continues one family of
generated records, and does that well enough for its text to be read.

| | target | draft |
|---|---|---|
{shapes}
| safetensors, {storage} | {target_bytes:,} bytes | {draft_bytes:,} bytes |

The draft follows the z-lab checkpoint contract (`DFlashDraftModel`): block size
{recipe.block_size}, mask token id 1, features tapped after target layers
{taps}. It has no embedding and no lm_head of its own. {about}

## Remake it

```
pip install 'dflash-trt[train]'
python -m demo_pair.recipe {arguments} --seed {recipe.seed}
```

Step counts are fixed, so the same library versions on the same machine give the same weights;
other machines round differently and give a pair of the same quality. Made with
{versions}.

## Data

Documents generated from the seed (`demo_pair/recipe/corpus.py`): shift logs, parcel routes
and fleet files. A header draws names, tiers, a crew, a city, a load and the first and last id;
the records walk through the header's lists, restate them in forms chosen by the tier, and count
the id up. The load (kept 4 times in 5) and the outcome (ok 88 times in 100) stay random.
Nothing was taken from anywhere, so nothing personal or licensed is inside. `prompts.jsonl` holds
{recipe.prompts} held-out prompts of 48 to 96 tokens, from a stream of documents that training
never draws.

The tokenizer is a byte-level BPE of {recipe.vocab_size} entries trained on the same documents:
all 256 bytes are in it, digits stand alone.

## Training

Muon for matrices, AdamW for embeddings (at {recipe.embedding_rate:g} of the rate) and {others}.

{grown}

{target_stages}

Draft: ModelOpt's DFlash mode with the objective of the paper (arXiv 2602.06036): random anchors
({recipe.draft_anchors} a row), cross-entropy with decay gamma {recipe.draft_loss_gamma:g}.
It learns on corpus documents and on the target's own continuations of their beginnings.

{draft_stages}

## Metrics

Held-out documents; {recipe.prompts} prompts, {recipe.new_tokens} new tokens each; the weights as
committed, computed in float32. Speculation is lossless, so acceptance is read off the target's own
tokens and the draft's block at every position of them. Temperature 1 is one sample a prompt, and
{variation}

| metric | value |
|---|---|
| acceptance length, greedy (1 to {recipe.block_size}, bonus included) | {m.acceptance_greedy:.2f} |
| acceptance length, temperature 1 | {m.acceptance_sampled:.2f} |
| distinct 8-grams of the greedy output, all prompts together | {m.distinct_8grams:.3f} |
| perplexity a token, first 512 tokens (headers are random by design) | {m.perplexity:.3f} |

## Limits

- Positions up to {recipe.max_length} were trained; beyond them both models degrade, the draft
  first.
- Only text in the corpus's forms is continued sensibly. Any UTF-8 text can be encoded, and
  decoding it stays lossless, but the output means nothing and few drafts are accepted.
- There is no chat template: this is a base model.

Licence: Apache-2.0, weights, prompts and recipe.
"""

QWEN3 = {
    "title": "",
    "style": "Qwen3",
    "storage": "bf16",
    "about": """\
Deep and thin against shallow is
deliberate: at this size a step costs what its number of operations costs, so a target with many
layers leaves a draft something to save.""",
    "arguments": "--output demo_pair",
    "others": "norms",
    "grown": """\
Target, grown in depth: a shallow network is trained first, then identity layers are inserted and
all of it is trained on. Its weights were rounded to bf16 before the draft saw them.""",
    "variation": """\
varies: with other prompts and sampling seeds two trainings of this recipe gave 4.4 to 5.3.""",
}

GPT_OSS = {
    "title": ": gpt-oss",
    "style": "gpt-oss",
    "storage": "experts MXFP4, the rest bf16",
    "about": """\
The target has what
gpt-oss has, in small: {experts.experts} experts of which {experts.chosen} are chosen for a
token, attention sinks, a sliding window of {sizes.windows[0]} positions in every second layer,
YaRN from {recipe.yarn_length} to {recipe.max_length} positions, biases, and experts stored in
native MXFP4 (`_blocks` and `_scales`).""",
    "arguments": "--family gpt-oss --output demo_pair/gpt_oss",
    "others": "the rest\n(experts at {recipe.expert_rate:g} of it)",
    "grown": """\
Target: before the last stage its experts were rounded to MXFP4 and frozen, and the rest went on
learning around them. That was rounded to bf16 before the draft saw it.""",
    "variation": "varies.",
}


def _stage(stage: Stage) -> str:
    line = f"- {stage.steps} steps of {stage.rows} rows x {stage.length} tokens at {stage.lr:g}"
    if stage.layers:
        line += f" with {stage.layers} layers"
    if isinstance(stage, DraftStage):
        line += f" from {stage.corpus_rows} corpus, {stage.greedy_rows} greedy and"
        line += f" {stage.sampled_rows} sampled rows"
    return line


def _size_rows(target: DecoderSizes, draft: DecoderSizes) -> str:
    both = (target, draft)
    layers = (target.layer, draft.layer)
    heads = (f"{one.heads} / {one.kv_heads} x {one.head_dim}" for one in layers)
    rows = (
        ["layers x hidden", *(f"{len(one.layers)} x {one.hidden_size}" for one in both)],
        ["heads / kv heads x head size", *heads],
        ["feed-forward", *(str(one.mlp_size) for one in both)],
    )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def write_card(
    recipe: TrainingRecipe, metrics: DraftMetrics, versions: str, directory: Path
) -> None:
    """Write README.md beside `target/` and `draft/`, which must be there."""
    sizes = recipe.target
    words = QWEN3 if sizes.experts is None else GPT_OSS
    card = CARD.format(
        **{
            key: text.format(sizes=sizes, experts=sizes.experts, recipe=recipe)
            for key, text in words.items()
        },
        recipe=recipe,
        m=metrics,
        versions=versions,
        taps=", ".join(map(str, recipe.draft_taps)),
        shapes=_size_rows(recipe.target, recipe.draft),
        target_stages="\n".join(map(_stage, recipe.target_stages)),
        draft_stages="\n".join(map(_stage, recipe.draft_stages)),
        target_bytes=(directory / "target" / "model.safetensors").stat().st_size,
        draft_bytes=(directory / "draft" / "model.safetensors").stat().st_size,
    )
    (directory / "README.md").write_text(card)
