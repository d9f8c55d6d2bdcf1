"""An EAGLE-3 head whose drafts are often right: fitted to its target's own answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.lossless.runs import make_requests, run_baseline
from tests.pairs import TinyPair
from tests.reference.eagle import ReferenceEagle, write_eagle
from tests.reference.generate import forward_with_taps


def write_fitted_eagle(folder: Path, base: TinyPair, taps: Sequence[int], count: int) -> Path:
    """The target of `base` and a head for it in `folder`, by least squares over `count` answers."""
    vocab = base.pair.target.vocab_size
    (folder / "target").symlink_to(base.folder / "target")
    draft = write_eagle(folder / "draft", base.folder / "target", taps=taps, draft_vocab=None)
    head = ReferenceEagle.load(draft, base.reference, taps)
    inputs, wanted = [], []
    asked = make_requests(vocab, count)
    for request, one in zip(asked, run_baseline(base.open(), asked), strict=True):
        ids = torch.tensor([*request.prompt_ids, *one.token_ids])
        _, features = forward_with_taps(base.reference, ids[None], taps)
        answer = len(request.prompt_ids)  # prompts are noise
        inputs.append(head.hidden(ids[:-1], features[0, :-2])[answer - 1 :])
        wanted.append(ids[answer + 1 :])
    x, y = torch.cat(inputs), torch.nn.functional.one_hot(torch.cat(wanted), vocab).float()
    fitted = torch.linalg.solve(x.T @ x + 0.1 * torch.eye(x.shape[1]), x.T @ y).T
    tensors = load_file(draft / "model.safetensors")
    save_file(tensors | {"lm_head.weight": fitted.contiguous()}, draft / "model.safetensors")
    return folder
