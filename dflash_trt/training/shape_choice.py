"""The draft's shape where it is not given: the paper's, scaled to the target and the budget."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dflash_trt.core.limits import MAX_BLOCK
from dflash_trt.errors import DflashError, refuse_options
from dflash_trt.models.draft import read_draft
from dflash_trt.models.eagle import MAX_DRAFTS
from dflash_trt.models.eagle import default_taps as eagle_taps
from dflash_trt.models.pair_check import check_pair
from dflash_trt.models.target import TargetSpec
from dflash_trt.text.tokenizer import BundleTokenizer
from dflash_trt.training.draft_shape import DraftDesign, shape_of
from dflash_trt.training.recipe_choice import Reasons, Scale
from dflash_trt.training.target_source import TrainingTarget
from dflash_trt.training.training_request import ShapeOptions, TrainRequest

PAPER_LAYERS, SMALL_LAYERS = 5, 2
PAPER_BLOCK, SMALL_BLOCK = 16, 8
TAPS = 5
MARKOV_RANK = 256
EXPERT_FFN = 3
"""Hidden sizes that the MLP of a mixture's draft is wide, as in published ones."""

_RESERVED = re.compile(r"mask|reserved|unused", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ChosenShape:
    """A shape, and for each of its fields why it is so."""

    shape: DraftDesign
    reasons: Reasons


def choose_shape(request: TrainRequest, target: TrainingTarget, scale: Scale) -> ChosenShape:
    """The shape of the draft that is trained: of `request.start` where there is one.

    Raises:
        DflashError: a given value that no draft can have, options that `--from` leaves no room
            for, or a draft of another target.
    """
    spec, given, reasons = target.spec, request.shape, Reasons()
    if request.start is not None:
        what = "is fixed by the draft that is continued"
        refuse_options(given.given, what, "leave it out, or leave out --from")
        draft = read_draft(request.start)
        check_pair(spec, draft)
        reasons["shape"] = f"that of {request.start}"
        return ChosenShape(shape_of(draft, spec.vocab_size, spec.num_layers), reasons)
    if given.kind != "dspark":
        what = "is of DSpark's head, which this kind has not"
        refuse_options({"--set markov-rank": given.markov_rank}, what, "leave it out")
    reasons["heads"] = "the target's"
    is_chain = given.kind == "eagle3"
    layers, block = _choose_size(given, spec, scale, reasons, is_chain=is_chain)
    ffn, why = spec.sizes.intermediate_size, "the target's"
    if spec.moe is not None and not (is_chain and ffn):
        ffn, why = EXPERT_FFN * spec.hidden_size, "three hidden sizes, as published for mixtures"
    taps, taps_why = (
        default_taps(spec.num_layers),
        "five, evenly from layer 1 to N - 3: the paper's",
    )
    mask = rank = 0
    if is_chain:
        taps, taps_why = _head_taps(given, spec), "the inputs of layers 2, N/2 and N - 3: EAGLE's"
    else:
        mask, reasons["mask_token_id"] = choose_mask_token(
            target.open_tokenizer(), spec.vocab_size, spec.eos_token_ids, given.mask_token_id
        )
    if given.kind == "dspark":
        most = min(MARKOV_RANK, spec.hidden_size)
        rank = reasons.choose(
            "markov_rank", given.markov_rank, most, "the paper's, or the hidden size"
        )
    sizes = spec.sizes.layers[0]
    shape = DraftDesign(
        hidden_size=spec.hidden_size,
        intermediate_size=reasons.choose("intermediate_size", given.intermediate_size, ffn, why),
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        windows=(None,) * layers,
        block_size=block,
        mask_token_id=mask,
        target_layer_ids=_checked(reasons.choose("taps", given.taps, taps, taps_why), spec),
        num_target_layers=spec.num_layers,
        vocab_size=spec.vocab_size,
        max_position_embeddings=spec.max_position_embeddings,
        rope_theta=spec.rope.theta,
        rms_norm_eps=spec.rms_norm_eps,
        markov_rank=rank,
        is_chain=is_chain,
    )
    return ChosenShape(shape, reasons)


def _choose_size(
    given: ShapeOptions, spec: TargetSpec, scale: Scale, reasons: Reasons, *, is_chain: bool
) -> tuple[int, int]:
    """Layers, and rows of a block: of an EAGLE-3 head one, and its chain's steps."""
    if is_chain:
        refuse_options(
            {"--set layers": given.layers, "--set mask-token-id": given.mask_token_id},
            "is for blocks of masks: an EAGLE-3 head is one layer, and drafts token by token",
            "leave it out",
        )
        block = reasons.choose("block_size", given.block_size, 1 + MAX_DRAFTS, "EAGLE's chain")
        if not 2 <= block <= 1 + MAX_DRAFTS:
            what = f"{block} is not 2 … {1 + MAX_DRAFTS}, for a chain of up to {MAX_DRAFTS}"
            raise DflashError(what, where="--block-size", usage=True)
        reasons["layers"] = "EAGLE-3's one"
        return 1, block
    layers, block = PAPER_LAYERS, PAPER_BLOCK
    layers_why, block_why = "the paper's: 3 cost acceptance, 8 cost time", "the paper's"
    if scale.is_small:
        layers, layers_why = SMALL_LAYERS, f"{scale.hours:g} h on a CPU pay for no more"
        block, block_why = SMALL_BLOCK, "a CPU's verify step grows with its rows"
    layers = reasons.choose("layers", given.layers, min(layers, spec.num_layers), layers_why)
    block = reasons.choose("block_size", given.block_size, block, block_why)
    if not 2 <= block <= min(MAX_BLOCK, spec.max_position_embeddings - 1):
        raise DflashError(f"{block} is no block size", where="--block-size", usage=True)
    return layers, block


def default_taps(layers: int) -> tuple[int, ...]:
    """Five layers of the target, evenly from 1 to N - 3 (arXiv 2602.06036); fewer of a shallow one.

    Ties are rounded to even, as upstream does it.
    """
    last = max(layers - 3, 0)
    first = min(1, last)
    return tuple(sorted({round(first + i * (last - first) / (TAPS - 1)) for i in range(TAPS)}))


def _head_taps(given: ShapeOptions, spec: TargetSpec) -> tuple[int, ...]:
    if given.taps is None and spec.num_layers < 6:
        what = f"a target of {spec.num_layers} layers has not the three of the default"
        raise DflashError(what, fix="give --set taps", usage=True)
    return given.taps or eagle_taps(spec.num_layers)


def _checked(taps: tuple[int, ...], spec: TargetSpec) -> tuple[int, ...]:
    if sorted(set(taps)) != list(taps) or not 0 <= taps[0] <= taps[-1] < spec.num_layers:
        what = f"{list(taps)} are not ascending layers from 0 to {spec.num_layers - 1}"
        raise DflashError(what, where="--set taps", usage=True)
    return taps


def choose_mask_token(
    tokenizer: BundleTokenizer, vocab_size: int, end_ids: tuple[int, ...], given: int | None
) -> tuple[int, str]:
    """Chooses the token that stands at positions to draft, and says why.

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
        return given, "given"
    added = sorted(tokenizer.core.get_added_tokens_decoder().items())
    special = [
        (token_id, token.content)
        for token_id, token in added
        if token.special and token_id < vocab_size and token_id not in end_ids
    ]
    for token_id, name in special:
        if _RESERVED.search(name):
            return token_id, f"{name}, a special token that texts do not use"
    entries = tokenizer.core.get_vocab_size(with_added_tokens=True)
    largest = max(tokenizer.core.get_vocab(with_added_tokens=True).values(), default=entries - 1)
    if largest + 1 < vocab_size:
        return largest + 1, "the embedding's first row that no token of the text has"
    template, named = tokenizer.chat_template or "", tokenizer.special_texts.values()
    for token_id, name in reversed(special):
        if name not in template and name not in named:
            return token_id, f"{name}, the last special token that chats do not use"
    raise DflashError(
        "the tokenizer has no reserved or unused token to stand for what is to be drafted",
        where="--set mask-token-id",
        fix="pass the id of a token that no text of yours contains",
        usage=True,
    )
