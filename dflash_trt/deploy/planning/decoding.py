"""Ways to decode, each as the passes that one of its steps takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from dflash_trt.deploy.planning.acceptance_rates import AcceptanceCurve
from dflash_trt.deploy.planning.cost import PassCost, Replica, Seconds
from dflash_trt.models.dflash2 import Dflash2Sizes
from dflash_trt.models.draft_kinds import DraftKind
from dflash_trt.models.eagle import default_taps
from dflash_trt.models.sizes import DecoderSizes, DraftShape, TargetShape

Kind = Literal["autoregressive", DraftKind]
EAGLE_VOCAB = 32_000
"""EAGLE-3 drafts choose among this many frequent tokens (as published heads do)."""
MARKOV_RANK = 256
"""Of a DSpark draft's head that corrects a slot's logits by the token before (arXiv 2607.05147)."""

DFLASH2 = Dflash2Sizes(group=16, rank=256, top_k=16)
"""Of a DFlash 2 draft, as z-lab's are."""


def _target_pass(
    replica: Replica, target: TargetShape, batch: int, rows: int, context: float, extra: int = 0
) -> Seconds:
    head = target.vocab_weights
    work = PassCost(target, batch, rows, context, rows, head, extra_weights=extra)
    return replica.time(work)


def prefill(replica: Replica, target: TargetShape, tokens: int) -> float:
    """Seconds of a prompt on a replica; GPUs with sequences of their own prefill one each."""
    prompts = 1 if replica.layout.attention == "tensor" else replica.layout.gpus
    work = PassCost(target, prompts, tokens, tokens / 2, 1, target.vocab_weights)
    return replica.time(work).total / prompts


@dataclass(frozen=True, slots=True)
class Autoregressive:
    """One token a step; scheduling overlaps with the GPU's work."""

    target: TargetShape
    kind: ClassVar[Kind] = "autoregressive"
    draft: ClassVar[None] = None

    def drafts(self) -> range:
        """How many tokens a step may draft."""
        return range(1)

    def verified(self, drafts: int) -> int:
        """Rows per sequence of the target's pass."""
        return 1

    def tau(self, drafts: int) -> float:
        """Tokens that a step emits."""
        return 1.0

    def step(self, replica: Replica, batch: int, context: float, drafts: int) -> Seconds:
        """Duration of a step of `batch` sequences that hold `context` tokens each."""
        return _target_pass(replica, self.target, batch, 1, context)


@dataclass(frozen=True, slots=True)
class DFlash:
    """A block from one draft pass, verified by one target pass that injects the draft's context."""

    target: TargetShape
    draft: DraftShape
    acceptance: AcceptanceCurve
    kind: ClassVar[Kind] = "DFlash"

    def drafts(self) -> range:
        return self.acceptance.drafts(self.draft.block_size - 1)

    def verified(self, drafts: int) -> int:
        return drafts + 1

    def tau(self, drafts: int) -> float:
        return self.acceptance.tau(drafts)

    def step(self, replica: Replica, batch: int, context: float, drafts: int) -> Seconds:
        model, block, head = self.draft, drafts + 1, self.target.vocab_weights
        injection = model.sizes.hidden_size * sum(one.kv_elements for one in model.sizes.layers)
        extra = self.draft.fc_weights + injection
        verify = _target_pass(replica, self.target, batch, block, context, extra)
        own = PassCost(
            model, batch, block, context + block, drafts, head, extra_weights=self.beside
        )
        return verify + replica.time(own) + replica.step_overhead

    @property
    def beside(self) -> int:
        """Weights that rows of the draft's pass go through beside its layers."""
        return 0


@dataclass(frozen=True, slots=True)
class DFlash2(DFlash):
    """DFlash's passes with convolutions, then the likeliest tokens of each slot, and a walk.

    Finding those reads all logits once more; the walk reads the codes of `top_k` tokens of a slot.
    Their kernels, with those of the convolutions, are taken to wait for each other as a layer's
    do: published is that all of it adds 1.3 % to a cycle.
    """

    kind: ClassVar[Kind] = "DFlash 2"

    @property
    def beside(self) -> int:
        return replace(self.draft, vocab_size=0, dflash2=self.additions).dflash2_weights

    @property
    def additions(self) -> Dflash2Sizes:
        """The draft's own sizes; z-lab's of a draft that is another kind's."""
        return self.draft.dflash2 or DFLASH2

    def step(self, replica: Replica, batch: int, context: float, drafts: int) -> Seconds:
        codes = self.additions.top_k * self.additions.rank
        chosen = replica.reading(batch, drafts * (self.target.vocab_size + codes))
        step = DFlash.step(self, replica, batch, context, drafts)
        return step + chosen + replica.layer_overhead


@dataclass(frozen=True, slots=True)
class DSpark(DFlash):
    """DFlash's passes, then a Markov head of low rank over its logits, slot after slot.

    The head is read once for every slot. Its launches are not counted: its paper measures at most
    1.3 % of a step for all of it. Neither is the confidence head, nor the memory of both.
    """

    kind: ClassVar[Kind] = "DSpark"

    def step(self, replica: Replica, batch: int, context: float, drafts: int) -> Seconds:
        rank = self.draft.markov_rank or MARKOV_RANK
        head = replica.matrix(batch, rank * self.target.vocab_size)
        return DFlash.step(self, replica, batch, context, drafts) + head * drafts


@dataclass(frozen=True, slots=True)
class DraftTree:
    """What EAGLE-3 drafts: `depth` passes of `width` rows, of which `verified` tokens are verified.

    A chain has width 1 and verifies depth + 1 rows, the last token included.
    """

    depth: int
    width: int
    verified: int


@dataclass(frozen=True, slots=True)
class Eagle3:
    """A one-layer draft that runs once for every level of its tree (arXiv 2503.01840).

    Its layer has the target's attention and a dense MLP as wide as what a token goes through; its
    q, k and v take the embedding beside the feature. A shallower tree verifies proportionally less.
    """

    target: TargetShape
    acceptance: AcceptanceCurve
    tree: DraftTree
    kind: ClassVar[Kind] = "EAGLE-3"

    @property
    def draft(self) -> DraftShape:
        sizes = self.target.sizes
        per_token = 1 if sizes.experts is None else sizes.experts.chosen
        return DraftShape(
            sizes=DecoderSizes(
                hidden_size=sizes.hidden_size,
                intermediate_size=per_token * sizes.mlp_size,
                layers=(sizes.layer,),
            ),
            max_position_embeddings=self.target.max_position_embeddings,
            block_size=self.tree.depth + 1,
            mask_token_id=0,
            target_layer_ids=default_taps(len(sizes.layers)),
        )

    def drafts(self) -> range:
        return self.acceptance.drafts(self.tree.depth)

    def verified(self, drafts: int) -> int:
        return max(drafts + 1, round(self.tree.verified * drafts / self.tree.depth))

    def tau(self, drafts: int) -> float:
        return self.acceptance.tau(drafts)

    def step(self, replica: Replica, batch: int, context: float, drafts: int) -> Seconds:
        model, width = self.draft, self.tree.width
        hidden = model.sizes.hidden_size
        verify = _target_pass(replica, self.target, batch, self.verified(drafts), context)
        head = EAGLE_VOCAB * hidden
        beside = hidden * model.sizes.layer.projection_elements  # the embedding's half of q, k, v
        extra = beside + model.fc_weights
        first = PassCost(model, batch, drafts + 1, context, 1, head, extra_weights=extra)
        deep = context + drafts
        later = PassCost(model, batch, width, deep, width, head, extra_weights=beside)
        levels = replica.time(first) + replica.time(later) * (drafts - 1)
        return verify + levels + replica.step_overhead


@dataclass(frozen=True, slots=True)
class Mtp(DFlash):
    """The target's own layer, which runs once for every draft over all of the vocabulary.

    `fc` takes the embedding and the output, in the target's pass as in each of its own.
    """

    kind: ClassVar[Kind] = "MTP"

    def step(self, replica: Replica, batch: int, context: float, drafts: int) -> Seconds:
        model, head, fused = self.draft, self.target.vocab_weights, self.draft.fc_weights
        beside = fused + model.sizes.hidden_size * model.sizes.layer.kv_elements
        verify = _target_pass(replica, self.target, batch, drafts + 1, context, beside)
        own = PassCost(model, batch, 1, context + drafts, 1, head, extra_weights=fused)
        return verify + replica.time(own) * drafts + replica.step_overhead


Speculative = DFlash | DFlash2 | DSpark | Eagle3 | Mtp
Decoding = Autoregressive | Speculative
"""A way to decode a target; a value, so that answers about it can be kept."""
