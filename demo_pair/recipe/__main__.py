"""Remakes the demo pair: `python -m demo_pair.recipe --output demo_pair --seed 0`.

`--family gpt-oss` trains a gpt-oss pair of a few layers by the same recipe. `dflash-trt build` and
`verify` measure what came of it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from demo_pair.recipe.corpus import HELD_OUT_STREAM, TRAIN_STREAM, documents
from demo_pair.recipe.draft import export_draft, train_draft
from demo_pair.recipe.gpt_oss import save_gpt_oss
from demo_pair.recipe.recipe_settings import DEMO, GPT_OSS, LossReport, TrainingRecipe
from demo_pair.recipe.target import train_target
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


def make_demo_pair(recipe: TrainingRecipe, directory: Path, progress: LossReport) -> None:
    """Trains the pair; replaces target/, draft/ and prompts.jsonl of `directory` when all are."""
    torch.set_num_threads(recipe.threads)
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    work = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(work, ignore_errors=True)
    (work / "draft").mkdir(parents=True)
    texts = documents(recipe.seed, TRAIN_STREAM, recipe.tokenizer_documents)
    trained = train_tokenizer(texts, recipe.vocab_size)
    tokenizer = save_tokenizer(trained, work / "target", recipe.max_length)
    lines = (json.dumps({"prompt": one}) for one in held_out_prompts(recipe, tokenizer))
    (work / "prompts.jsonl").write_text("".join(f"{line}\n" for line in lines))
    target = train_target(recipe, tokenizer, progress)
    save_target(target, work / "target")
    export_draft(train_draft(recipe, target, tokenizer, progress), work / "draft")
    for file in work.rglob("*.safetensors"):
        file.chmod(0o644)
    directory.mkdir(parents=True, exist_ok=True)
    for part in work.iterdir():
        shutil.rmtree(directory / part.name, ignore_errors=True)
        part.rename(directory / part.name)
    work.rmdir()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m demo_pair.recipe", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder to write the pair to")
    parser.add_argument("--seed", type=int, default=DEMO.seed, help="default: %(default)s")
    parser.add_argument("--family", choices=RECIPES, default="qwen3", help="default: %(default)s")
    options = parser.parse_args()
    make_demo_pair(replace(RECIPES[options.family], seed=options.seed), options.output, show)


if __name__ == "__main__":
    main()
