"""A target's mixture of experts, as its config states it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from dflash_trt.core.formats import MX_BLOCK, NVFP4_BLOCK
from dflash_trt.models.config_fields import ConfigFields
from dflash_trt.models.families import ExpertRules, Family, Routing
from dflash_trt.models.quantization import WEIGHTS_ONLY, Quantization
from dflash_trt.models.sizes import MAX_WIDTH, ExpertSizes
from dflash_trt.models.weight_names import ExpertStorage

MAX_EXPERTS = 1 << 12

EXPERT_STORAGE: Mapping[str | None, ExpertStorage] = {"MXFP4": "MXFP4", WEIGHTS_ONLY: "NVFP4"}
"""How experts are stored, by the algorithm that a config states; else as floats."""

DEFAULT_CLAMP = 7.0
DEFAULT_GAIN = 1.702
"""gpt-oss's."""


@dataclass(frozen=True, slots=True)
class Clamp:
    """gpt-oss's SwiGLU: (clip(up, ±limit) + 1) · g · sigmoid(gain · g), g = min(gate, limit)."""

    limit: float
    gain: float


@dataclass(frozen=True, slots=True)
class MoeSpec(ExpertSizes):
    """How a layer's experts are chosen, computed and stored.

    `routing` "chosen": softmax over the chosen experts' logits. "all": softmax over all of them,
    of which the chosen keep their share, scaled to a sum of 1 where `is_normalized`. `clamp` None
    is plain SwiGLU.
    """

    routing: Routing
    is_normalized: bool
    clamp: Clamp | None
    storage: ExpertStorage

    def symbols(self, hidden_size: int) -> dict[str, int]:
        """The names that shapes of expert weights are written in."""
        return {
            "experts": self.experts,
            "expert_ffn": self.intermediate_size,
            "gate_up": 2 * self.intermediate_size,
            "hidden_blocks": hidden_size // MX_BLOCK,
            "ffn_blocks": self.intermediate_size // MX_BLOCK,
            "block_bytes": MX_BLOCK // 2,
            "hidden_bytes": hidden_size // 2,
            "ffn_bytes": self.intermediate_size // 2,
            "hidden_steps": hidden_size // NVFP4_BLOCK,
            "ffn_steps": self.intermediate_size // NVFP4_BLOCK,
            "one": 1,
        }


def read_expert_sizes(config: ConfigFields, rules: ExpertRules) -> ExpertSizes:
    """How many experts, and how wide; DflashError for layers without experts among them."""
    for key, usual in (("decoder_sparse_step", 1), ("mlp_only_layers", [])):
        if config.values.get(key) not in (None, usual):
            raise config.unsupported(key, "every layer must have experts")
    size = config.integer(rules.size_key, high=MAX_WIDTH)
    count_key = next(filter(config.has, rules.count_keys), rules.count_keys[0])
    experts = config.integer(count_key, low=2, high=MAX_EXPERTS)
    chosen = config.integer(rules.chosen_key, high=experts)
    shared = config.integer(rules.shared_key, high=MAX_WIDTH) if rules.shared_key else 0
    return ExpertSizes(experts, chosen, size, shared=shared)


def read_moe(
    config: ConfigFields, family: Family, hidden_size: int, quantization: Quantization | None
) -> MoeSpec | None:
    """The experts of `config`; None for a dense family.

    Raises:
        DflashError: sizes that contradict each other, or layers without experts among them.
    """
    rules = family.experts
    if rules is None:
        return None
    sizes = read_expert_sizes(config, rules)
    storage = EXPERT_STORAGE.get(None if quantization is None else quantization.algorithm, "float")
    step = {"float": 2, "MXFP4": MX_BLOCK, "NVFP4": NVFP4_BLOCK}[storage]
    for key, value in ((rules.size_key, sizes.intermediate_size), ("hidden_size", hidden_size)):
        if value % step:
            raise config.error(key, f"must be a multiple of {step} for experts")
    is_normalized = config.flag("norm_topk_prob", rules.is_normalized)
    if rules.is_normalized and not is_normalized:
        raise config.unsupported("norm_topk_prob", "it must be true")
    clamp = None
    if rules.is_clamped:
        limit = config.number("swiglu_limit", DEFAULT_CLAMP)
        clamp = Clamp(limit, config.number("swiglu_alpha", DEFAULT_GAIN))
    return MoeSpec(
        **asdict(sizes),
        routing=rules.routing,
        is_normalized=is_normalized,
        clamp=clamp,
        storage=storage,
    )
