"""The kinds of drafts that have weights, and what of a draft follows from its kind alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

DraftKind = Literal["DFlash", "DFlash 2", "DSpark", "EAGLE-3", "MTP"]


@dataclass(frozen=True, slots=True)
class DraftTraits:
    """What a kind is, and what cannot be done with it yet.

    Args:
        title: its name with an article.
        paper: its number at arXiv.
        is_chain: no masks, but one step after another, each with the feature of the one before it.
            The target keeps its features in the draft's caches, beside keys and values.
        owns_head: its logits are made by a head of its own, not by the target's.
        has_engines: whether any engines are made of it.
        has_kernel_caches, is_quantised, is_diagnosed: whether engines with paged or FP8 caches are
            made of it, `quantize` takes it, and `diagnose` has something to try with it.
    """

    title: str
    paper: str
    is_chain: bool = False
    owns_head: bool = False
    has_engines: bool = True
    has_kernel_caches: bool = True
    is_quantised: bool = True
    is_diagnosed: bool = True


TRAITS: Mapping[DraftKind, DraftTraits] = {
    "DFlash": DraftTraits("a DFlash draft", "2602.06036"),
    "DFlash 2": DraftTraits("a DFlash 2 draft", "2602.06036"),
    "DSpark": DraftTraits("a DSpark draft", "2607.05147"),
    "EAGLE-3": DraftTraits(
        "an EAGLE-3 head",
        "2503.01840",
        is_chain=True,
        owns_head=True,
        has_kernel_caches=False,
        is_quantised=False,
        is_diagnosed=False,
    ),
    "MTP": DraftTraits(
        "an MTP layer",
        "2412.19437",
        is_chain=True,
        has_engines=False,
        has_kernel_caches=False,
        is_quantised=False,
        is_diagnosed=False,
    ),
}
