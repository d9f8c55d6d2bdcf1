"""Public pairs as data: shapes without weights, and the acceptance that is published for them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle, islice
from pathlib import Path

from dflash_trt.core.formats import Format
from dflash_trt.deploy.planning.acceptance_rates import AcceptanceCurve, read_acceptance
from dflash_trt.deploy.planning.decoding import (
    DFlash,
    DFlash2,
    DraftTree,
    DSpark,
    Eagle3,
    Mtp,
    Speculative,
)
from dflash_trt.errors import DflashError, nearest, one_line
from dflash_trt.models.build_config import (
    BlockKind,
    PublishedAcceptance,
    PublishedDecoder,
    PublishedDraft,
    PublishedPair,
    PublishedTarget,
    data_folder,
    load_config,
    target_names,
)
from dflash_trt.models.dflash2 import Dflash2Sizes
from dflash_trt.models.families import find_family
from dflash_trt.models.mtp import layer_shape
from dflash_trt.models.sizes import (
    DecoderSizes,
    DraftShape,
    ExpertSizes,
    LayerSizes,
    RecurrentSizes,
    TargetShape,
)

_DECODINGS: dict[BlockKind, type[DFlash]] = {
    "DFlash": DFlash,
    "DFlash 2": DFlash2,
    "DSpark": DSpark,
    "MTP": Mtp,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PairShape:
    """A target with its block draft, and what is published of how much is accepted.

    `architecture` is the target's, None where nothing states it.
    """

    name: str
    target: TargetShape
    draft: DraftShape
    architecture: str | None = None
    published: tuple[PublishedAcceptance, ...] = ()

    @property
    def drafter(self) -> BlockKind:
        """How its own draft decodes."""
        if self.draft.fuses_token:
            return "MTP"
        if self.draft.dflash2 is not None:
            return "DFlash 2"
        return "DSpark" if self.draft.markov_rank else "DFlash"

    def own_taus(self, one: PublishedAcceptance) -> dict[str, float]:
        """What `one` publishes of its own draft, by workload."""
        return one.by_kind[self.drafter]

    @property
    def workloads(self) -> list[str]:
        """Those that its τ is published for; the first is the one to take unasked."""
        return list(dict.fromkeys(name for one in self.published for name in self.own_taus(one)))


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
            fix="pass a folder that holds target/ and draft/, or a YAML file that names both",
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
    target, draft = shape.target, shape.draft
    return PairShape(
        name=name,
        target=_target(target),
        draft=DraftShape(
            sizes=_draft_sizes(draft),
            max_position_embeddings=draft.max_context or target.max_context,
            block_size=draft.block_size,
            mask_token_id=draft.mask_token_id,
            target_layer_ids=draft.target_layer_ids,
            vocab_size=target.vocab,
            dflash2=None if (own := draft.dflash2) is None else Dflash2Sizes(**own.model_dump()),
        ),
        architecture=target.architecture,
        published=shape.acceptance,
    )


def _draft_sizes(draft: PublishedDraft) -> DecoderSizes:
    """Layers that slide are causal, but a DFlash 2's; those that see everything are not."""
    sizes = _sizes(draft)
    causal = (bool(window) and draft.dflash2 is None for window in sizes.windows)
    return sizes.with_layers(sizes.windows, causal)


def _target(target: PublishedTarget) -> TargetShape:
    family = find_family(target.architecture)
    has_sinks = family is not None and family.has_sinks
    sizes = _sizes(target)
    sizes = sizes.with_layers(sizes.windows, has_sinks=has_sinks)
    if target.experts is not None and target.experts_per_token is not None:
        chosen, shared = target.experts_per_token, target.shared_expert or 0
        experts = ExpertSizes(target.experts, chosen, target.intermediate, shared=shared)
        sizes = replace(sizes, experts=experts)
    if (one := target.recurrent) is not None:
        layer = RecurrentSizes(one.key_heads, one.value_heads, one.head_dim, one.kernel)
        sizes = sizes.with_recurrence(
            layer if (i + 1) % one.attention_interval else None for i in range(target.layers)
        )
    if (full := target.full) is not None:
        shares = full.keys_are_values
        heads = LayerSizes(target.heads, full.kv_heads, full.head_dim, keys_are_values=shares)
        sizes = sizes.with_full(heads)
    return TargetShape(
        sizes=sizes,
        vocab_size=target.vocab,
        max_position_embeddings=target.max_context,
        tie_word_embeddings=target.tied_embeddings,
        mlp_format=Format(target.mlp_format),
    )


def _sizes(decoder: PublishedDecoder) -> DecoderSizes:
    windows = islice(cycle(decoder.windows), decoder.layers)
    heads = decoder.heads, decoder.kv_heads, decoder.head_dim
    return DecoderSizes(
        hidden_size=decoder.hidden,
        intermediate_size=decoder.intermediate,
        layers=tuple(LayerSizes(*heads, window or None) for window in windows),
    )


def published_decodings(pair: PairShape, acceptance: str | None = None) -> list[Speculative]:
    """The pair's own drafter, and others whose τ is published for the same workload.

    Args:
        acceptance: what `read_acceptance` takes, or a workload of the pair's, however it is cased
            and punctuated; the first that is published where it is None.

    Raises:
        DflashError: DFlash's τ is neither given nor published, or one is impossible (usage).
    """
    drafts = pair.draft.block_size - 1
    workloads = {_plain(name): name for name in pair.workloads}
    name = next(iter(workloads.values()), None)
    if acceptance is not None and _plain(acceptance) in workloads:
        name, acceptance = workloads[_plain(acceptance)], None
    if acceptance is not None:
        curve = read_acceptance(acceptance, drafts, pair.workloads)
    elif name is not None:
        one = next(one for one in pair.published if name in pair.own_taus(one))
        tau = pair.own_taus(one)[name]
        curve = _published(name, tau, one.drafts or drafts, one)
    else:
        raise DflashError(
            f"no τ is published for {pair.name}",
            where="--acceptance",
            fix="give τ at the trained block, or a sweep's acceptance",
            usage=True,
        )
    found: list[Speculative] = []
    if (eagle := _eagle3(pair, name)) is not None:
        found.append(eagle)
    found.append(_DECODINGS[pair.drafter](pair.target, pair.draft, curve))
    for one in pair.published:
        for kind, taus in one.by_kind.items():
            if name is None or name not in taus or taus is pair.own_taus(one):
                continue
            longest = _draft_of(pair, kind).block_size - 1
            other = _published(name, taus[name], one.drafts or longest, one)
            found.append(decode_with(pair, kind, other))
    return found


def decode_with(pair: PairShape, kind: BlockKind, curve: AcceptanceCurve) -> Speculative:
    """The pair's target with drafts of `kind`: its own draft's sizes, of MTP the target's layer."""
    return _DECODINGS[kind](pair.target, _draft_of(pair, kind), curve)


def _draft_of(pair: PairShape, kind: BlockKind) -> DraftShape:
    return layer_shape(pair.target) if kind == "MTP" else pair.draft


def _plain(name: str) -> str:
    return "".join(filter(str.isalnum, name.casefold()))


def _eagle3(pair: PairShape, workload: str | None) -> Eagle3 | None:
    """An EAGLE-3 drafter with the τ that is published for `workload`."""
    one = next((one for one in pair.published if workload in one.eagle3), None)
    if one is None or one.tree is None or workload is None:
        return None
    tree = DraftTree(*one.tree)
    return Eagle3(pair.target, _published(workload, one.eagle3[workload], tree.depth, one), tree)


def _published(workload: str, tau: float, drafts: int, one: PublishedAcceptance) -> AcceptanceCurve:
    return AcceptanceCurve.of_tau(tau, drafts, f"{workload}; {one.source}")
