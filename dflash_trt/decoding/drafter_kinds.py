"""The kinds of drafters: who fills a block with drafts. The runtime's drafters.py runs them."""

from __future__ import annotations

from typing import Literal

from dflash_trt.backends.base import TargetGraph

DrafterKind = Literal["dflash", "prompt-lookup"]
DFLASH: DrafterKind = "dflash"
PROMPT_LOOKUP: DrafterKind = "prompt-lookup"
Drafting = Literal["dflash", "prompt-lookup", "none"]
"""A kind, or nobody: plain decoding."""
NOBODY: Literal["none"] = "none"
DRAFTERS: dict[DrafterKind, str] = {DFLASH: "DFlash", PROMPT_LOOKUP: "prompt lookup"}
"""What each kind is called in what is printed."""


def target_graph(kind: DrafterKind) -> TargetGraph:
    """The target that goes with a kind: only a draft graph needs what the injecting one writes."""
    return "target" if kind == DFLASH else "target_only"


def name_drafter(kind: DrafterKind, draft: str) -> str:
    """What drafts are called in what is printed; `draft` is the kind of the bundle's own."""
    return draft if kind == DFLASH else DRAFTERS[kind]
