"""Does this draft belong to this target? All the reasons why not, in one line."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_trt.checkpoints.draft import DraftSpec
from dflash_trt.checkpoints.sizes import DecoderSizes
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
    check_draft(draft, target.sizes, target.vocab_size, f"the target {target.checkpoint.path}")
    return Pair(target, draft)


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
    if draft.vocab_size not in (None, vocab_size):
        problems.append(f"vocab_size {draft.vocab_size} is not the target's {vocab_size}")
    if problems:
        raise DflashError(
            f"draft does not fit {name}: {', '.join(problems)}",
            where=draft.checkpoint.path,
            fix="pass the draft that was trained for this target",
        )
