"""Three ways to decode, each as the passes that one of its steps takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from dflash_trt.checkpoints.sizes import DecoderSizes
from dflash_trt.memory.shape import DraftShape, ModelShape
from dflash_trt.planning.acceptance import AcceptanceCurve
from dflash_trt.planning.cost import PassCost, Replica, Seconds

Kind = Literal["autoregressive", "EAGLE-3", "DFlash"]
EAGLE_TAPS = 3
EAGLE_VOCAB = 32_000
"""EAGLE-3 drafts choose among this many frequent tokens (as published heads do)."""


class Decoding(Protocol):
    """A way to decode a target; a value, so that answers about it can be kept."""

    def __hash__(self) -> int: ...

    @property
    def target(self) -> ModelShape: ...

    @property
    def kind(self) -> Kind: ...

    @property
    def draft(self) -> DraftShape | None:
        """What takes memory besides the target."""
        ...

    def drafts(self) -> Iterator[int]:
        """How many tokens a step may draft."""
        ...

    def verified(self, drafts: int) -> int:
        """Rows per sequence of the target's pass."""
        ...

    def tau(self, drafts: int) -> float:
        """Tokens that a step emits."""
        ...

    def step(self, replica: Replica, batch: int, context: float, drafts: int) -> Seconds:
        """Duration of a step of `batch` sequences that hold `context` tokens each."""
        ...


def _target_pass(
    replica: Replica, target: ModelShape, batch: int, rows: int, context: float, extra: int = 0
) -> Seconds:
    work = PassCost(
        model=target,
        sequences=batch,
        rows=rows,
        context=context,
        head_rows=rows,
        head_weights=target.vocab_weights,
        extra_weights=extra,
    )
    return replica.time(work)


def prefill(replica: Replica, target: ModelShape, tokens: int) -> float:
    """Seconds of a prompt of `tokens` tokens, on a replica that does nothing else.

    GPUs with sequences of their own prefill one each at the same time.
    """
    prompts = 1 if replica.layout.attention == "tensor" else replica.layout.gpus
    work = PassCost(
        model=target,
        sequences=prompts,
        rows=tokens,
        context=tokens / 2,
        head_rows=1,
        head_weights=target.vocab_weights,
    )
    return replica.time(work).total / prompts


@dataclass(frozen=True, slots=True)
class Autoregressive:
    """One token a step; scheduling overlaps with the GPU's work."""

    target: ModelShape
    kind: Kind = "autoregressive"
    draft: DraftShape | None = None

    def drafts(self) -> Iterator[int]:
        yield 0

    def verified(self, drafts: int) -> int:
        return 1

    def tau(self, drafts: int) -> float:
        return 1.0

    def step(self, replica: Replica, batch: int, context: float, drafts: int) -> Seconds:
        return _target_pass(replica, self.target, batch, 1, context)


@dataclass(frozen=True, slots=True)
class DFlash:
    """A block from one draft pass, verified by one target pass that injects the draft's context."""

    target: ModelShape
    draft: DraftShape
    acceptance: AcceptanceCurve
    kind: Kind = "DFlash"

    def drafts(self) -> Iterator[int]:
        yield from range(1, min(self.draft.block_size - 1, len(self.acceptance.conditional)) + 1)

    def verified(self, drafts: int) -> int:
        return drafts + 1

    def tau(self, drafts: int) -> float:
        return self.acceptance.tau(drafts)

    def step(self, replica: Replica, batch: int, context: float, drafts: int) -> Seconds:
        model, block = self.draft.model, drafts + 1
        injection = model.sizes.hidden_size * sum(one.kv_elements for one in model.sizes.layers)
        verify = _target_pass(
            replica, self.target, batch, block, context, self.draft.fc_weights + injection
        )
        draft = PassCost(
            model=model,
            sequences=batch,
            rows=block,
            context=context + block,
            head_rows=drafts,
            head_weights=self.target.vocab_weights,
        )
        overhead = Seconds(host=replica.calibration.step_overhead_us * 1e-6)
        return verify + replica.time(draft) + overhead


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

    target: ModelShape
    acceptance: AcceptanceCurve
    tree: DraftTree
    kind: Kind = "EAGLE-3"

    @property
    def draft(self) -> DraftShape:
        return DraftShape(
            model=eagle_model(self.target),
            block_size=self.tree.depth + 1,
            taps=EAGLE_TAPS,
            target_hidden=self.target.sizes.hidden_size,
        )

    def drafts(self) -> Iterator[int]:
        yield from range(1, min(self.tree.depth, len(self.acceptance.conditional)) + 1)

    def verified(self, drafts: int) -> int:
        return max(drafts + 1, round(self.tree.verified * drafts / self.tree.depth))

    def tau(self, drafts: int) -> float:
        return self.acceptance.tau(drafts)

    def step(self, replica: Replica, batch: int, context: float, drafts: int) -> Seconds:
        draft = self.draft
        model = draft.model
        verify = _target_pass(replica, self.target, batch, self.verified(drafts), context)
        # The embedding's half of q, k and v.
        beside = model.sizes.hidden_size * model.sizes.layer.projection_elements
        head = EAGLE_VOCAB * model.sizes.hidden_size
        first = PassCost(
            model=model,
            sequences=batch,
            rows=drafts + 1,
            context=context,
            head_rows=1,
            head_weights=head,
            extra_weights=beside + draft.fc_weights,
        )
        later = PassCost(
            model=model,
            sequences=batch,
            rows=self.tree.width,
            context=context + drafts,
            head_rows=self.tree.width,
            head_weights=head,
            extra_weights=beside,
        )
        overhead = Seconds(host=replica.calibration.step_overhead_us * 1e-6)
        return verify + replica.time(first) + replica.time(later) * (drafts - 1) + overhead


def eagle_model(target: ModelShape) -> ModelShape:
    """The layer of an EAGLE-3 draft for `target`."""
    sizes = target.sizes
    per_token = 1 if sizes.experts is None else sizes.experts.chosen
    return ModelShape(
        sizes=DecoderSizes(
            hidden_size=sizes.hidden_size,
            intermediate_size=per_token * sizes.mlp_size,
            layers=(sizes.layer,),
        ),
        vocab=target.vocab,
        max_context=target.max_context,
    )
