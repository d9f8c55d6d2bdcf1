"""Remakes the demo pair: `python -m demo_pair.recipe --output demo_pair --seed 0`.

`--family gpt-oss` trains a gpt-oss pair of a few layers by the same recipe.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
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
from dflash_trt.errors import DflashError

PROMPT_TOKENS = (48, 96)
RECIPES = {"qwen3": DEMO, "gpt-oss": GPT_OSS}
STEPS_A_LINE = 25


class Printer:
    """Prints the loss and the time left to stderr, every STEPS_A_LINE steps."""

    def __init__(self) -> None:
        self.what, self.started = "", 0.0

    def __call__(self, what: str, done: int, total: int, loss: float) -> None:
        if what != self.what:
            self.what, self.started = what, time.monotonic()
        if done % STEPS_A_LINE and done != total:
            return
        spent = time.monotonic() - self.started
        left = spent / done * (total - done)
        line = f"{what}: {done}/{total}, loss {loss:.3f}, {spent:.0f} s, {left:.0f} s left"
        print(line, file=sys.stderr, flush=True)


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


def measure(recipe: TrainingRecipe, directory: Path) -> DraftMetrics:
    """Evaluate the pair that lies in `directory`, as its files say."""
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory / "target")
    target = load_target(directory / "target")
    draft = load_draft(recipe, target, directory / "draft")
    lines = (directory / "prompts.jsonl").read_text().splitlines()
    prompts = [tokenizer(json.loads(line)["prompt"])["input_ids"] for line in lines]
    rows = range(recipe.prompts, 2 * recipe.prompts)
    held_out = corpus_rows(tokenizer, recipe.seed, HELD_OUT_STREAM, rows, recipe.max_length // 2)
    return evaluate(recipe, target, draft, prompts, held_out)


def library_versions() -> str:
    """The versions that decide the weights, as one phrase."""
    names = ("torch", "transformers", "tokenizers", "nvidia-modelopt")
    return ", ".join(f"{name} {version(name)}" for name in names)


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
    prompts = (json.dumps({"prompt": one}) for one in held_out_prompts(recipe, tokenizer))
    (work / "prompts.jsonl").write_text("".join(f"{line}\n" for line in prompts))
    target = train_target(recipe, tokenizer, progress)
    save_target(target, work / "target")
    export_draft(train_draft(recipe, target, tokenizer, progress), work / "draft")
    metrics = measure(recipe, work)
    write_card(recipe, metrics, library_versions(), work)
    if directory.exists():
        shutil.rmtree(directory)
    for file in work.rglob("*.safetensors"):
        file.chmod(0o644)
    work.rename(directory)
    return metrics


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the process's exit code."""
    parser = argparse.ArgumentParser(prog="python -m demo_pair.recipe", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder to write the pair to")
    parser.add_argument("--seed", type=int, default=DEMO.seed, help="default: %(default)s")
    parser.add_argument("--family", choices=RECIPES, default="qwen3", help="default: %(default)s")
    options = parser.parse_args(arguments)
    recipe = replace(RECIPES[options.family], seed=options.seed)
    try:
        metrics = make_demo_pair(recipe, options.output, Printer())
    except DflashError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(asdict(metrics), indent=2))
    return 0
