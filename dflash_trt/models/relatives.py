"""Drafters that look like DFlash but compute something else: known by name, to be refused.

DSpark is read in DeepSpec's layout (deepspec.py) and speculators', EAGLE-3 in those of eagle.py;
in others they are refused.

Sources: z-lab/dflash (DFlash2), NVIDIA Model Optimizer's exporters (DSpark, EAGLE-3),
arXiv 2605.29707 (Domino), 2606.18394 (JetSpec), 2504.18583 (PARD), 2401.10774 (Medusa).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dflash_trt.core.strict_json import quoted
from dflash_trt.errors import DflashError
from dflash_trt.models.config_fields import ConfigFields


@dataclass(frozen=True, slots=True)
class Relative:
    """How to tell a drafter: its lower-case `name` in an architecture or projector, or other marks.

    `tensors` are found anywhere in a tensor's name, `keys` are of config.json. `stated` is the
    architecture by which it is read.
    """

    name: str
    tensors: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    projectors: tuple[str, ...] = ()
    stated: str = ""

    def called(self, evidence: str) -> str:
        article = "an" if self.name.startswith("E") else "a"
        return f"{article} {self.name} drafter ({evidence})"


SPECULATORS_KIND = "speculators_model_type"
"""What alone says which kind a draft in speculators' layout is."""
SPECULATORS_EAGLE = "eagle3"
SPECULATORS_DRAFTS = ("dflash", "dspark", "dflash2")
"""Those that are read beside it."""

RELATIVES: tuple[Relative, ...] = (
    Relative(
        "DFlash2",
        ("candidate_selector.", "attention_conv.", "mlp_conv."),
        ("selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size"),
        stated="DFlash2DraftModel",
    ),
    Relative(
        "DSpark",
        ("markov_", "confidence_"),
        ("markov_rank", "markov_head_type", "use_confidence_head"),
    ),
    Relative(
        "Domino",
        ("prefix_gru.", "embed_proj."),
        ("gru_hidden_dim", "pure_draft_prefix_len"),
        ("causal_v5",),
    ),
    Relative("JetSpec"),
    Relative("PEagle"),
    Relative("EAGLE", ("midlayer.", "d2t", "t2d"), ("eagle_config",)),
    Relative("PARD", (), ("pard_token",)),
    Relative("Medusa", ("medusa_head",), ("medusa_num_heads",)),
)


def read_architecture(config: ConfigFields) -> str:
    """The one name under `architectures`."""
    names = config.values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise config.error("architectures", "must be a list of one architecture name")
    return names[0]


def refuse_relatives(
    config: ConfigFields, known: str | None = None, tensors: Iterable[str] = ()
) -> None:
    """Raises DflashError for a relative other than `known`, by its config or a tensor's name."""
    if config.has(SPECULATORS_KIND):  # a config of speculators has keys of other kinds too
        kind = config.text(SPECULATORS_KIND)
        if kind not in (SPECULATORS_EAGLE, *SPECULATORS_DRAFTS):
            evidence = f"{SPECULATORS_KIND} {quoted(kind)}"
            raise _refusal(config, f"a draft in speculators' layout ({evidence})")
        return
    inner = config.child("dflash_config")
    architecture = read_architecture(config)
    projector = str(inner.values.get("projector_type") or "").lower()
    others = [one for one in RELATIVES if one.name != known]
    for relative in others:  # what a draft says of itself tells more than a stray key
        name = relative.name.lower()
        if name in architecture.lower():
            raise _refusal(config, relative.called(f"architecture {quoted(architecture)}"))
        if projector in (name, *relative.projectors):
            raise _refusal(config, relative.called(f"projector_type {quoted(projector)}"))
    for relative in others:
        for key in relative.keys:
            if config.has(key) or inner.has(key):
                raise _refusal(config, relative.called(f"config key {quoted(key)}"), relative)
        for tensor in tensors:
            if any(mark in tensor.lower() for mark in relative.tensors):
                raise _refusal(config, relative.called(f"tensor {quoted(tensor)}"), relative)


def _refusal(config: ConfigFields, called: str, marked: Relative | None = None) -> DflashError:
    if marked is not None and marked.stated:  # it would be read, if it said what it is
        what = f"is {called}, which its architecture does not say"
        fix = f'if it is one, its "architectures" must be ["{marked.stated}"]'
        return DflashError(what, where=config.where, fix=fix)
    return DflashError(
        f"is {called}, which is not supported",
        where=config.where,
        fix="pass a draft of DFlash (DFlashDraftModel), DFlash 2 (DFlash2DraftModel), DSpark in "
        "DeepSpec's layout (Qwen3DSparkModel) or EAGLE-3 (LlamaForCausalLMEagle3), or one of these "
        "in speculators' layout",
    )
