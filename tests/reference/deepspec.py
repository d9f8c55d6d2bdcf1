"""DeepSpec's and speculators' drafts in plain PyTorch, and z-lab's written in their layouts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from .draft import DraftOutput, KeyValue, ReferenceDraft, load_tensors

_OUTSIDE = {"architectures", "block_size", "enable_confidence_head", "markov_head_type"}
_OUTSIDE |= {"markov_rank", "mask_token_id", "num_target_layers", "target_layer_ids"}


def write_deepspec(
    folder: Path, draft: Path, target: Path, markov: tuple[Tensor, Tensor] | None, **changes: Any
) -> Path:
    """The draft of z-lab's layout in `draft`, as DeepSpec would have saved it for `target`.

    `markov` is W1 and W2, each [V, rank]; `changes` are to the config, ... leaves a key out.
    """
    config = json.loads((draft / "config.json").read_text(encoding="utf-8"))
    inner = config.pop("dflash_config")
    rank = 0 if markov is None else markov[0].shape[1]
    config |= {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": config["block_size"] - 1,
        "mask_token_id": inner["mask_token_id"],
        "target_layer_ids": inner["target_layer_ids"],
        "num_anchors": 512,
        "enable_confidence_head": markov is not None,
        "markov_rank": rank,
    }
    tensors = load_tensors(draft)
    owned = load_tensors(target)
    embedding = owned["model.embed_tokens.weight"]
    tensors["embed_tokens.weight"] = embedding
    tensors["lm_head.weight"] = owned.get("lm_head.weight", embedding.clone())
    if markov is not None:
        config |= {"confidence_head_with_markov": True, "markov_head_type": "vanilla"}
        hidden = embedding.shape[1]
        for name, tensor in zip(("markov_w1", "markov_w2"), markov, strict=True):
            tensors[f"markov_head.{name}.weight"] = tensor.to(embedding.dtype).contiguous()
        tensors["confidence_head.proj.weight"] = torch.ones(1, hidden + rank, dtype=embedding.dtype)
        tensors["confidence_head.proj.bias"] = torch.zeros(1, dtype=embedding.dtype)
    folder.mkdir(parents=True, exist_ok=True)
    kept = {key: value for key, value in (config | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_speculators(
    folder: Path,
    draft: Path,
    target: Path,
    *,
    kind: str = "dflash",
    tokens: Sequence[int] | None = None,
    markov: tuple[Tensor, Tensor] | None = None,
    own: float | None = 0.0,
    ends: int | None = None,
    **changes: Any,
) -> Path:
    """The draft of z-lab's layout in `draft`, as speculators would have saved it for `target`.

    It chooses among the target's `tokens`, all where that is None. Its embedding and head are the
    target's plus `own`; None leaves them out. `ends` are its positions where not the target's;
    `changes` are to the config, ... leaves a key out.
    """
    write_deepspec(folder, draft, target, markov)
    layer, tensors = json.loads((folder / "config.json").read_text()), load_tensors(folder)
    config = {key: layer.pop(key) for key in _OUTSIDE & layer.keys()}
    ids, chosen = config.pop("target_layer_ids"), torch.arange(layer["vocab_size"])
    if tokens is not None:
        tensors["t2d"] = torch.zeros(len(chosen), dtype=torch.bool)
        chosen = torch.tensor(tokens)
        tensors["t2d"][chosen] = True
        tensors["d2t"] = chosen - torch.arange(len(chosen))
    embedding, head = (tensors.pop(f"{one}.weight") for one in ("embed_tokens", "lm_head"))
    if own is not None:
        tensors["embed_tokens.weight"] = embedding + own
        tensors["lm_head.weight"] = head[chosen] + own * torch.rand_like(head[chosen])
    config |= {
        "architectures": ["DFlashDraftModel" if kind == "dflash" else "DSparkDraftModel"],
        "auto_map": {"": "config.DFlashSpeculatorConfig"},
        "aux_hidden_state_layer_ids": [one + 1 for one in ids],
        "block_size": config["block_size"] + 1,
        "draft_vocab_size": len(chosen),
        "sample_from_anchor": kind == "dspark",
        "sliding_window_non_causal": False,
        "speculators_config": {"algorithm": kind, "default_proposal_method": "greedy"},
        "speculators_model_type": kind,
        "target_hidden_size": None,
        "transformer_layer_config": layer | ({"max_position_embeddings": ends} if ends else {}),
        # Of other kinds, as its config class writes them.
        "gru_hidden_dim": 1024,
        "pure_draft_prefix_len": 1,
    }
    kept = {key: value for key, value in (config | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return folder


class DeepSpecDraft(ReferenceDraft):
    """A drafter whose N slots draft N tokens; with W1 and W2, one after another.

    `drafts_anchor` false is speculators': the anchor's slot drafts nothing. `tokens` [K] are what
    the rows of the head, and of W2, stand for.
    """

    drafts_anchor = True
    tokens: Tensor | None = None

    def __init__(self, base: ReferenceDraft, markov: tuple[Tensor, Tensor] | None) -> None:
        """`base` is the same drafter in z-lab's layout, whose slots draft their own positions."""
        super().__init__(base.config, base.weights, base.embed, base.lm_head)
        self.markov = markov

    @property
    def block(self) -> int:
        return self.config.block_size

    def draft(
        self,
        anchors: Tensor,
        start: int,
        context: Sequence[KeyValue],
        block_size: int | None = None,
    ) -> DraftOutput:
        """As ReferenceDraft.draft; `block_size` counts the anchor, logits row j drafts j."""
        rows = self.block if block_size is None else block_size
        first_slot = 0 if self.drafts_anchor else 1
        plain = super().draft(anchors, start, context, rows - 1 + first_slot)
        before, ids, logits = anchors, [anchors], [torch.zeros_like(plain.logits[:, 0])]
        for slot in range(rows - 1):
            moved = plain.logits[:, slot + first_slot]
            if self.markov is not None:
                first, second = self.markov
                moved = moved + first[before] @ second.T
            before = moved.argmax(-1)
            before = before if self.tokens is None else self.tokens[before]
            ids.append(before)
            logits.append(moved)
        return replace(plain, ids=torch.stack(ids, 1), logits=torch.stack(logits, 1))
