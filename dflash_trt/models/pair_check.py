"""Does this draft belong to this target? All the reasons why not, in one line."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dflash_trt.errors import DflashError
from dflash_trt.models.decoder import LOGIT_CAP
from dflash_trt.models.deepspec import COPIES, differing_copies
from dflash_trt.models.draft import DraftSpec
from dflash_trt.models.draft_tokens import DRAFT_TOKENS_NAME
from dflash_trt.models.eagle import default_taps
from dflash_trt.models.quantized_weights import linear_algorithm
from dflash_trt.models.safetensors_header import TensorEntry
from dflash_trt.models.sizes import DecoderSizes
from dflash_trt.models.target import TargetSpec


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and a draft that fit each other."""

    target: TargetSpec
    draft: DraftSpec

    @property
    def head(self) -> TensorEntry:
        """The weight that makes logits: the embedding where the target ties them."""
        return self.target.weights[self._head_role]

    @property
    def draft_token_ids(self) -> tuple[int, ...] | None:
        """What the draft chooses among; None for all, as with a head that is quantised."""
        weights = self.target.weights
        is_plain = linear_algorithm(weights, self._head_role) is None or self.has_own_head
        return self.draft.token_ids if is_plain else None

    @property
    def has_own_head(self) -> bool:
        """Whether the draft makes logits by a matrix of its own, not the target's."""
        return "lm_head" in self.draft.weights

    @property
    def _head_role(self) -> str:
        return "lm_head" if "lm_head" in self.target.weights else "embed_tokens"


def check_pair(target: TargetSpec, draft: DraftSpec) -> Pair:
    """The two as a pair.

    Raises:
        DflashError: lists everything that does not fit, with both values.
    """
    name = f"the target {target.checkpoint.path}"
    if draft.traits.is_chain and not draft.target_layer_ids:
        taps = default_taps(target.num_layers)
        draft = replace(draft, target_layer_ids=taps, taps_by_rule=True)
    draft = _borrowing(target, draft)
    check_draft(draft, target.sizes, target.vocab_size, name)
    is_own = draft.dflash2 is not None  # others' logits are those of the target's head
    if not is_own and draft.logit_cap not in (None, target.logit_cap):
        caps = "none" if target.logit_cap is None else f"{target.logit_cap:g}"
        what = f"{LOGIT_CAP} {draft.logit_cap:g} is not the target's, which has {caps}"
        _refuse_misfits(draft, name, [what])
    if draft.anchor_drafts or draft.traits.is_chain:
        roles = COPIES if draft.anchor_drafts else ("embed_tokens",)
        copies = [role for role in roles if role not in draft.owned]
        held = draft.checkpoint.tensors
        _refuse_misfits(draft, name, differing_copies(held, target.weights, copies))
    return Pair(target, draft)


def _borrowing(target: TargetSpec, draft: DraftSpec) -> DraftSpec:
    """`draft` without what of its own is the target's matrix again."""
    held, mask, kept = draft.checkpoint.tensors, draft.mask_token_id, dict(draft.weights)
    for role in draft.owned:
        if not differing_copies(held, target.weights, [role], mask):
            del kept[role]
    return replace(draft, weights=kept)


def check_draft(draft: DraftSpec, target: DecoderSizes, vocab_size: int, name: str) -> None:
    """Refuses a draft of another target than `name`, which has these sizes.

    Raises:
        DflashError: lists everything that does not fit, with both values.
    """
    problems: list[str] = []
    layers, taps = len(target.layers), len(draft.target_layer_ids)
    fc_wanted = taps * target.hidden_size
    if draft.fc_input_size != fc_wanted:
        problems.append(
            f"fc takes {draft.fc_input_size} features, {taps} tapped layers of "
            f"{target.hidden_size} give {fc_wanted}"
        )
    if draft.hidden_size != target.hidden_size:
        problems.append(
            f"draft hidden_size {draft.hidden_size} is not the target's {target.hidden_size}, "
            "whose embedding and lm_head it borrows"
        )
    outside = [str(i) for i in draft.target_layer_ids if i >= layers]
    if outside:
        problems.append(
            f"target_layer_ids {', '.join(outside)} are past the target's last layer ({layers - 1})"
        )
    if draft.num_target_layers not in (None, layers):
        problems.append(f"num_target_layers {draft.num_target_layers} is not the target's {layers}")
    if draft.mask_token_id >= vocab_size:
        what = f"mask_token_id {draft.mask_token_id} is outside the target's vocabulary"
        problems.append(f"{what} of {vocab_size}")
    last = max(draft.token_ids or (0,))
    if not draft.traits.is_chain and last >= vocab_size:
        what = f"{DRAFT_TOKENS_NAME} names token {last}, outside the target's"
        problems.append(f"{what} vocabulary of {vocab_size}")
    if not _is_padding(draft, vocab_size):
        problems.append(f"vocab_size {draft.vocab_size} is not the target's {vocab_size}")
    _refuse_misfits(draft, name, problems)


def _is_padding(draft: DraftSpec, vocab_size: int) -> bool:
    """Whether the draft's vocabulary is the target's, or is so but for unused rows at its end.

    Those matter to matrices of its own alone. Published ones have 0.3 % more, other tokenizers of
    a family 2 %.
    """
    stated = vocab_size if draft.vocab_size is None else draft.vocab_size
    owns = draft.traits.is_chain or draft.markov_rank or draft.owned
    most = 0 if owns else max(stated, vocab_size) // 100
    return abs(stated - vocab_size) <= most


def _refuse_misfits(draft: DraftSpec, name: str, problems: list[str]) -> None:
    if problems:
        what = f"draft does not fit {name}: {', '.join(problems)}"
        fix = "pass the draft that was trained for this target"
        if draft.taps_by_rule:
            fix += ", or `build` --target-layer-ids: its config names no target_layer_ids"
        raise DflashError(what, where=draft.checkpoint.path, fix=fix)
