"""What TensorRT-LLM has kernels and parsers for, and what its back ends import, as data.

Sources: its MoE developer guide (capability matrix), pull request 7937 (MXFP4 on sm_120), its
DFlash attention (packages, page sizes, head sizes) and its reasoning parsers, all of 2026.
"""

from __future__ import annotations

from collections.abc import Mapping

from dflash_trt.core.formats import Format
from dflash_trt.deploy.trtllm.schema import AttentionBackend, MoeBackend

DRAFT_PACKAGES: Mapping[AttentionBackend, Mapping[str, str]] = {
    "VANILLA": {"flash_attn": "flash-attn"},
    "FA4": {"flash_attn.cute.interface": "flash-attn-4", "flashinfer": "flashinfer-python"},
    "TRTLLM": {"flashinfer": "flashinfer-python"},
}
"""What a draft's attention imports at its first step: modules, and the packages they come from."""

GUIDED_PACKAGES = {name: {name: name} for name in ("xgrammar", "llguidance")}
REJECTION_PACKAGES = {"flashinfer": "flashinfer-python"}

TRTLLM_PAGES = (16, 32, 64)
"""Tokens of a page that the TRTLLM backend of a draft has kernels for."""

DOCUMENTED = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121")
"""Architectures whose GPUs its page of supported hardware names, or its notes of release 0.20."""

_ANY = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121")
_SM100 = ("sm_100", "sm_103")
_SM120 = ("sm_120", "sm_121")

MOE_KERNELS: Mapping[MoeBackend, Mapping[Format, tuple[str, ...]]] = {
    "CUTLASS": {
        Format.BF16: _ANY,
        Format.FP8: ("sm_89", "sm_90", *_SM100, *_SM120),
        Format.NVFP4: (*_SM100, *_SM120),
        Format.MXFP4: ("sm_90", *_SM100, *_SM120),
    },
    "TRTLLM": {Format.BF16: _SM100, Format.NVFP4: _SM100, Format.MXFP4: _SM100},
    "CUTEDSL": {Format.NVFP4: (*_SM100, *_SM120)},
    "DENSEGEMM": {Format.NVFP4: _SM100},
    "MARLIN": {Format.NVFP4: ("sm_89", "sm_90")},
    "TRITON": {Format.MXFP4: ("sm_90",)},
}
"""Experts that a back end multiplies, by format and architecture.

Those that are missing serve none of this project's formats: DEEPGEMM block-scaled FP8, MEGAMOE_*
what needs a library besides, VANILLA is for debugging. Where a back end cannot serve a layer,
TensorRT-LLM runs CUTLASS in its place and says so in its log.
"""

CUTEDSL_ALONE = _SM120
"""Where CUTEDSL takes neither expert parallelism nor attention data parallelism."""


def default_moe_backend(experts: Format, arch: str) -> MoeBackend:
    """What TensorRT-LLM's AUTO chooses: MXFP4 experts are gpt-oss's."""
    if experts is Format.MXFP4 and arch in _SM100:
        return "TRTLLM"
    return "TRITON" if experts is Format.MXFP4 and arch == "sm_90" else "CUTLASS"


def moe_backends(experts: Format, arch: str) -> list[MoeBackend]:
    """The back ends that multiply experts of that format on `arch`."""
    return [name for name, formats in MOE_KERNELS.items() if arch in formats.get(experts, ())]


REASONING_PARSERS: Mapping[str, tuple[str, ...]] = {
    "Qwen3ForCausalLM": ("qwen3",),
    "Qwen3MoeForCausalLM": ("qwen3",),
    "LlamaForCausalLM": (),
    "GptOssForCausalLM": (),
}
"""Parsers of a family's thinking; trtllm-serve reads gpt-oss's Harmony format by itself."""
