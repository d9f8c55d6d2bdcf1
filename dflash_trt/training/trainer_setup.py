"""A trainer of a target's draft, on its device."""

from __future__ import annotations

from pathlib import Path

import torch

from dflash_trt.checkpoints.target import TargetSpec
from dflash_trt.training.draft_model import DraftModel, initialise, load_draft, new_draft
from dflash_trt.training.draft_shape import DraftDesign
from dflash_trt.training.eagle_model import EagleModel
from dflash_trt.training.feature_store import FeatureStore
from dflash_trt.training.target_head import load_ends
from dflash_trt.training.trainer import Trainer, TrainerSettings


def make_trainer(
    target: TargetSpec,
    shape: DraftDesign,
    start: Path | None,
    store: FeatureStore,
    settings: TrainerSettings,
    device: str,
    threads: int,
) -> Trainer:
    """A trainer at step 0, of the draft in `start` or a fresh one; `threads` are PyTorch's."""
    torch.set_num_threads(threads)
    model = start_draft(shape, start, settings.seed).to(device)
    return Trainer(model, load_ends(target), store, settings)


def start_draft(shape: DraftDesign, start: Path | None, seed: int) -> DraftModel | EagleModel:
    """The draft that training begins with."""
    if shape.is_chain:
        model = EagleModel(shape)
        initialise(model, 2**-0.5, seed)
        return model
    return new_draft(shape, seed) if start is None else load_draft(shape, start)
