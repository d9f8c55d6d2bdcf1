"""Changes: everything about a pair that may have been built wrongly, one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from dflash_trt.bundle.bundle import Bundle, load_tokenizer
from dflash_trt.decoding.replay.edits import Edits, load_graph
from dflash_trt.decoding.replay.rewire import (
    read_draft_tables,
    read_vocabularies,
    rotate_draft,
    set_draft_tables,
    set_windows,
    tap_layers,
)
from dflash_trt.models.rope import RopeSpec
from dflash_trt.proof.diagnosis.cause import Cause
from dflash_trt.proof.twins import read_pair

COMMON_BASES = (1e4, 1e5, 1.5e5, 5e5, 1e6, 1e7)
"""RoPE bases that published models have."""

SMALLEST_WINDOW = 32
MOST_MASKS = 64


@dataclass(frozen=True, slots=True)
class Change:
    """One change of the graphs, or of the mask token, that speaks for a cause if acceptance gains.

    `is_injected`: the target's graph differs too, and contexts are made anew."""

    cause: Cause
    text: str
    edits: Edits = Edits()
    mask_token_id: int | None = None

    @property
    def is_injected(self) -> bool:
        return bool(self.edits.target)


def list_changes(bundle: Bundle, longest: int) -> list[Change]:
    """Every change of graphs that is tried, for sequences of up to `longest` tokens.

    Mask tokens are apart: see `list_masks`.
    """
    return [*_taps(bundle), *_ropes(bundle), *_windows(bundle, longest), *_tables(bundle)]


def list_masks(bundle: Bundle) -> list[Change]:
    """Tokens that blocks may have been filled with in training: special and unused ones.

    At most MOST_MASKS, those that say "mask" first.
    """
    manifest = bundle.manifest
    used, vocab = manifest.draft.mask_token_id, manifest.target.vocab_size
    texts: dict[int, str] = {}
    if bundle.tokenizer_folder is not None:
        core = load_tokenizer(bundle).core
        texts = {index: token.content for index, token in core.get_added_tokens_decoder().items()}
        unused = range(core.get_vocab_size(with_added_tokens=True), vocab)
        texts |= dict.fromkeys((*unused[:8], *unused[-1:]), "unused")
    texts |= {index: "end of sequence" for index in manifest.target.eos_token_ids if index < vocab}
    chosen = sorted(texts, key=lambda index: ("mask" not in texts[index].lower(), index))
    return [
        Change(Cause.MASK_TOKEN, f"mask token {index} ({texts[index]})", mask_token_id=index)
        for index in chosen
        if index != used and index < vocab
    ][:MOST_MASKS]


def _taps(bundle: Bundle) -> Iterator[Change]:
    layers, taps = bundle.manifest.target.layers, bundle.manifest.draft.target_layer_ids
    for shift, change in ((-1, "taps one layer earlier"), (1, "taps one layer later")):
        moved = [min(max(tap + shift, -1), layers - 1) for tap in taps]
        yield Change(Cause.TAPS, change, Edits(target=(tap_layers(moved, layers),)))


def _ropes(bundle: Bundle) -> Iterator[Change]:
    pair, manifest = read_pair(bundle), bundle.manifest
    own, targets = pair.draft.rope, pair.target.rope
    bases = [targets.theta, *COMMON_BASES, own.theta * 10, own.theta / 10]
    tried: dict[RopeSpec, str] = {}
    if targets != own:
        tried[targets] = "the target's rope"
    for base in bases:
        tried.setdefault(replace(own, theta=base), f"rope base {base:g}")
    tried.pop(own, None)
    for rope, change in tried.items():
        edit = rotate_draft(rope, manifest.draft.head_dim, manifest.limits.max_seq_len)
        yield Change(Cause.ROPE, change, Edits(target=(edit,), draft=(edit,)))


def _windows(bundle: Bundle, longest: int) -> Iterator[Change]:
    draft, pool = bundle.manifest.draft, bundle.manifest.page_pool
    page_size = None if pool is None else pool.page_size

    def change_windows(cause: Cause, change: str, windows: list[int | None]) -> Change:
        return Change(cause, change, Edits(draft=(set_windows(windows, page_size),)))

    stated = draft.layer_windows
    if any(stated):
        yield change_windows(Cause.CONTEXT, "sliding layers see everything", [None] * draft.layers)
    window = SMALLEST_WINDOW
    while window < longest:
        if stated != [window] * draft.layers:
            change = f"layers see the last {window} positions"
            tight = [min(window, one or window) for one in stated]
            if tight != stated:
                yield change_windows(Cause.WINDOW, change, list(tight))
        window *= 2


def _tables(bundle: Bundle) -> Iterator[Change]:
    tables = read_vocabularies(load_graph(bundle.folder / "target.onnx"))
    own = read_draft_tables(load_graph(bundle.folder / "draft.onnx"))
    names = {kind: table.name for kind, table in tables.items()}
    if "head" not in tables or not set(own.values()) <= set(names.values()):
        return
    for embedding in tables.values():
        for head in tables.values():
            if (embedding.name, head.name) != (own["embedding"], own["head"]):
                change = f"blocks embedded with {embedding.name}, decoded with {head.name}"
                edits = Edits(draft=(set_draft_tables(embedding, head),))
                yield Change(Cause.EMBEDDING, change, edits)
