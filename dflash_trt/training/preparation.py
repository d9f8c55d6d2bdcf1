"""What a training knows before it writes anything: all that can be refused is refused here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

from dflash_trt.core.files import FileKind, file_sha256, read_text, resolved
from dflash_trt.core.publish import StagedKind, check_destination
from dflash_trt.errors import DflashError, import_extra, refuse_options
from dflash_trt.models.folder import open_checkpoint
from dflash_trt.quantization.rewrite import checkpoint_key
from dflash_trt.training.draft_shape import DraftDesign
from dflash_trt.training.endpoint import AnswerOptions
from dflash_trt.training.prompt_sets import OWN, TrainingSet, parse_sets
from dflash_trt.training.recipe import choose_settings, choose_shape, with_own_layer
from dflash_trt.training.rows import (
    LEAST_ANSWER,
    PromptRenderer,
    PromptRow,
    SplitRows,
    read_sets,
    split_rows,
)
from dflash_trt.training.target import TrainingTarget, find_target
from dflash_trt.training.trainer import TrainerSettings
from dflash_trt.training.training_request import TrainRequest
from dflash_trt.training.work_folder import work_folder

VERSION = 6
"""Of what stages write: work of another version is not gone on with."""

RECORD_NAME = "training.json"
TRAINED = StagedKind("draft that was trained here", RECORD_NAME)
"""The file by which a draft that was trained here is known, and replaced."""


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """A training that could begin.

    Args:
        settings: all but the number of steps, which is 0.
        sets: of prompts to train on, with the one that the target is to write.
        given, held_out: rows of the sets that are read.
        topics: system prompts under which users' words are written.
        hashes: SHA-256 of every set of prompts, of tokenizer.json and of the template.
        max_length: most tokens of a row.
        device: what trains, as PyTorch calls it.
    """

    request: TrainRequest
    target: TrainingTarget
    renderer: PromptRenderer
    shape: DraftDesign
    settings: TrainerSettings
    sets: tuple[TrainingSet, ...]
    given: tuple[PromptRow, ...]
    held_out: tuple[PromptRow, ...]
    topics: tuple[str, ...]
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

    @property
    def own(self) -> TrainingSet | None:
        """The set that the target writes."""
        return next((one for one in self.sets if one.source is None), None)

    def split(self, written: Sequence[PromptRow] = ()) -> SplitRows:
        """Rows to train and to measure on; `written` are the target's own."""
        return split_rows([*self.given, *written], self.held_out or None, self.sets)

    def described_sets(self) -> list[dict[str, Any]]:
        """The sets as the record of a training has them."""
        return [
            {**asdict(one), "source": OWN if one.source is None else Path(one.source).name}
            for one in self.sets
        ]

    def prompt_parts(self) -> dict[str, Any]:
        """What prompts depend on that the target writes."""
        return {
            **self._target_parts(),
            "topics": self.topics,
            "seed": self.request.seed,
            "answers": [self.request.answer_tokens, self.max_length],
            "system_prompt": self.request.system_prompt,
            "variables": self.renderer.variables,
            "template": self.renderer.template_sha256,
        }

    def _target_parts(self) -> dict[str, Any]:
        """What answers, and how exactly."""
        return {
            "version": VERSION,
            "target": checkpoint_key(self.target.spec.checkpoint),
            "kv_dtype": self.target.cache_dtype.value,
            "int8": self.target.int8,
        }

    def answer_parts(self) -> dict[str, Any]:
        """What the answers depend on: the target, the rendered prompts, and how they are asked."""
        request = self.request
        return {
            **self._target_parts(),
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
            "sets": self.described_sets(),
            "topics": self.topics,
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
    sets = parse_sets(request.prompts, request.hours)
    prompts, hashes = read_sets([f"{one.name}={one.source}" for one in sets if one.source])
    held_out, held_out_hashes = read_sets(request.held_out)
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
    topics = _read_topics(request, sets, uses_template=renderer.uses_template)
    prepared = Preparation(
        request=request,
        target=target,
        renderer=renderer,
        shape=shape,
        settings=choose_settings(request, shape, is_cpu=is_cpu),
        sets=sets,
        given=tuple(prompts),
        held_out=tuple(held_out),
        topics=topics,
        hashes={
            **{f"prompts {name}": sha256 for name, sha256 in hashes.items()},
            **{f"held-out prompts {name}": sha256 for name, sha256 in held_out_hashes.items()},
            "tokenizer.json": file_sha256(target.tokenizer_folder / "tokenizer.json"),
            "chat template": renderer.template_sha256,
        },
        max_length=max_length,
        device="cpu" if is_cpu else "cuda",
    )
    if prepared.own is None:
        rows = prepared.split()
        if request.given_answers:
            _check_given(rows, target.spec.vocab_size)
    return prepared


def _read_topics(
    request: TrainRequest, sets: Sequence[TrainingSet], *, uses_template: bool
) -> tuple[str, ...]:
    """The lines of --set topics; DflashError (usage) for what does not go with the sets."""
    if all(one.source is not None for one in sets):
        refuse_options({"--set topics": request.topics}, "is for --prompts self", "leave it out")
        return ()
    what = "does not go with --prompts self"
    refuse_options({"--given-answers": request.given_answers or None}, what, "leave it out")
    if request.topics is None:
        return ()
    if not uses_template:
        refuse_options({"--set topics": request.topics}, "needs a chat template", "leave it out")
    lines = read_text(request.topics, FileKind.DATA_SET, named=True).splitlines()
    topics = tuple(line.strip() for line in lines if line.strip())
    if not topics:
        raise DflashError("holds no line", where=request.topics, usage=True)
    return topics


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
