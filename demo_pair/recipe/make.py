"""Remakes the demo pair: `python -m demo_pair.recipe --output demo_pair --seed 0`.

`--family gpt-oss` trains a gpt-oss pair of a few layers by the same recipe.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from demo_pair.recipe.card import write_card
from demo_pair.recipe.corpus import HELD_OUT_STREAM, TRAIN_STREAM, documents
from demo_pair.recipe.draft import export_draft, load_draft, train_draft
from demo_pair.recipe.evaluate import DraftMetrics, evaluate
from demo_pair.recipe.gpt_oss import save_gpt_oss
from demo_pair.recipe.recipe_settings import DEMO, GPT_OSS, LossReport, TrainingRecipe
from demo_pair.recipe.target import corpus_rows, train_target
from demo_pair.recipe.tokenizer import END_ID, save_tokenizer, train_tokenizer

PROMPT_TOKENS = (48, 96)
RECIPES = {"qwen3": DEMO, "gpt-oss": GPT_OSS}
STEPS_A_LINE = 25


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
