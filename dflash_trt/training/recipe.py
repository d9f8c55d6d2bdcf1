"""The draft's shape and training where they are not given: the paper's, scaled to the budget.

docs/training.md has the defaults and why they are so.
"""

from __future__ import annotations

import re
from dataclasses import replace
from math import gcd

from dflash_trt.core.limits import MAX_BLOCK
from dflash_trt.core.machine import multiplies_bf16
from dflash_trt.errors import DflashError, refuse_options
from dflash_trt.models.config_fields import ConfigFields
from dflash_trt.models.dflash2 import Dflash2Sizes
from dflash_trt.models.draft import read_draft
from dflash_trt.models.eagle import MAX_DRAFTS
from dflash_trt.models.eagle import default_taps as eagle_taps
from dflash_trt.models.mtp import PREFIX, may_hold_layer
from dflash_trt.models.pair_check import check_pair
from dflash_trt.text.tokenizer import BundleTokenizer
from dflash_trt.training.draft_shape import DraftDesign, own_layer_shape, shape_of
from dflash_trt.training.target import TrainingTarget
from dflash_trt.training.trainer import TrainerSettings
from dflash_trt.training.training_request import TrainRequest

SMALL_HOURS = 4.0
"""Up to these a CPU cannot pay for the paper's sizes."""
PAPER_LAYERS, SMALL_LAYERS = 5, 2
PAPER_BLOCK, SMALL_BLOCK = 16, 8
TAPS = 5
MARKOV_RANK = 256
CONV_GROUP, SELECTOR_RANK, SELECTOR_TOP_K = 16, 256, 16
"""DFlash 2's, as published."""
EXPERT_FFN = 3
"""Hidden sizes that the MLP of a mixture's draft is wide, as in published ones."""
GPU_ROWS, CPU_ROWS = 16, 4
PAPER_ANCHORS, CPU_ANCHORS = 512, 64
GAMMAS = ((8, 4.0), (10, 5.0), (MAX_BLOCK, 7.0))
"""The paper's, by the largest block each is for."""
DRAFT_TOKENS = 4096
"""Of a vocabulary four times as large or larger, on a CPU: 99.6 % of what SmolLM2 answers to
questions in English are among its own 4,096 commonest tokens there."""

_RESERVED = re.compile(r"mask|reserved|unused", re.IGNORECASE)
_SELECTOR = ("--set selector-rank", "--set selector-top-k")
_OF_OTHER_KINDS = {
    "dflash": ("--set markov-rank", *_SELECTOR),
    "dflash2": ("--set markov-rank",),
    "dspark": ("--set draft-tokens", *_SELECTOR),
    "eagle3": ("--set layers", "--set mask-token-id", "--set markov-rank", *_SELECTOR),
}
_OF_ALL_TOKENS = ("DSpark", "MTP")
"""Kinds that choose among every token."""


def with_own_layer(request: TrainRequest, target: TrainingTarget) -> TrainRequest:
    """A request whose MTP layer begins as the one in its target's checkpoint, if there is one.

    Raises:
        DflashError: another family's target, or options that it leaves no room for (usage).
    """
    if request.kind != "mtp" or request.start is not None:
        return request
    spec = target.spec
    if not may_hold_layer(ConfigFields(spec.checkpoint.config, spec.checkpoint.path)):
        what = f"targets of the family {spec.family} have no MTP layer"
        raise DflashError(what, where="--kind mtp", fix="eagle3 is a chain for any", usage=True)
    fixed = {option: value for option, value in _options(request).items() if option != "--kind"}
    refuse_options(fixed, "is not for a draft of kind mtp", "leave it out")
    is_held = any(name.startswith(PREFIX) for name in spec.checkpoint.tensors)
    return replace(request, kind=None, start=target.folder) if is_held else request


def _options(request: TrainRequest) -> dict[str, object]:
    """What decides a draft's shape, by option."""
    return {
        "--kind": request.kind,
        "--block-size": request.block_size,
        "--set layers": request.layers,
        "--set taps": request.taps,
        "--set ffn": request.ffn,
        "--set mask-token-id": request.mask_token_id,
        "--set markov-rank": request.markov_rank,
        "--set selector-rank": request.selector_rank,
        "--set selector-top-k": request.selector_top_k,
        "--set draft-tokens": request.draft_tokens or None,
    }


def choose_shape(request: TrainRequest, target: TrainingTarget, *, is_cpu: bool) -> DraftDesign:
    """The shape of the draft that is trained: of `request.start` where there is one.

    Raises:
        DflashError: a given value that no draft can have, options that `--from` or the kind leaves
            no room for, or a draft of another target.
    """
    spec, options = target.spec, _options(request)
    if request.start is not None:
        draft = read_draft(request.start)
        is_widened = draft.kind == "DFlash" and request.kind == "dflash2"
        free = ["--set draft-tokens"] if draft.kind not in _OF_ALL_TOKENS else []
        free += ["--kind", *_SELECTOR] if is_widened else []
        fixed = {option: value for option, value in options.items() if option not in free}
        what = "is fixed by the draft that is continued"
        refuse_options(fixed, what, "leave it out, or leave out --from")
        check_pair(spec, draft)
        shape = shape_of(draft, spec.vocab_size, spec.num_layers)
        return _with_additions(shape, request, target) if is_widened else shape
    kind = request.kind or "dflash"
    if kind == "mtp":
        return own_layer_shape(spec, spec.vocab_size, spec.num_layers)
    others = {option: options[option] for option in _OF_OTHER_KINDS[kind]}
    refuse_options(others, f"is not for a draft of kind {kind}", "leave it out")
    is_chain, is_small = kind == "eagle3", is_cpu and request.hours <= SMALL_HOURS
    layers, block = (SMALL_LAYERS, SMALL_BLOCK) if is_small else (PAPER_LAYERS, PAPER_BLOCK)
    layers, most = request.layers or min(layers, spec.num_layers), MAX_BLOCK
    mask = rank = 0
    taps = request.taps or default_taps(spec.num_layers)
    if is_chain:
        layers, block, most = 1, 1 + MAX_DRAFTS, 1 + MAX_DRAFTS
        if request.taps is None and spec.num_layers < 6:
            what = f"a target of {spec.num_layers} layers has not the three of the default"
            raise DflashError(what, fix="give --set taps", usage=True)
        taps = request.taps or eagle_taps(spec.num_layers)
    else:
        tokenizer, ends = target.open_tokenizer(), spec.eos_token_ids
        mask = choose_mask_token(tokenizer, spec.vocab_size, ends, request.mask_token_id)
    if kind == "dspark":
        rank = request.markov_rank or min(MARKOV_RANK, spec.hidden_size)
    most = min(most, spec.max_position_embeddings - 1)
    block = request.block_size or block
    if not 2 <= block <= most:
        what = f"{block} is no block size from 2 to {most}"
        raise DflashError(what, where="--block-size", usage=True)
    if sorted(set(taps)) != list(taps) or taps[-1] >= spec.num_layers:
        what = f"{list(taps)} are not ascending layers from 0 to {spec.num_layers - 1}"
        raise DflashError(what, where="--set taps", usage=True)
    ffn = spec.sizes.intermediate_size
    if spec.moe is not None and not (is_chain and ffn):
        ffn = EXPERT_FFN * spec.hidden_size
    sizes = spec.sizes.layers[0]
    shape = DraftDesign(
        hidden_size=spec.hidden_size,
        intermediate_size=request.ffn or ffn,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        windows=(None,) * layers,
        block_size=block,
        mask_token_id=mask,
        target_layer_ids=taps,
        num_target_layers=spec.num_layers,
        vocab_size=spec.vocab_size,
        max_position_embeddings=spec.max_position_embeddings,
        rope_theta=spec.rope.theta,
        rms_norm_eps=spec.rms_norm_eps,
        markov_rank=rank,
        is_chain=is_chain,
    )
    return _with_additions(shape, request, target) if kind == "dflash2" else shape


def _with_additions(
    shape: DraftDesign, request: TrainRequest, target: TrainingTarget
) -> DraftDesign:
    """A DFlash draft's shape with DFlash 2's additions."""
    hidden = shape.hidden_size
    additions = Dflash2Sizes(
        group=gcd(CONV_GROUP, hidden),
        rank=request.selector_rank or min(SELECTOR_RANK, hidden),
        top_k=min(
            request.selector_top_k or SELECTOR_TOP_K, request.draft_tokens or shape.vocab_size
        ),
    )
    return replace(shape, dflash2=additions, logit_cap=target.spec.logit_cap)


def default_taps(layers: int) -> tuple[int, ...]:
    """Five layers of the target, evenly from 1 to N - 3 (arXiv 2602.06036); fewer of a shallow one.

    Ties are rounded to even, as upstream does it.
    """
    last = max(layers - 3, 0)
    first = min(1, last)
    return tuple(sorted({round(first + i * (last - first) / (TAPS - 1)) for i in range(TAPS)}))


def choose_mask_token(
    tokenizer: BundleTokenizer, vocab_size: int, end_ids: tuple[int, ...], given: int | None
) -> int:
    """Chooses the token that stands at positions to draft.

    It is one that no text contains: `given`, or the first that there is of

    1. a special token whose name says mask, reserved or unused;
    2. a row of the embedding behind the tokenizer's last entry;
    3. the last special token that neither the chat template nor the end of a text uses.

    Raises:
        DflashError: `given` is outside the vocabulary or ends texts; there is none to choose.
    """
    if given is not None:
        if not 0 <= given < vocab_size or given in end_ids:
            what = f"{given} is not a token from 0 to {vocab_size - 1} that ends no text"
            raise DflashError(what, where="--set mask-token-id", usage=True)
        return given
    special = {
        token_id: token.content
        for token_id, token in sorted(tokenizer.core.get_added_tokens_decoder().items())
        if token.special and token_id < vocab_size and token_id not in end_ids
    }
    reserved = [token_id for token_id, name in special.items() if _RESERVED.search(name)]
    behind = max(tokenizer.core.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    template, named = tokenizer.chat_template or "", tokenizer.special_texts.values()
    spare = [
        token_id
        for token_id, name in reversed(special.items())
        if name not in template and name not in named
    ]
    for token_id in (*reserved[:1], *[behind] * (behind < vocab_size), *spare):
        return token_id
    raise DflashError(
        "the tokenizer has no reserved or unused token to stand for what is to be drafted",
        where="--set mask-token-id",
        fix="pass the id of a token that no text of yours contains",
        usage=True,
    )


def choose_settings(request: TrainRequest, shape: DraftDesign, *, is_cpu: bool) -> TrainerSettings:
    """The settings but for the number of steps, which is 0."""
    default, vocab_size = TrainerSettings(steps=0), shape.vocab_size
    tokens = request.draft_tokens
    if tokens is None and is_cpu and vocab_size >= 4 * DRAFT_TOKENS:
        tokens = None if shape.kind in _OF_ALL_TOKENS else DRAFT_TOKENS
    rate = default.learning_rate if request.start is None else default.learning_rate / 2
    return TrainerSettings(
        steps=0,
        rows=request.batch_rows or (CPU_ROWS if is_cpu else GPU_ROWS),
        anchors=request.anchors or (CPU_ANCHORS if is_cpu else PAPER_ANCHORS),
        gamma=request.gamma or next(one for most, one in GAMMAS if shape.block_size <= most),
        learning_rate=request.learning_rate or rate,
        head_tokens=default.head_tokens if is_cpu else None,
        draft_tokens=tokens if tokens and tokens < vocab_size else None,
        seed=request.seed,
        is_bf16=not is_cpu or multiplies_bf16(),
    )


def describe(shape: DraftDesign, settings: TrainerSettings, source: str) -> dict[str, str]:
    """What was chosen, by name, as the plan and the record show it."""
    tokens = settings.draft_tokens
    sizes = shape.dflash2
    selector = "" if sizes is None else f", selector of rank {sizes.rank} among {sizes.top_k}"
    return {
        "draft": f"{shape.kind}, {shape.layers} layers × {shape.hidden_size}, ffn "
        f"{shape.intermediate_size}, block {shape.block_size}{selector}",
        "taps": ", ".join(map(str, shape.target_layer_ids)) or "the target's output",
        **({} if shape.is_chain else {"mask token": str(shape.mask_token_id)}),
        "a step": f"{settings.rows} rows × {settings.anchors} blocks, gamma {settings.gamma:g}, "
        f"rate {settings.learning_rate:g}, {'bfloat16' if settings.is_bf16 else 'float32'}",
        "draft tokens": "all" if tokens is None else f"{tokens:,}",
        "features": source,
    }
