"""DFlash 2: a DFlash draft with two additions, as z-lab publishes it.

A grouped convolution of two taps lies around both sublayers of every layer, and a selector walks
through each slot's likeliest tokens, weighing them by the token before. Source: z-lab/dflash.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash_trt.models.config_fields import ConfigFields
from dflash_trt.models.weight_names import Rules, of_layer

NAME = "DFlash2"
"""What its architecture and its projector are told by."""
ARCHITECTURE = f"{NAME}DraftModel"
KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
"""Of its config, beside DFlash's."""
TAPS = 2
MAX_RANK = 1 << 14
MAX_CANDIDATES = 1024

WEIGHTS: Rules = {
    **of_layer("""
        attention_conv.base:attention_conv.base_kernel! ends taps hidden
        attention_conv.dynamic:attention_conv.kernel_projection kernels hidden
        mlp_conv.base:mlp_conv.base_kernel! ends taps hidden
        mlp_conv.dynamic:mlp_conv.kernel_projection kernels hidden
    """),
    "predecessors": ("candidate_selector.predecessor_codebook", ("vocab", "rank")),
    "successors": ("candidate_selector.successor_codebook", ("vocab", "rank")),
    "selector_gate": ("candidate_selector.hidden_projection.weight", ("rank", "hidden")),
}
"""Beside DFlash's. A convolution has kernels at both ends of its sublayer."""


@dataclass(frozen=True, slots=True)
class Dflash2Sizes:
    """`group` channels share a convolution's dynamic part; the selector has codes of `rank`
    elements and chooses among `top_k` tokens a slot."""

    group: int
    rank: int
    top_k: int

    def symbols(self, hidden_size: int) -> dict[str, int]:
        """The names that the shapes of `WEIGHTS` are written in, beside a decoder's."""
        kernels = 2 * TAPS * (hidden_size // self.group)
        return {"ends": 2, "taps": TAPS, "kernels": kernels, "rank": self.rank}

    def shapes(self, hidden_size: int, vocab_size: int, layers: int) -> dict[str, tuple[int, ...]]:
        """The additions' tensors: name → shape."""
        symbols = self.symbols(hidden_size) | {"hidden": hidden_size, "vocab": vocab_size}
        return {
            name.format(i=layer): tuple(symbols[term] for term in shape)
            for name, shape in WEIGHTS.values()
            for layer in (range(layers) if "{i}" in name else range(1))
        }


def is_stated(config: ConfigFields) -> bool:
    """Whether a config says that its draft is one, by architecture or ModelOpt's projector."""
    projector = config.child("dflash_config").values.get("projector_type")
    return config.values.get("architectures") == [ARCHITECTURE] or (
        isinstance(projector, str) and projector.lower() == NAME.lower()
    )


def read_dflash2(config: ConfigFields, hidden_size: int) -> Dflash2Sizes:
    """The additions' sizes; each key in dflash_config or at the top level.

    Raises:
        DflashError: a key that is missing or makes no sense, or a convolution of other taps.
    """
    inner = config.child("dflash_config")
    taps, group, rank, top_k = (config.either(inner, key) for key in KEYS)
    if taps.integer(KEYS[0]) != TAPS:
        raise taps.unsupported(KEYS[0], f"convolutions of {TAPS} taps are")
    channels = group.integer(KEYS[1])
    if hidden_size % channels:
        raise group.error(KEYS[1], f"must divide hidden_size ({hidden_size})")
    return Dflash2Sizes(
        channels,
        rank.integer(KEYS[2], high=MAX_RANK),
        top_k.integer(KEYS[3], high=min(MAX_CANDIDATES, config.integer("vocab_size"))),
    )
