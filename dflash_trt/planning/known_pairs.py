"""Public pairs as data: shapes without weights, and the acceptance that is published for them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle, islice
from pathlib import Path

from dflash_trt.checkpoints.sizes import DecoderSizes, ExpertSizes, LayerSizes
from dflash_trt.config import (
    PublishedDecoder,
    PublishedPair,
    PublishedTarget,
    PublishedTau,
    data_folder,
    load_config,
    target_names,
)
from dflash_trt.errors import DflashError, nearest, one_line
from dflash_trt.memory.shape import DFlashShape, ModelShape
from dflash_trt.planning.acceptance import AcceptanceCurve, read_acceptance
from dflash_trt.planning.decoding import DFlash, DraftTree, Eagle3


@dataclass(frozen=True, slots=True, kw_only=True)
class PairShape:
    """A target with its DFlash draft; τ of DFlash and of an EAGLE-3 drafter where known.

    `architecture` is the target's, None where nothing states it. `eagle3_tree` is that drafter's:
    levels, rows of each, rows that are verified.
    """

    name: str
    target: ModelShape
    draft: DFlashShape
    architecture: str | None = None
    dflash: PublishedTau | None = None
    eagle3: PublishedTau | None = None
    eagle3_tree: tuple[int, int, int] = (7, 10, 60)


def pair_names() -> list[str]:
    """Names that `find_pair` knows: the shipped configurations that have a `shape`."""
    return list(_read(data_folder("build_configs")))


def find_pair(name: str) -> PairShape:
    """The public pair called `name`.

    Raises:
        DflashError: none is; names the nearest.
    """
    known = _read(data_folder("build_configs"))
    if name not in known:
        raise DflashError(
            f"no shapes are known of {one_line(name, 60)!r}{nearest(name, list(known))}",
            where="--target",
            fix="pass --target-checkpoint and --draft-checkpoint folders with their config.json",
            usage=True,
        )
    return known[name]


@cache
def _read(folder: Path) -> dict[str, PairShape]:
    """The pairs in `folder`, which is where `load_config` finds names."""
    shapes = {name: load_config(name)[0].shape for name in target_names()}
    return {name: as_pair(name, shape) for name, shape in shapes.items() if shape is not None}


def as_pair(name: str, shape: PublishedPair) -> PairShape:
    """A configuration's `shape` as what bytes and FLOPs are computed from."""
    target, draft, eagle3 = shape.target, shape.draft, shape.eagle3
    sizes = _sizes(draft)
    return PairShape(
        name=name,
        target=_target(target),
        draft=DFlashShape(
            model=ModelShape(
                sizes=sizes,
                vocab=target.vocab,
                max_context=draft.max_context or target.max_context,
            ),
            block_size=draft.block_size,
            taps=len(draft.target_layer_ids),
            target_hidden=target.hidden,
            target_layer_ids=draft.target_layer_ids,
            mask_token_id=draft.mask_token_id,
        ),
        architecture=target.architecture,
        dflash=shape.dflash,
        eagle3=PublishedTau(eagle3.tau, eagle3.workload, eagle3.source),
        eagle3_tree=eagle3.tree,
    )


def _target(target: PublishedTarget) -> ModelShape:
    sizes = _sizes(target)
    if target.experts is not None and target.experts_per_token is not None:
        experts = ExpertSizes(target.experts, target.experts_per_token, target.intermediate)
        sizes = replace(sizes, experts=experts)
    return ModelShape(
        sizes=sizes,
        vocab=target.vocab,
        max_context=target.max_context,
        tied_embeddings=target.tied_embeddings,
        mlp_format=target.mlp_format,
    )


def _sizes(decoder: PublishedDecoder) -> DecoderSizes:
    windows = islice(cycle(decoder.windows), decoder.layers)
    heads = decoder.heads, decoder.kv_heads, decoder.head_dim
    return DecoderSizes(
        hidden_size=decoder.hidden,
        intermediate_size=decoder.intermediate,
        layers=tuple(LayerSizes(*heads, window or None) for window in windows),
    )


def published_decodings(
    pair: PairShape, acceptance: str | None = None, eagle3_tau: float | None = None
) -> list[DFlash | Eagle3]:
    """EAGLE-3 (only where its τ is known) and DFlash, whose `acceptance` `read_acceptance` reads.

    Raises:
        DflashError: DFlash's τ is neither given nor published, or one is impossible (usage).
    """
    drafts = pair.draft.block_size - 1
    if acceptance is not None:
        curve = read_acceptance(acceptance, drafts)
    elif pair.dflash is not None:
        curve = _published(pair.dflash, drafts)
    else:
        raise DflashError(
            f"no τ is published for {pair.name}",
            where="--acceptance",
            fix="give τ at the trained block, or a sweep's acceptance",
            usage=True,
        )
    dflash = DFlash(pair.target, pair.draft, curve)
    tree = DraftTree(*pair.eagle3_tree)
    if eagle3_tau is not None:
        eagle = AcceptanceCurve.of_tau(eagle3_tau, tree.depth, "given", "--eagle3-tau")
    elif pair.eagle3 is not None:
        eagle = _published(pair.eagle3, tree.depth)
    else:
        return [dflash]
    return [Eagle3(pair.target, eagle, tree), dflash]


def _published(one: PublishedTau, drafts: int) -> AcceptanceCurve:
    return AcceptanceCurve.of_tau(one.tau, drafts, f"{one.workload}; {one.source}")
