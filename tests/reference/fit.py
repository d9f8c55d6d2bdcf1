"""A few optimiser steps that make a random draft agree with its target now and then.

A random draft is accepted about once in V slots, which leaves the commit path of a speculative
loop nearly untested. Fitted to the target's own greedy output it is accepted in runs of every
length.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from .draft import ReferenceDraft
from .generate import greedy, hidden_taps


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
