"""Does this draft belong to this target? All the reasons why not, in one line."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_trt.checkpoints.draft import DraftSpec
from dflash_trt.checkpoints.target import TargetSpec
from dflash_trt.errors import DflashError


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and a draft that fit each other."""

    target: TargetSpec
    draft: DraftSpec


def check_pair(target: TargetSpec, draft: DraftSpec) -> Pair:
    """The two as a pair.

    Raises:
        DflashError: lists everything that does not fit, with both values.
    """
    problems = list(_mismatches(target, draft))
    if problems:
        raise DflashError(
            f"draft does not fit the target {target.checkpoint.path}: {', '.join(problems)}",
            where=draft.checkpoint.path,
            fix="pass the draft that was trained for this target",
        )
    return Pair(target, draft)


def _mismatches(target: TargetSpec, draft: DraftSpec) -> list[str]:
    problems: list[str] = []
    taps = len(draft.target_layer_ids)
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
    outside = [str(i) for i in draft.target_layer_ids if i >= target.num_layers]
    if outside:
        problems.append(
            f"target_layer_ids {', '.join(outside)} are past the target's last layer "
            f"({target.num_layers - 1})"
        )
    if draft.num_target_layers not in (None, target.num_layers):
        problems.append(
            f"num_target_layers {draft.num_target_layers} is not the target's {target.num_layers}"
        )
    if draft.mask_token_id >= target.vocab_size:
        problems.append(
            f"mask_token_id {draft.mask_token_id} is outside the target's vocabulary of "
            f"{target.vocab_size}"
        )
    if draft.vocab_size not in (None, target.vocab_size):
        problems.append(f"vocab_size {draft.vocab_size} is not the target's {target.vocab_size}")
    return problems
