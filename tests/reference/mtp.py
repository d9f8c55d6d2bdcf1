"""An MTP layer in plain PyTorch, all rows anew at every step, around transformers' own layer.

Row i takes the embedding of token i + 1 and the target's output at position i, behind its last
norm; its own normed output predicts token i + 2 and is the next row's (arXiv 2412.19437, 2.2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from .draft import load_tensors
from .generate import load_target

PREFIX = "mtp."


class ReferenceMtp(torch.nn.Module):
    """A layer behind `target`, a Qwen3.5 whose last one has attention; names are those of files."""

    def __init__(self, target: Any) -> None:
        super().__init__()
        decoder = target.get_decoder()
        self.shared = (decoder.rotary_emb, target.get_input_embeddings().weight, target.lm_head)
        hidden = self.shared[1].shape[1]
        self.fc = torch.nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = torch.nn.ModuleList([deepcopy(decoder.layers[-1])])
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (
            deepcopy(decoder.norm) for _ in range(3)
        )

    @classmethod
    def load(cls, folder: Path, target: Any) -> ReferenceMtp:
        held = {name: one.float() for name, one in load_tensors(folder).items() if PREFIX in name}
        layer = cls(target)
        layer.load_state_dict({name.removeprefix(PREFIX): one for name, one in held.items()})
        return layer

    @torch.no_grad()
    def drafts(self, ids: Tensor, outputs: Tensor, count: int) -> tuple[list[int], list[Tensor]]:
        """`count` tokens behind ids [n], the last of which has no output yet, and each step's
        logits; outputs [n - 1,H] are the target's."""
        tokens, scores = ids[1:], []
        for _ in range(count):
            row = self(tokens, outputs)[-1:]
            scores.append(self.shared[2](row)[0])
            tokens = torch.cat([tokens, scores[-1].argmax()[None]])
            outputs = torch.cat([outputs, row])
        return tokens[len(ids) - 1 :].tolist(), scores

    def forward(self, tokens: Tensor, outputs: Tensor) -> Tensor:
        """The normed outputs [n,H] of rows of tokens [n] and outputs [n,H] of the one before."""
        rotary, embed, _ = self.shared
        token, output = self.pre_fc_norm_embedding(embed[tokens]), self.pre_fc_norm_hidden(outputs)
        x = self.fc(torch.cat([token, output], -1))[None]
        later = torch.full((len(tokens), len(tokens)), -math.inf).triu(1)[None, None]
        turns = rotary(x, torch.arange(len(tokens))[None])
        x = self.layers[0](x, position_embeddings=turns, attention_mask=later)
        rows: Tensor = self.norm(x[0] if isinstance(x, tuple) else x)[0]
        return rows


def write_mtp(folder: Path) -> Path:
    """Gives the Qwen3.5 in `folder`, of one file, a random layer."""
    layer, generator = ReferenceMtp(load_target(folder)), torch.Generator().manual_seed(5)
    own = {}
    for name, one in layer.state_dict().items():
        values = torch.randn(one.shape, generator=generator)
        own[name] = values / (4 if one.dim() == 1 else math.sqrt(one.shape[-1]))
    return _store(folder, own)


def fit_mtp(folder: Path, target: Any, examples: Sequence[tuple[Tensor, Tensor]]) -> Path:
    """Fits the layer in `folder` to `examples`, ids [n] and the target's outputs [n,H] of each."""
    layer = ReferenceMtp.load(folder, target).requires_grad_(True)
    optimizer = torch.optim.Adam(layer.parameters(), lr=6e-3)
    for _ in range(60):
        optimizer.zero_grad()
        for ids, outputs in examples:
            logits = target.lm_head(layer(ids[1:-1], outputs[:-2]))
            cross_entropy(logits, ids[2:]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return _store(folder, layer.state_dict())


def grow_with_mtp(folder: Path, tokens: Tensor, steps: int) -> Path:
    """Trains the Qwen3.5 in `folder` and its layer together, on rows of 128 of `tokens` [n]."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # whatever trained before: it is small
    target = load_target(folder).requires_grad_(True)
    layer = ReferenceMtp.load(folder, target).requires_grad_(True)
    parts: dict[bool, list[Any]] = {True: [], False: []}
    for one in dict.fromkeys([*target.parameters(), *layer.parameters()]):
        parts[one.dim() == 2 and len(one) != target.config.vocab_size].append(one)
    muon = torch.optim.Muon(parts[True], weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    optimizers = (muon, torch.optim.AdamW(parts[False], weight_decay=0.0))
    for step in range(steps):
        rows = tokens.unfold(0, 128, 1)[torch.randint(0, len(tokens) - 128, (8,))]
        states = target.get_decoder()(input_ids=rows).last_hidden_state
        loss = cross_entropy(target.lm_head(states[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        for row in range(2):
            further = layer(rows[row, 1:-1], states[row, :-2])
            loss = loss + 0.15 * cross_entropy(target.lm_head(further), rows[row, 2:])
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_([*parts[True], *parts[False]], 1.0)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 4e-3 * min((step + 1) / 20, 1.05 - step / steps)
            optimizer.step()
            optimizer.zero_grad()
    held, grown = load_tensors(folder), target.state_dict()
    for name, one in held.items():
        held[name] = grown.get(name.replace("language_model.", ""), one).to(one.dtype)
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    return _store(folder, layer.state_dict())


def _store(folder: Path, own: dict[str, Tensor]) -> Path:
    """Puts a layer's tensors into a checkpoint's file, in the type of most others."""
    tensors = {name: one for name, one in load_tensors(folder).items() if PREFIX not in name}
    dtype = next(one.dtype for name, one in tensors.items() if name.endswith("q_proj.weight"))
    tensors |= {PREFIX + name: one.to(dtype).contiguous() for name, one in own.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
