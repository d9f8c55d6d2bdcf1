"""Greedy decoding with a transformers target: plain, and the DFlash loop; a draft fitted to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from .draft import ReferenceDraft


@dataclass(frozen=True, slots=True)
class Step:
    """One speculative step: `block` (anchor, drafts) verified at positions start..start+S-1."""

    start: int
    block: list[int]
    choices: list[int]
    accepted: int


@dataclass(frozen=True, slots=True)
class Generation:
    """Greedy output. logits [len(tokens), V]: row i chose tokens[i]."""

    tokens: list[int]
    logits: Tensor
    steps: list[Step] = field(default_factory=list)

    @property
    def accepted(self) -> list[int]:
        """Accepted drafts of each step, before the output was cut to its length."""
        return [step.accepted for step in self.steps]

    @property
    def smallest_gap(self) -> float:
        """The least distance of the best logit from the second: how near a tie the run came."""
        best = self.logits.topk(2, dim=-1).values
        return float((best[:, 0] - best[:, 1]).min())


def load_target(folder: str | Path, dtype: torch.dtype = torch.float32) -> Any:
    """A transformers causal LM in eval mode, computing in `dtype` with eager attention."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", local_files_only=True
    )
    return model.eval().requires_grad_(False)


@torch.no_grad()
def forward_with_taps(
    target: Any, ids: Tensor, layer_ids: Sequence[int], *, norms_last: bool = True, **kwargs: Any
) -> tuple[Any, Tensor]:
    """Runs the target on ids [B, T]; returns its output and the taps [B, T, n*H].

    A tap is transformers' hidden_states[id + 1], as z-lab's drafts take it: the residual stream
    after decoder layer id, of the last layer with the final norm applied. EAGLE-3 heads take that
    one as hooks see it, without (`norms_last`). Taps are concatenated in the order of `layer_ids`;
    an id may repeat.
    """
    seen: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(_module: Any, _args: Any, output: Any) -> None:
            seen[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    layers = target.get_decoder().layers
    handles = [layers[i].register_forward_hook(keep(i)) for i in sorted(set(layer_ids))]
    try:
        output = target(ids, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    last = len(layers) - 1
    if norms_last and last in seen:
        seen[last] = target.get_decoder().norm(seen[last])
    return output, torch.cat([seen[i] for i in layer_ids], dim=-1)


def hidden_taps(target: Any, ids: Tensor, layer_ids: Sequence[int]) -> Tensor:
    """The taps [B, T, n*H] of ids [B, T]; see `forward_with_taps`."""
    return forward_with_taps(target, ids, layer_ids, use_cache=False)[1]


@torch.no_grad()
def greedy(target: Any, prompt: Sequence[int], n: int) -> Generation:
    """n greedy tokens after `prompt`, one row at a time; no stop tokens."""
    cache = DynamicCache(config=target.config)
    tokens: list[int] = []
    rows: list[Tensor] = []
    for _ in range(n):
        step = torch.tensor([tokens[-1:] or list(prompt)])
        rows.append(target(step, past_key_values=cache, use_cache=True).logits[0, -1])
        tokens.append(int(rows[-1].argmax()))
    return Generation(tokens, torch.stack(rows))


@torch.no_grad()
def dflash_greedy(
    target: Any, draft: ReferenceDraft, prompt: Sequence[int], n: int, block_size: int | None = None
) -> Generation:
    """n greedy tokens through the DFlash loop, everything recomputed from scratch each step.

    The target runs the committed tokens plus the block, the taps of all committed rows are
    projected anew, so no cache can go stale. Output is cut to n tokens; steps are not.
    """
    layer_ids = draft.config.target_layer_ids
    slots = draft.config.block_size if block_size is None else block_size
    committed = list(prompt)
    prefill = target(torch.tensor([committed]), use_cache=False).logits[0, -1]
    rows, tokens, steps = [prefill], [int(prefill.argmax())], list[Step]()
    while len(tokens) < n:
        start, anchor = len(committed), tokens[-1]
        features = hidden_taps(target, torch.tensor([committed]), layer_ids)
        context = draft.project(features)
        block = draft.draft(torch.tensor([anchor]), start, context, slots).ids[0].tolist()
        logits = target(torch.tensor([committed + block]), use_cache=False).logits[0, start:]
        choices = logits.argmax(-1).tolist()
        accepted = 0
        while accepted < slots - 1 and block[accepted + 1] == choices[accepted]:
            accepted += 1
        steps.append(Step(start, block, choices, accepted))
        committed += block[: accepted + 1]
        tokens += choices[: accepted + 1]
        rows += list(logits[: accepted + 1])
    return Generation(tokens[:n], torch.stack(rows[:n]), steps)


def fit_draft(
    folder: str | Path,
    target: Any,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int = 96,
    steps: int = 60,
) -> None:
    """Fits the draft in `folder` to `target`'s greedy output after `prompts`; rewrites its weights.

    Names, shapes and storage dtype stay as they are. About 10 ms a step on tiny pairs. The exact
    weights depend on the machine and torch version: compare with the folder, not with constants.
    """
    path = Path(folder) / "model.safetensors"
    storage = {name: tensor.dtype for name, tensor in load_file(path).items()}
    draft = ReferenceDraft.load(folder, target)
    for weight in draft.weights.values():
        weight.requires_grad_(True)
    slots = draft.config.block_size
    sequences = [list(p) + greedy(target, p, tokens).tokens for p in prompts]
    features = [
        hidden_taps(target, torch.tensor([s]), draft.config.target_layer_ids) for s in sequences
    ]
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(draft.weights.values(), lr=6e-3)
    for _ in range(steps):
        losses = []
        for ids, taps in zip(sequences, features, strict=True):
            low, high = len(ids) - tokens, len(ids) - slots + 1
            start = int(torch.randint(low, high, (1,), generator=generator))
            block = torch.tensor(ids[start : start + slots])
            context = draft.project(taps[:, :start])
            logits = draft.draft(block[:1], start, context).logits[0]
            losses.append(torch.nn.functional.cross_entropy(logits[1:], block[1:]))
        optimizer.zero_grad()
        torch.autograd.backward(torch.stack(losses).mean())
        optimizer.step()
    fitted = {n: w.detach().to(storage[n]).contiguous() for n, w in draft.weights.items()}
    save_file(fitted, path, metadata={"format": "pt"})
