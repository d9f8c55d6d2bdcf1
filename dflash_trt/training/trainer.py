"""Trains a draft on a store of features; what it does depends on seed and step alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dflash_trt.core.publish import replacing
from dflash_trt.errors import DflashError
from dflash_trt.models.folder import open_checkpoint
from dflash_trt.models.mtp import PREFIX
from dflash_trt.training.draft_blocks import Batch, common_tokens, draw_batch, order_rows
from dflash_trt.training.draft_model import DraftModel, initialise
from dflash_trt.training.draft_shape import DraftDesign
from dflash_trt.training.eagle_model import EagleModel
from dflash_trt.training.features import FeatureStore
from dflash_trt.training.loss import Head, block_loss, slot_weights
from dflash_trt.training.mtp_model import MtpModel
from dflash_trt.training.target import TargetEnds, read_tensor

Draft = DraftModel | EagleModel | MtpModel
STATE_NAME = "trainer.pt"
DRAWN = 1024
FAST_RATE = 10.0
"""Of what begins at zero or the identity and is no matrix: DFlash 2's kernels and codes. At the
rate of norms they hardly leave it in a small budget: τ 3.88 of the demo's, in place of 4.6."""
_FAST = ("base_kernel", "_codebook")
# The quintic iteration that pulls singular values towards one, steepest near zero.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """How a draft is trained.

    Args:
        steps: optimizer steps of the whole run; the learning rate falls to `floor` over them.
        rows: rows of a step.
        anchors: blocks drawn in a row, anew each time it is used.
        gamma: how fast the weight of later slots falls; see `slot_weights`.
        soft: share of a label that is the target's own probabilities; see `block_loss`.
        head_tokens: how many tokens the loss looks at, DRAWN of them drawn anew each step and the
            others the commonest; None looks at all.
        draft_tokens: how many tokens the draft will choose among, the commonest; None is all. The
            loss does not know it.
        warmup: share of the steps over which the rate rises.
        is_bf16: multiply in bfloat16. Weights, norms and the optimizer stay float32.
    """

    steps: int
    rows: int = 16
    anchors: int = 64
    gamma: float = 4.0
    soft: float = 0.5
    head_tokens: int | None = 6144
    draft_tokens: int | None = None
    learning_rate: float = 2e-3
    floor: float = 0.02
    warmup: float = 0.04
    weight_decay: float = 0.05
    clip: float = 1.0
    seed: int = 0
    is_bf16: bool = False


class Trainer:
    """A draft, its optimizer and the step it is at.

    Args:
        ends: the target's embedding and head, frozen.
        store: the training rows.

    Attributes:
        losses: of every step so far.
    """

    def __init__(
        self,
        model: Draft,
        ends: TargetEnds,
        store: FeatureStore,
        settings: TrainerSettings,
    ) -> None:
        self.model, self.store, self.settings = model, store, settings
        self.losses: list[float] = []
        self._device = next(model.parameters()).device
        dtype = torch.bfloat16 if settings.is_bf16 else torch.float32
        self._ends = ends
        self._embedding = head = ends.embedding.to(self._device, dtype)
        if ends.head is not ends.embedding:
            head = ends.head.to(self._device, dtype)
        tokens = settings.head_tokens
        common = None
        if tokens is not None and tokens < len(head):
            common = common_tokens(store, max(tokens - DRAWN, 1))
        shape = model.shape
        own = None if shape.dflash2 is None else (shape.logit_multiplier, shape.logit_cap)
        self._head = Head(head, common, DRAWN, ends.logit_cap, own)
        self._weights = slot_weights(model.shape.block_size, settings.gamma)
        self._optimizers = _optimizers(model, settings)
        self.steps_per_epoch = len(order_rows(store, settings.rows, settings.seed, 0))
        if not self.steps_per_epoch:
            raise DflashError("no answer is long enough to train on", where="training rows")

    @property
    def step(self) -> int:
        return len(self.losses)

    @property
    def is_done(self) -> bool:
        return self.step >= self.settings.steps

    def train(self, until: int, on_step: Callable[[], None] = lambda: None) -> None:
        """Trains to step `until`, or to the last one.

        Raises:
            DflashError: the loss is not finite.
        """
        settings, size = self.settings, self.model.shape.block_size
        order: list[list[int]] = []
        for step in range(self.step, min(until, settings.steps)):
            epoch, within = divmod(step, self.steps_per_epoch)
            if not order or not within:
                order = order_rows(self.store, settings.rows, settings.seed, epoch)
            rows = order[within]
            batch = draw_batch(self.store, rows, settings.anchors, size, settings.seed, step)
            loss = self.loss(batch)
            loss.backward()  # type: ignore[no-untyped-call]
            value = float(loss.detach())
            if not math.isfinite(value):
                fix = "lower the learning rate, and go on from the last epoch"
                raise DflashError(f"the loss is {value} at step {step}", where="training", fix=fix)
            self._update(learning_rate(settings, step))
            self.losses.append(value)
            on_step()

    def loss(self, batch: Batch) -> Tensor:
        """The loss of a batch, with gradients to come."""
        device, is_bf16 = self._device, self.settings.is_bf16
        width, anchors = self.model.shape.hidden_size, batch.anchors.to(self._device)
        head, selector = self.model.markov_head, self.model.candidate_selector
        before = _tokens_before(batch).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=is_bf16):
            features = batch.features.to(device)
            features = features if is_bf16 else features.float()
            hidden = self._states(batch, features, anchors)
            return block_loss(
                hidden,
                batch.labels.to(device),
                self._head,
                self._weights,
                self.step,
                believed=self._believed(features[..., -width:], anchors),
                soft=self.settings.soft,
                # The tokens before: as they are, not as they were drafted.
                markov=None if head is None else (head, before),
                selector=None if selector is None else (selector, before),
            )

    def _states(self, batch: Batch, features: Tensor, anchors: Tensor) -> Tensor:
        """What the draft gives the output head, [R, A, S - 1, H]."""
        shape, width = self.model.shape, self.model.shape.hidden_size
        taps, last = features[..., :-width], features[..., -width:]
        if not isinstance(self.model, DraftModel):
            given = taps if shape.own_layer is None else self._ends.states(last)
            blocks = self._embedded(_tokens_before(batch))
            chain: Tensor = self.model(given, anchors, blocks, self._embedded(batch.tokens))
            return chain
        ids = torch.full_like(batch.labels[:, :, : shape.slots], shape.mask_token_id)
        ids[:, :, 0] = batch.anchor_ids
        states: Tensor = self.model(taps, anchors, self._embedded(ids))
        return states

    def _embedded(self, ids: Tensor) -> Tensor:
        return self._embedding[ids.to(self._device)].float()

    def _believed(self, last: Tensor, anchors: Tensor) -> Tensor:
        """The target's states [R, A, S - 1, H] where it said each slot's token."""
        slots = torch.arange(self.model.shape.block_size - 1, device=anchors.device)
        # A slot j's token, at anchor + j, was said at the place before; behind a row's end there
        # is no label.
        places = (anchors[..., None] + slots).clamp(max=last.shape[1] - 1)
        rows = torch.arange(len(last), device=anchors.device)[:, None, None]
        return self._ends.states(last[rows, places])

    def _update(self, rate: float) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group["share"]
            optimizer.step()
            optimizer.zero_grad()

    def save(self, folder: Path) -> None:
        """Writes everything that `restore` needs into `folder`, in one move."""
        state = {
            "losses": self.losses,
            "model": self.model.state_dict(),
            "optimizers": [one.state_dict() for one in self._optimizers],
        }
        with replacing(folder / STATE_NAME) as file:
            torch.save(state, file)

    def restore(self, folder: Path) -> None:
        """Goes on where `save` was called, if it was."""
        path = folder / STATE_NAME
        if not path.is_file():
            return
        state: dict[str, Any] = torch.load(path, map_location=self._device, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.losses = state["losses"]

    def export(self, folder: Path) -> None:
        """Writes the draft as it is now, as a checkpoint."""
        count = self.settings.draft_tokens
        tokens = None if count is None else common_tokens(self.store, count)
        self.model.save(folder, self._ends, tokens)


def start_draft(shape: DraftDesign, start: Path | None, seed: int) -> Draft:
    """The draft that training begins with, in float32: that in `start`, or a fresh one.

    What `start` lacks begins fresh: a DFlash draft's additions that make it a DFlash 2.
    """
    chain = EagleModel if shape.own_layer is None else MtpModel
    model: Draft = chain(shape) if shape.is_chain else DraftModel(shape)
    tensors = {} if start is None else open_checkpoint(start).tensors
    prefix = PREFIX if shape.kind == "MTP" else ""
    names = [name for name in model.state_dict() if prefix + name in tensors]
    if len(names) < len(model.state_dict()):
        initialise(model, shape.layers, seed)
    held = {name: read_tensor(tensors[prefix + name]).float() for name in names}
    model.load_state_dict(held, strict=False)
    return model


def _tokens_before(batch: Batch) -> Tensor:
    """The tokens [R, A, S - 1] before each label; anything where there is no label."""
    before = batch.labels[:, :, :-1].clamp(min=0)
    before[:, :, 0] = batch.anchor_ids
    return before


def learning_rate(settings: TrainerSettings, step: int) -> float:
    """Linear warm-up, then a cosine down to `floor` of the peak at the last step."""
    warm = max(1, round(settings.warmup * settings.steps))
    if step < warm:
        return settings.learning_rate * (step + 1) / warm
    done = (step - warm) / max(settings.steps - warm, 1)
    share = settings.floor + (1 - settings.floor) * (1 + math.cos(math.pi * done)) / 2
    return settings.learning_rate * share


def _optimizers(model: nn.Module, settings: TrainerSettings) -> list[torch.optim.Optimizer]:
    """Muon for matrices, AdamW for norms, and for tables of tokens, most of whose rows rest."""
    named = dict(model.named_parameters())
    fast = [one for name, one in named.items() if name.endswith(_FAST)]
    named = {name: one for name, one in named.items() if not name.endswith(_FAST)}
    matrices = [
        one for name, one in named.items() if one.ndim == 2 and not name.startswith("markov_head.")
    ]
    norms = [one for name, one in named.items() if one.ndim != 2 or name.startswith("markov_head.")]
    groups = [{"params": norms, "share": 1.0}]
    groups += [{"params": fast, "share": FAST_RATE}] * bool(fast)
    rate, dtype = settings.learning_rate, torch.bfloat16 if settings.is_bf16 else torch.float32
    return [
        Muon(matrices, lr=rate, weight_decay=settings.weight_decay, dtype=dtype),
        torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


class Muon(torch.optim.Optimizer):
    """Momentum whose matrices are made orthogonal (K. Jordan et al., 2024).

    As `torch.optim.Muon` with AdamW's scale, which always multiplies in bfloat16: a CPU without
    such instructions takes thirty times as long for that as for float32.

    Args:
        params: matrices.
        dtype: what the iteration multiplies in.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        *,
        lr: float,
        weight_decay: float,
        dtype: torch.dtype,
        momentum: float = 0.95,
    ) -> None:
        given = {"lr": lr, "share": 1.0, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__(params, given)
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of every matrix that has a gradient."""
        for group in self.param_groups:
            rate, momentum = group["lr"], group["momentum"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(weight)
                mean = state["momentum_buffer"].lerp_(weight.grad, 1 - momentum)
                update = orthogonal(weight.grad.lerp(mean, momentum), self._dtype)
                weight.mul_(1 - rate * group["weight_decay"])
                # The size that AdamW's updates have, so that both take the same rate.
                weight.add_(update, alpha=-rate * 0.2 * max(weight.shape) ** 0.5)


def orthogonal(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """About U·Vᵀ of a matrix U·S·Vᵀ, by Newton-Schulz; in the matrix' own type."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if is_tall else matrix).to(dtype)
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return (x.T if is_tall else x).to(matrix.dtype)
