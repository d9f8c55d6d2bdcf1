"""The draft's shape where it is not given: the paper's, scaled to the target and the budget."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_trt.checkpoints.draft import read_draft
from dflash_trt.checkpoints.eagle import MAX_DRAFTS
from dflash_trt.checkpoints.eagle import default_taps as eagle_taps
from dflash_trt.checkpoints.pair import check_pair
from dflash_trt.checkpoints.target import TargetSpec
from dflash_trt.core.limits import MAX_BLOCK
from dflash_trt.errors import DflashError, refuse_options
from dflash_trt.training.draft_shape import DraftDesign, shape_of
from dflash_trt.training.mask_token import choose_mask_token
from dflash_trt.training.recipe_choice import Scale
from dflash_trt.training.request import TrainRequest
from dflash_trt.training.target_source import TrainingTarget

PAPER_LAYERS, SMALL_LAYERS = 5, 2
PAPER_BLOCK, SMALL_BLOCK = 16, 8
TAPS = 5
MARKOV_RANK = 256
EXPERT_FFN = 3
"""Hidden sizes that the MLP of a mixture's draft is wide, as in published ones."""


@dataclass(frozen=True, slots=True)
class ChosenShape:
    """A shape, and for each of its fields why it is so."""

    shape: DraftDesign
    reasons: dict[str, str]


def choose_shape(request: TrainRequest, target: TrainingTarget, scale: Scale) -> ChosenShape:
    """The shape of the draft that is trained: of `request.start` where there is one.

    Raises:
        DflashError: a given value that no draft can have, options that `--from` leaves no room
            for, or a draft of another target.
    """
    if request.start is not None:
        what = "is fixed by the draft that is continued"
        refuse_options(request.shape.given, what, "leave it out, or leave out --from")
        draft = read_draft(request.start)
        check_pair(target.spec, draft)
        shape = shape_of(draft, target.spec.vocab_size, target.spec.num_layers)
        return ChosenShape(shape, {"shape": f"that of {request.start}"})
    return _fresh(request, target, scale)


def default_taps(layers: int) -> tuple[int, ...]:
    """Five layers of the target, evenly from 1 to N - 3 (arXiv 2602.06036); fewer of a shallow one.

    Ties are rounded to even, as upstream does it.
    """
    last = max(layers - 3, 0)
    first = min(1, last)
    return tuple(sorted({round(first + i * (last - first) / (TAPS - 1)) for i in range(TAPS)}))


def _fresh(request: TrainRequest, target: TrainingTarget, scale: Scale) -> ChosenShape:
    spec, given = target.spec, request.shape
    reasons: dict[str, str] = {}
    sizes = spec.sizes.layers[0]

    def choose(name: str, value: int | None, default: int, why: str) -> int:
        reasons[name] = "given" if value is not None else why
        return default if value is None else value

    if given.kind != "dspark":
        what = "is of DSpark's head, which this kind has not"
        refuse_options({"--markov-rank": given.markov_rank}, what, "leave it out")
    is_small = scale.is_small
    few = f"{request.hours:g} h on a CPU pay for no more"
    if given.kind == "eagle3":
        return _head(request, target)
    layers = choose(
        "layers",
        given.layers,
        min(SMALL_LAYERS if is_small else PAPER_LAYERS, spec.num_layers),
        few if is_small else "the paper's: 3 cost acceptance, 8 cost time",
    )
    block = choose(
        "block_size",
        given.block_size,
        SMALL_BLOCK if is_small else PAPER_BLOCK,
        "a CPU's verify step grows with its rows" if is_small else "the paper's",
    )
    if not 2 <= block <= min(MAX_BLOCK, spec.max_position_embeddings - 1):
        raise DflashError(f"{block} is no block size", where="--block-size", usage=True)
    if spec.moe is None:
        ffn, why = spec.sizes.intermediate_size, "the target's"
    else:
        ffn, why = EXPERT_FFN * spec.hidden_size, "three hidden sizes, as published for mixtures"
    ffn = choose("intermediate_size", given.intermediate_size, ffn, why)
    taps = _taps(given.taps, spec)
    reasons["taps"] = "given" if given.taps else "five, evenly from layer 1 to N - 3: the paper's"
    mask = choose_mask_token(
        target.open_tokenizer(), spec.vocab_size, spec.eos_token_ids, given.mask_token_id
    )
    reasons["mask_token_id"] = mask.why
    reasons["heads"] = "the target's"
    rank = 0
    if given.kind == "dspark":
        most = min(MARKOV_RANK, spec.hidden_size)
        rank = choose("markov_rank", given.markov_rank, most, "the paper's, or the hidden size")
    shape = DraftDesign(
        hidden_size=spec.hidden_size,
        intermediate_size=ffn,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        windows=(None,) * layers,
        block_size=block,
        mask_token_id=mask.token_id,
        target_layer_ids=taps,
        num_target_layers=spec.num_layers,
        vocab_size=spec.vocab_size,
        max_position_embeddings=spec.max_position_embeddings,
        rope_theta=spec.rope.theta,
        rms_norm_eps=spec.rms_norm_eps,
        markov_rank=rank,
    )
    return ChosenShape(shape, reasons)


def _head(request: TrainRequest, target: TrainingTarget) -> ChosenShape:
    """The shape of an EAGLE-3 head: one layer, the target's widths, three taps."""
    spec, given = target.spec, request.shape
    refuse_options(
        {"--layers": given.layers, "--mask-token-id": given.mask_token_id},
        "is for blocks of masks: an EAGLE-3 head is one layer, and drafts token by token",
        "leave it out",
    )
    block = given.block_size or 1 + MAX_DRAFTS
    if not 2 <= block <= 1 + MAX_DRAFTS:
        what = f"{block} is not 2 … {1 + MAX_DRAFTS}, for a chain of up to {MAX_DRAFTS}"
        raise DflashError(what, where="--block-size", usage=True)
    if given.taps is None and spec.num_layers < 6:
        what = f"a target of {spec.num_layers} layers has not the three of the default"
        raise DflashError(what, fix="give --taps", usage=True)
    sizes = spec.sizes.layers[0]
    taps = _taps(given.taps, spec) if given.taps else eagle_taps(spec.num_layers)
    ffn = given.intermediate_size or spec.sizes.intermediate_size or EXPERT_FFN * spec.hidden_size
    shape = DraftDesign(
        hidden_size=spec.hidden_size,
        intermediate_size=ffn,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        windows=(None,),
        block_size=block,
        mask_token_id=0,
        target_layer_ids=taps,
        num_target_layers=spec.num_layers,
        vocab_size=spec.vocab_size,
        max_position_embeddings=spec.max_position_embeddings,
        rope_theta=spec.rope.theta,
        rms_norm_eps=spec.rms_norm_eps,
        is_chain=True,
    )
    why = "given" if given.taps else "the inputs of layers 2, N/2 and N - 3: EAGLE's"
    return ChosenShape(shape, {"taps": why, "heads": "the target's", "layers": "EAGLE-3's one"})


def _taps(given: tuple[int, ...] | None, spec: TargetSpec) -> tuple[int, ...]:
    if given is None:
        return default_taps(spec.num_layers)
    if sorted(set(given)) != list(given) or not 0 <= given[0] <= given[-1] < spec.num_layers:
        what = f"{list(given)} are not ascending layers from 0 to {spec.num_layers - 1}"
        raise DflashError(what, where="--taps", usage=True)
    return given
