"""Cause: what can make acceptance low, in words for whoever has to act."""

from __future__ import annotations

from enum import Enum


class Cause(Enum):
    """A cause of low acceptance; the value is its name in JSON."""

    TAPS = "taps"
    SLOTS = "slots"
    TEMPLATE = "chat template"
    THINKING = "thinking mode"
    MASK_TOKEN = "mask token"
    ROPE = "rope base"
    WINDOW = "sliding window"
    CONTEXT = "context cut"
    EMBEDDING = "embedding"
    QUANTISED_TARGET = "quantised target"
    QUANTISED_DRAFT = "quantised draft"
    DRAFT_WEIGHTS = "draft weights"
    DATA = "data"
    DRAFT_PATH = "draft path"

    @property
    def means(self) -> str:
        """Continues "Acceptance is low because …"."""
        return _TEXTS[self][0]

    @property
    def fix(self) -> str:
        """What to do about it."""
        return _TEXTS[self][1]


_TEXTS = {
    Cause.TAPS: (
        "the draft reads other layers of the target than it was trained on",
        "correct target_layer_ids in the draft's config (0 is the output of the first layer; some "
        "tools store id + 1) and build again",
    ),
    Cause.SLOTS: (
        "the draft's slots are shifted against the tokens that they are compared with",
        "find out which position a slot of this draft predicts: here slot j must predict the token "
        "at its own position, j behind the anchor",
    ),
    Cause.TEMPLATE: (
        "prompts do not have the chat template that the draft was trained with",
        "send messages and not raw text, or the other way about, as the draft was trained",
    ),
    Cause.THINKING: (
        "the draft was trained on answers of the other thinking mode",
        "serve with the other value of enable_thinking, or train the draft on this mode's answers",
    ),
    Cause.MASK_TOKEN: (
        "blocks are filled with another mask token than in training",
        "correct mask_token_id in the draft's config and build again",
    ),
    Cause.ROPE: (
        "the draft's positions turn by another rope base than in training",
        "correct rope_theta (and rope_scaling) in the draft's config and build again",
    ),
    Cause.WINDOW: (
        "the draft sees more context than it was trained with",
        "mark its sliding layers in layer_types with their sliding_window and build again, or "
        "train it on longer sequences",
    ),
    Cause.CONTEXT: (
        "the draft sees less context than it was trained with",
        "correct layer_types and sliding_window in the draft's config and build again",
    ),
    Cause.EMBEDDING: (
        "the draft does not embed its blocks, or decode them, with the target's own tables",
        "check tie_word_embeddings and the names of the target's tables, and build again",
    ),
    Cause.QUANTISED_TARGET: (
        "the quantised target's features differ from those that the draft was trained on",
        "train the draft on for a few hundred steps on features of the quantised target, or leave "
        "more of the target in high precision",
    ),
    Cause.QUANTISED_DRAFT: (
        "quantising the draft cost it precision that it needs",
        "leave the draft in high precision (--draft-precision bf16): it is small",
    ),
    Cause.DRAFT_WEIGHTS: (
        "the draft cannot use this target's features: it belongs to another training",
        "check that draft and target are the published pair, revision by revision",
    ),
    Cause.DATA: (
        "these prompts are unlike what the draft was trained on",
        "train the draft on answers of this target to prompts like these",
    ),
    Cause.DRAFT_PATH: (
        "the draft knows the right token and does not put it first, the less the later the slot",
        "a drafter that chooses among each slot's likeliest tokens (a tree, a selector) gains; "
        "smaller blocks lose little",
    ),
}
