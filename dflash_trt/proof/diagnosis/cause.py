"""Cause: what can make acceptance low, in words for whoever has to act."""

from __future__ import annotations

from enum import Enum


class Cause(Enum):
    """A cause of low acceptance.

    `title` is its name in JSON, `means` continues "Acceptance is low because …", and `fix` says
    what to do about it.
    """

    TAPS = (
        "taps",
        "the draft reads other layers of the target than it was trained on",
        "correct target_layer_ids in the draft's config (0 is the output of the first layer; some "
        "tools store id + 1) and build again",
    )
    SLOTS = (
        "slots",
        "the draft's slots are shifted against the tokens that they are compared with",
        "find out which position a slot of this draft predicts: here slot j must predict the token "
        "at its own position, j behind the anchor",
    )
    TEMPLATE = (
        "chat template",
        "prompts do not have the chat template that the draft was trained with",
        "send messages and not raw text, or the other way about, as the draft was trained",
    )
    THINKING = (
        "thinking mode",
        "the draft was trained on answers of the other thinking mode",
        "serve with the other value of enable_thinking, or train the draft on this mode's answers",
    )
    MASK_TOKEN = (
        "mask token",
        "blocks are filled with another mask token than in training",
        "correct mask_token_id in the draft's config and build again",
    )
    ROPE = (
        "rope base",
        "the draft's positions turn by another rope base than in training",
        "correct rope_theta (and rope_scaling) in the draft's config and build again",
    )
    WINDOW = (
        "sliding window",
        "the draft sees more context than it was trained with",
        "mark its sliding layers in layer_types with their sliding_window and build again, or "
        "train it on longer sequences",
    )
    CONTEXT = (
        "context cut",
        "the draft sees less context than it was trained with",
        "correct layer_types and sliding_window in the draft's config and build again",
    )
    QUANTISED_TARGET = (
        "quantised target",
        "the quantised target's features differ from those that the draft was trained on",
        "train the draft on for a few hundred steps on features of the quantised target, or leave "
        "more of the target in high precision",
    )
    QUANTISED_DRAFT = (
        "quantised draft",
        "quantising the draft cost it precision that it needs",
        "leave the draft in high precision (--draft-precision bf16): it is small",
    )
    DRAFT_WEIGHTS = (
        "draft weights",
        "the draft cannot use this target's features: it belongs to another training",
        "check that draft and target are the published pair, revision by revision",
    )
    DATA = (
        "data",
        "these prompts are unlike what the draft was trained on",
        "train the draft on answers of this target to prompts like these",
    )

    def __init__(self, title: str, means: str, fix: str) -> None:
        self.title, self.means, self.fix = title, means, fix
