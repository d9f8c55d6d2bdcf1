"""What a training knows before it writes anything: all that can be refused is refused here."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

from dflash_trt.core.files import file_sha256, resolved
from dflash_trt.core.publish import StagedKind, check_destination
from dflash_trt.errors import DflashError, import_extra
from dflash_trt.models.folder import open_checkpoint
from dflash_trt.quantization.rewrite import checkpoint_key
from dflash_trt.training.draft_shape import DraftDesign
from dflash_trt.training.endpoint import AnswerOptions
from dflash_trt.training.recipe import choose_settings, choose_shape, with_own_layer
from dflash_trt.training.rows import LEAST_ANSWER, PromptRenderer, SplitRows, read_sets, split_rows
from dflash_trt.training.target import TrainingTarget, find_target
from dflash_trt.training.trainer import TrainerSettings
from dflash_trt.training.training_request import TrainRequest
from dflash_trt.training.work_folder import work_folder

VERSION = 5
"""Of what stages write: work of another version is not gone on with."""

RECORD_NAME = "training.json"
TRAINED = StagedKind("draft that was trained here", RECORD_NAME)
"""The file by which a draft that was trained here is known, and replaced."""


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """A training that could begin.

    Args:
        settings: all but the number of steps, which is 0.
        hashes: SHA-256 of every set of prompts, of tokenizer.json and of the template.
        max_length: most tokens of a row.
        device: what trains, as PyTorch calls it.
    """

    request: TrainRequest
    target: TrainingTarget
    renderer: PromptRenderer
    shape: DraftDesign
    settings: TrainerSettings
    rows: SplitRows
    hashes: dict[str, str | None]
    max_length: int
    device: str

    @property
    def answers(self) -> AnswerOptions:
        asked = self.request
        return AnswerOptions(asked.answer_tokens, self.max_length, asked.temperature, asked.seed)

    @property
    def work(self) -> Path:
        return self.request.work or work_folder(resolved(self.request.output))

    @property
    def bundle(self) -> Path:
        """Where the pair's bundle goes."""
        return _bundle_beside(self.request.output)

    def answer_parts(self) -> dict[str, Any]:
        """What the answers depend on: the target, the rendered prompts, and how they are asked."""
        request = self.request
        return {
            "version": VERSION,
            "target": checkpoint_key(self.target.spec.checkpoint),
            "kv_dtype": self.target.cache_dtype.value,
            **asdict(self.answers),
            "hashes": self.hashes,
            "system_prompt": request.system_prompt,
            "variables": self.renderer.variables,
            "raw": request.raw,
            "given_answers": request.given_answers,
            "endpoint": [request.url, request.endpoint_model],
        }

    def training_parts(self) -> dict[str, Any]:
        """What the draft becomes depends on."""
        request = self.request
        start = request.start
        return {
            **self.answer_parts(),
            "shape": self.shape.config(),
            "start": None if start is None else checkpoint_key(open_checkpoint(start)),
            "settings": asdict(self.settings),
            "threads": request.threads,
            "device": self.device,
            "hours": request.hours,
            "rows": request.rows,
            "steps": request.steps,
            "online": request.online,
        }


def prepare(request: TrainRequest) -> Preparation:
    """Reads and checks everything that was asked for; nothing is written.

    Raises:
        DflashError: one line about what does not go.
    """
    if not 0 < request.hours <= 10_000:
        raise DflashError(f"{request.hours:g} is no time", where="--hours", usage=True)
    _check_apart(request)
    is_cpu = not import_extra("torch", "train", "training").cuda.is_available()
    target = find_target(request.target)
    request = with_own_layer(request, target)
    prompts, hashes = read_sets(request.prompts)
    held_out, held_out_hashes = read_sets(request.held_out)
    rows = split_rows(prompts, held_out or None)
    if request.given_answers:
        _check_given(rows, target.spec.vocab_size)
    shape = choose_shape(request, target, is_cpu=is_cpu)
    positions = min(target.spec.max_position_embeddings, shape.max_position_embeddings)
    max_length = min(request.max_length, positions)
    if max_length < LEAST_ANSWER + shape.block_size:
        what = f"{max_length} tokens hold no prompt, answer and block"
        raise DflashError(what, where="--set max-length", usage=True)
    renderer = PromptRenderer(
        target.open_tokenizer(),
        request,
        target.template_options,
        target.spec.eos_token_ids,
        max_length,
    )
    return Preparation(
        request=request,
        target=target,
        renderer=renderer,
        shape=shape,
        settings=choose_settings(request, shape, is_cpu=is_cpu),
        rows=rows,
        hashes={
            **{f"prompts {name}": sha256 for name, sha256 in hashes.items()},
            **{f"held-out prompts {name}": sha256 for name, sha256 in held_out_hashes.items()},
            "tokenizer.json": file_sha256(target.tokenizer_folder / "tokenizer.json"),
            "chat template": renderer.template_sha256,
        },
        max_length=max_length,
        device="cpu" if is_cpu else "cuda",
    )


def _check_apart(request: TrainRequest) -> None:
    """Raises DflashError (usage) for folders of which one would be written over another."""
    output = resolved(request.output)
    folders = {
        "--output": output,
        "the bundle": _bundle_beside(output),
        "--set work": resolved(request.work or work_folder(output)),
    }
    for (one, inner), (other, outer) in permutations(folders.items(), 2):
        if outer in (inner, *inner.parents):
            what = f"{inner} is, or lies in, the folder of {other}"
            raise DflashError(what, where=one, fix="keep the three apart", usage=True)


def _check_given(rows: SplitRows, vocab_size: int) -> None:
    """Raises DflashError (usage) where an answer is missing, or cannot be the target's."""
    if not any(row.answer is not None for row in rows.train):
        what = 'no prompt has an "answer"'
        raise DflashError(what, where="--given-answers", fix="leave it out", usage=True)
    for row in (*rows.train, *rows.held_out):
        if isinstance(row.answer, tuple) and max(row.answer) >= vocab_size:
            what = f"its answer's token id {max(row.answer)} is outside the vocabulary"
            raise DflashError(f"{what} of {vocab_size:,}", where=row.where, usage=True)


def _bundle_beside(output: Path) -> Path:
    return output.with_name(f"{output.name}-bundle")


def check_outputs(preparation: Preparation) -> None:
    """Raises DflashError (usage) when the draft or its bundle could not be put where they go."""
    request = preparation.request
    output = resolved(request.output)
    check_destination(output, overwrite=request.overwrite, kind=TRAINED)
    check_destination(resolved(preparation.bundle), overwrite=request.overwrite)
    for other in (preparation.target.folder, request.start):
        if other is not None and resolved(other) in (output, *output.parents):
            what = f"lies in {other}"
            raise DflashError(what, where=output, fix="choose another -o", usage=True)
