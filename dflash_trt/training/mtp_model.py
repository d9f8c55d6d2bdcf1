"""The MTP layer of a Qwen3.5 in PyTorch, for training.

What runs is in graph/eagle.py. Parameters are named, and norms stored, as below `mtp.` in a
target's checkpoint. Features are the target's output, behind its last norm.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from dflash_trt.models.mtp import PREFIX
from dflash_trt.training.draft_model import write_checkpoint
from dflash_trt.training.draft_shape import DraftDesign
from dflash_trt.training.eagle_model import ChainLayer, ChainModel, make_norm
from dflash_trt.training.target import TargetEnds


class MtpModel(ChainModel):
    """A layer of the target's family over a token's embedding and an output."""

    hands_normed = True

    def __init__(self, shape: DraftDesign) -> None:
        super().__init__(shape)
        hidden = shape.hidden_size
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.pre_fc_norm_embedding = make_norm(shape, hidden)
        self.pre_fc_norm_hidden = make_norm(shape, hidden)
        self.layers = nn.ModuleList([ChainLayer(shape, hidden)])
        self.norm = make_norm(shape, hidden)

    def enter(self, embedded: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        token, output = self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(feature)
        x: Tensor = self.fc(torch.cat([token, output], -1))
        return self.layer.input_layernorm(x), x

    def save(self, folder: Path, ends: TargetEnds, tokens: Tensor | None = None) -> None:
        """Writes the target's config, and the layer's tensors as they lie in its checkpoint."""
        held = {f"{PREFIX}{name}": one for name, one in self.state_dict().items()}
        write_checkpoint(folder, self.shape.config(), held)
