"""DFlash 2 in plain PyTorch, slot by slot and group by group; DFlash drafts written anew as such.

The convolution is summed tap by tap, row by row; the selector scores every token of the vocabulary
and then looks at the candidates alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from .draft import DraftOutput, KeyValue, ReferenceDraft, load_tensors


def write_dflash2(
    folder: Path,
    draft: Path,
    *,
    group: int = 16,
    rank: int = 12,
    top_k: int = 8,
    gain: float = 1.0,
    **changes: Any,
) -> Path:
    """The DFlash draft in `draft` with random additions; `changes` are keys of dflash_config.

    Its numbers are such that every part counts: taps of both ends, groups, and codes that often
    overrule the head; less so with a smaller `gain`.
    """
    config = json.loads((draft / "config.json").read_text(encoding="utf-8"))
    config |= {"architectures": ["DFlash2DraftModel"], "is_causal": False}
    config["dflash_config"] |= {
        "conv_kernel_size": 2,
        "conv_group_size": group,
        "selector_rank": rank,
        "selector_top_k": top_k,
    } | changes
    tensors = load_tensors(draft)
    dtype, hidden = tensors["norm.weight"].dtype, config["hidden_size"]
    drawn = torch.Generator().manual_seed(7)

    def random(*shape: int) -> Tensor:
        return gain * torch.randn(shape, generator=drawn)

    for layer in range(config["num_hidden_layers"]):
        for name in ("attention_conv", "mlp_conv"):
            base = 0.3 * random(2, 2, hidden)
            base[:, 0] += 1
            kernels = random(4 * (hidden // group), hidden) / (2 * hidden**0.5)
            tensors[f"layers.{layer}.{name}.base_kernel"] = base.to(dtype)
            tensors[f"layers.{layer}.{name}.kernel_projection.weight"] = kernels.to(dtype)
    vocab = config["vocab_size"]
    for name in ("predecessor", "successor"):
        tensors[f"candidate_selector.{name}_codebook"] = random(vocab, rank).to(dtype)
    gate = random(rank, hidden) / hidden**0.5
    tensors["candidate_selector.hidden_projection.weight"] = gate.to(dtype)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return folder


class Dflash2Draft(ReferenceDraft):
    """The drafter of a folder that `write_dflash2` wrote; `shortlist` are the tokens it knows.

    `scores` [B, S-1, k] are the last block's candidates', whose tokens ascend.
    """

    settings: dict[str, Any]
    shortlist: list[int] | None = None
    scores: Tensor

    @classmethod
    def load(
        cls, folder: str | Path, target: Any, dtype: torch.dtype = torch.float32
    ) -> Dflash2Draft:
        draft = super().load(folder, target, dtype)
        assert isinstance(draft, Dflash2Draft)
        raw = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        draft.settings = raw | raw["dflash_config"]
        return draft

    def draft(
        self,
        anchors: Tensor,
        start: int,
        context: Sequence[KeyValue],
        block_size: int | None = None,
    ) -> DraftOutput:
        """As ReferenceDraft.draft; logits of slots are the walk's, far below them where a token
        is no candidate."""
        plain = super().draft(anchors, start, context, block_size)
        unary = plain.logits[:, 1:] * self.settings.get("output_multiplier", 1.0)
        cap = self.settings.get("final_logit_softcapping")
        if cap:
            unary = cap * torch.tanh(unary / cap)
        ids, logits = plain.ids.clone(), torch.zeros_like(plain.logits)
        seen: list[Tensor] = []
        for b in range(len(ids)):
            for slot in range(1, ids.shape[1]):
                candidates, scores = self._score(
                    unary[b, slot - 1], int(ids[b, slot - 1]), plain.final_hidden[b, slot]
                )
                logits[b, slot] = scores.min() - 1.0
                logits[b, slot, candidates] = scores
                ids[b, slot] = candidates[int(torch.nonzero(scores == scores.max())[0])]
                seen.append(scores)
        self.scores = torch.stack(seen).reshape(len(ids), ids.shape[1] - 1, -1)
        return replace(plain, ids=ids, logits=logits)

    def _score(self, unary: Tensor, before: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """A slot's candidates, ascending, and their scores: of U [V], behind a token."""
        first, second = (
            self.weights[f"candidate_selector.{name}_codebook"]
            for name in ("predecessor", "successor")
        )
        gate = self.weights["candidate_selector.hidden_projection.weight"] @ hidden
        known = self.shortlist or range(len(unary))
        ranked = sorted(known, key=lambda token: (-float(unary[token]), token))
        candidates = torch.tensor(sorted(ranked[: self.settings["selector_top_k"]]))
        pair = torch.stack([(first[before] * gate * second[token]).sum() for token in candidates])
        return candidates, unary[candidates] + pair

    def _around(self, x: Tensor, name: str) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        base = self.weights[name + ".base_kernel"]
        group = self.settings["conv_group_size"]
        groups = x.shape[2] // group
        dynamic = self._linear(x, name + ".kernel_projection")

        def convolve(rows: Tensor, end: int) -> Tensor:
            result = torch.zeros_like(rows)
            for row in range(rows.shape[1]):
                for tap in range(min(2, row + 1)):
                    for g in range(groups):
                        channels = slice(g * group, (g + 1) * group)
                        given = dynamic[:, row, (end * 2 + tap) * groups + g, None]
                        kernel = base[end, tap, channels] + given
                        result[:, row, channels] += kernel * rows[:, row - tap, channels]
            return result

        return convolve(x, 0), lambda output: convolve(output, 1)
