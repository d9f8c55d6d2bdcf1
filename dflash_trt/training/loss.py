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

from dflash_trt.training.dflash2_model import CandidateSelector
from dflash_trt.training.draft_blocks import IGNORED

SELECTOR_WEIGHT = 1.0
"""Of the selector's loss beside the slots'."""


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
        draft: multiplier and cap of a draft's logits; None takes them as the target's.
    """

    def __init__(
        self,
        weight: Tensor,
        common: Tensor | None,
        drawn: int = 0,
        cap: float | None = None,
        draft: tuple[float, float | None] | None = None,
    ) -> None:
        self._weight = weight
        self._cap = cap
        self._draft = (1.0, cap) if draft is None else draft
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
        return _capped(functional.linear(states.to(rows.dtype), rows).float(), self._cap)

    def score_draft(self, states: Tensor, rows: Tensor) -> Tensor:
        """As `score`, of a draft's states."""
        multiplier, cap = self._draft
        logits = functional.linear(states.to(rows.dtype), rows).float()
        return _capped(logits if multiplier == 1.0 else logits * multiplier, cap)


def _capped(logits: Tensor, cap: float | None) -> Tensor:
    return logits if cap is None else cap * torch.tanh(logits / cap)


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
    selector: tuple[CandidateSelector, Tensor] | None = None,
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
        selector: DFlash 2's, and the same; its loss is added, see `selector_loss`.
    """
    wanted = labels[:, :, 1:]
    is_counted = wanted != IGNORED
    slots = torch.nonzero(is_counted)[:, 2]
    rows, indices, tokens = head.select(wanted[is_counted], seed)
    states = hidden[is_counted]
    logits = head.score_draft(states, rows)
    if markov is not None:
        move, before = markov
        logits = logits + move(before[is_counted], tokens).float()
    truth = None
    if believed is None:
        losses = functional.cross_entropy(logits, indices, reduction="none")
    else:
        with torch.no_grad():
            truth = head.score(believed[is_counted], rows).softmax(-1).mul_(soft)
            hard = torch.full_like(truth[:, :1], 1 - soft)
            truth.scatter_add_(1, indices[:, None], hard)
        losses = functional.cross_entropy(logits, truth, reduction="none")
    share = weights.to(losses.device)[slots]
    total = (losses * share).sum() / share.sum()
    if selector is not None:
        select, before = selector
        told = (logits, states, before[is_counted], indices, tokens, share, truth)
        total = total + SELECTOR_WEIGHT * selector_loss(select, *told)
    return total


def selector_loss(
    select: CandidateSelector,
    logits: Tensor,
    states: Tensor,
    before: Tensor,
    indices: Tensor,
    tokens: Tensor | slice,
    share: Tensor,
    truth: Tensor | None = None,
) -> Tensor:
    """Cross-entropy of n slots over their own likeliest tokens, behind the true ones: a scalar.

    Slots whose label is not among these are left out: no selector could choose it.

    Args:
        logits: [n, K], of the looked-at `tokens`.
        states: [n, H], what the logits are of.
        before: [n], tokens.
        indices: [n], labels among the K.
        share: [n], the slots' weights.
        truth: [n, K], probabilities that are the labels, as far as they are candidates'.
    """
    scores, places = logits.topk(min(select.top_k, logits.shape[1]))
    is_label = places == indices[:, None]
    is_kept = is_label.any(1)
    candidates = places if isinstance(tokens, slice) else tokens[places]
    scores = (scores + select(states, before, candidates))[is_kept]
    believed = is_label.float() if truth is None else truth.gather(1, places)
    believed = believed[is_kept] / believed[is_kept].sum(1, keepdim=True)
    losses = functional.cross_entropy(scores, believed, reduction="none")
    kept = share[is_kept]
    return (losses * kept).sum() / kept.sum().clamp(min=1e-9)
