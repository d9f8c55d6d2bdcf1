"""What DFlash 2 adds to a draft that is trained: convolutions and the candidate selector.

Parameters are named as in z-lab's checkpoints, and begin where the draft is DFlash's. Shapes: R
rows, A anchors, S slots, H hidden, G groups of channels; n slots, k candidates of each.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from dflash_trt.models.dflash2 import TAPS, Dflash2Sizes

_CODES = 0.02
"""How wide codes of the token before begin; a successor's begin at zero."""


class BlockConvolution(nn.Module):
    """Two taps around a sublayer, over the slots of one block: see graph/dflash2/convolution.py."""

    def __init__(self, hidden: int, group: int) -> None:
        super().__init__()
        self._shape = (hidden // group, group)
        identity = torch.zeros(2, TAPS, hidden)
        identity[:, 0] = 1
        self.base_kernel = nn.Parameter(identity)
        self.kernel_projection = nn.Linear(hidden, 2 * TAPS * hidden // group, bias=False)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """What the sublayer makes of x [R, A, S, H], convolved before it and behind it."""
        dynamic = self.kernel_projection(x).unflatten(-1, (2, TAPS, -1, 1))
        behind = sublayer(self._convolve(x, dynamic, 0))
        return self._convolve(behind, dynamic, 1)

    def _convolve(self, rows: Tensor, dynamic: Tensor, end: int) -> Tensor:
        earlier = functional.pad(rows[:, :, :-1], (0, 0, 1, 0))
        taps = []
        for tap, values in enumerate((rows, earlier)):
            kernel = self.base_kernel[end, tap].view(self._shape) + dynamic[..., end, tap, :, :]
            taps.append(kernel * values.view(*rows.shape[:-1], *self._shape))
        convolved: Tensor = taps[0] + taps[1]
        return convolved.view(rows.shape).to(rows.dtype)


class CandidateSelector(nn.Module):
    """Weighs a slot's likeliest tokens by the one before: see graph/dflash2/selector.py."""

    def __init__(self, hidden: int, vocab_size: int, sizes: Dflash2Sizes) -> None:
        super().__init__()
        self.top_k = sizes.top_k
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab_size, sizes.rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, sizes.rank))
        self.hidden_projection = nn.Linear(hidden, sizes.rank, bias=False)

    def forward(self, hidden: Tensor, before: Tensor, candidates: Tensor) -> Tensor:
        """What the tokens before [n] add to the scores of candidates [n, k], of states [n, H]."""
        query = self.predecessor_codebook[before] * self.hidden_projection(hidden)
        codes = self.successor_codebook[candidates]
        return torch.einsum("nr,nkr->nk", query, codes.to(query.dtype)).float()


def start_additions(name: str, weight: Tensor, generator: torch.Generator) -> None:
    """Begins a parameter so that nothing moves yet, where it is one of the additions'."""
    if name.endswith(("kernel_projection.weight", "successor_codebook")):
        weight.zero_()
    if name.endswith("predecessor_codebook"):
        weight.normal_(0.0, _CODES, generator=generator)
