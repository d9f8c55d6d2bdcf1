"""The loss of DFlash (arXiv 2602.06036, section 4.2): weighted cross-entropy of every slot.

The paper's labels are tokens. Here a share of each may be what the target itself believed where it
said the token, which tells more of it than the one token that came of it.

Shapes: R rows, A anchors, S slots, H hidden, V vocabulary, K of it that are looked at.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from dflash_trt.training.draft_blocks import IGNORED


def slot_weights(block_size: int, gamma: float) -> Tensor:
    """[S - 1]: exp(-(k - 1) / gamma) for slot k = 1 … S - 1. An early error costs all."""
    return torch.exp(-torch.arange(block_size - 1) / gamma)


class Head:
    """The target's output head, frozen, cut to the tokens that a loss looks at.

    On a CPU the full head of a large vocabulary costs more than the draft. Looked at are the
    commonest tokens, every label of the batch, and others drawn at random so that no token can
    grow unseen.

    Args:
        weight: [V, H].
        common: [≤ V] int64, token ids that are always looked at; None looks at all.
        drawn: how many others.
        cap: of logits, c·tanh(l/c).
    """

    def __init__(
        self, weight: Tensor, common: Tensor | None, drawn: int = 0, cap: float | None = None
    ) -> None:
        self._weight = weight
        self._cap = cap
        self._common = None if common is None else common.to(weight.device)
        self._drawn = drawn
        self._places = torch.zeros(len(weight), dtype=torch.int64, device=weight.device)

    def select(self, labels: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor | slice]:
        """Head rows [K, H], `labels` [n] as indices into them, and what picks the rows' tokens."""
        if self._common is None:
            return self._weight, labels, slice(None)
        generator = torch.Generator().manual_seed(seed)
        others = torch.randint(len(self._weight), (self._drawn,), generator=generator)
        ids = torch.unique(torch.cat([self._common, labels, others.to(labels.device)]))
        self._places[ids] = torch.arange(len(ids), device=ids.device)
        return self._weight[ids], self._places[labels], ids

    def score(self, states: Tensor, rows: Tensor) -> Tensor:
        """Logits [n, K], float32, of `states` [n, H] and head rows [K, H]."""
        logits = functional.linear(states.to(rows.dtype), rows).float()
        return logits if self._cap is None else self._cap * torch.tanh(logits / self._cap)


def block_loss(
    hidden: Tensor,
    labels: Tensor,
    head: Head,
    weights: Tensor,
    seed: int = 0,
    *,
    believed: Tensor | None = None,
    soft: float = 0.0,
    markov: tuple[Callable[[Tensor, Tensor | slice], Tensor], Tensor] | None = None,
) -> Tensor:
    """The loss of hidden states [R, A, S - 1, H] against labels [R, A, S], slot 0 unused: a scalar,
    the mean over labels, weighted by slot.

    Args:
        weights: [S - 1], see `slot_weights`.
        seed: decides which uncommon tokens the head looks at.
        believed: [R, A, S - 1, H], the target's own states where it said the labels; its head
            makes probabilities of them, over the tokens that are looked at.
        soft: share of a label that is those probabilities.
        markov: DSpark's head, and the token before each label [R, A, S - 1].
    """
    wanted = labels[:, :, 1:]
    is_counted = wanted != IGNORED
    slots = torch.nonzero(is_counted)[:, 2]
    rows, indices, tokens = head.select(wanted[is_counted], seed)
    logits = head.score(hidden[is_counted], rows)
    if markov is not None:
        move, before = markov
        logits = logits + move(before[is_counted], tokens).float()
    if believed is None:
        losses = functional.cross_entropy(logits, indices, reduction="none")
    else:
        with torch.no_grad():
            truth = head.score(believed[is_counted], rows).softmax(-1).mul_(soft)
            hard = torch.full_like(truth[:, :1], 1 - soft)
            truth.scatter_add_(1, indices[:, None], hard)
        losses = functional.cross_entropy(logits, truth, reduction="none")
    share = weights.to(losses.device)[slots]
    return (losses * share).sum() / share.sum()
