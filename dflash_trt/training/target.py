"""The target of a training: which it is, and the weights that a draft borrows of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional

from dflash_trt.bundle.bundle import open_bundle
from dflash_trt.bundle.manifest import MANIFEST_NAME, TOKENIZER_FOLDER
from dflash_trt.core.files import resolved
from dflash_trt.errors import DflashError, nearest
from dflash_trt.graph.form import CacheDtype
from dflash_trt.models.build_config import load_config, resolve_builtin, target_names
from dflash_trt.models.hub import find_checkpoint
from dflash_trt.models.quantized_weights import WEIGHT_SCALE, WEIGHT_SCALE_2, read_scalar
from dflash_trt.models.safetensors_header import TensorEntry
from dflash_trt.models.target import TargetSpec, read_target
from dflash_trt.quantization.codecs import dequantize_fp8, dequantize_nvfp4
from dflash_trt.text.tokenizer import BundleTokenizer

_HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class TrainingTarget:
    """What is trained for.

    Args:
        spec: the checkpoint, read from its header.
        tokenizer_folder: where tokenizer.json lies; beside the weights, but for a bundle.
        cache_dtype: what its KV caches hold: features depend on it.
        template_options: variables that the configuration gives every chat.
        name: what the draft's card calls it.
        int8: whether it computes in eight bits.
    """

    spec: TargetSpec
    tokenizer_folder: Path
    cache_dtype: CacheDtype
    template_options: Mapping[str, bool | str]
    name: str
    int8: bool = False

    @property
    def folder(self) -> Path:
        return self.spec.checkpoint.path

    def open_tokenizer(self) -> BundleTokenizer:
        return BundleTokenizer(self.tokenizer_folder)


def find_target(name: str) -> TrainingTarget:
    """The target called `name`: a folder, or a name that `targets` lists.

    Raises:
        DflashError: there is none, no tokenizer, or a model without graphs.
    """
    folder = Path(name).expanduser()
    if (folder / MANIFEST_NAME).is_file():
        manifest = open_bundle(folder).manifest
        weights, tokenizer = folder / "weights" / "target", folder / TOKENIZER_FOLDER
        dtype, name = CacheDtype(manifest.kv_dtype), manifest.target.checkpoint
        int8, spec = manifest.target.int8 is not None, read_target(weights)
        return _with_end_ids(TrainingTarget(spec, tokenizer, dtype, {}, name, int8))
    options: Mapping[str, bool | str] = {}
    if not folder.is_dir():
        if "/" not in name and name not in target_names():
            known = nearest(name, target_names())
            what = f"{name!r} is neither a folder nor a known target{known}"
            fix = "pass a checkpoint's folder, a bundle's, or a name of `dflash-trt targets`"
            raise DflashError(what, where="--target", fix=fix, usage=True)
        if name in target_names():
            config, path = load_config(name)
            options = config.chat_template_kwargs
            checkpoint = config.target.checkpoint
            folder = resolve_builtin(checkpoint) or find_checkpoint(
                checkpoint, base=path.parent, revision=config.target.revision, option="--target"
            )
        else:
            folder = find_checkpoint(name, base=Path(), revision=None, option="--target")
    target = TrainingTarget(
        read_target(folder), folder, CacheDtype.COMPUTE, options, resolved(folder).name
    )
    return _with_end_ids(target)


def _with_end_ids(target: TrainingTarget) -> TrainingTarget:
    """The target whose texts end where its tokenizer says so, too."""
    if not (target.tokenizer_folder / "tokenizer.json").is_file():
        raise DflashError(
            "has no tokenizer.json, which prompts need",
            where=target.tokenizer_folder,
            fix="download the checkpoint's tokenizer",
        )
    ends = target.open_tokenizer().end_ids(target.spec.eos_token_ids)
    return replace(target, spec=replace(target.spec, eos_token_ids=ends))


@dataclass(frozen=True, slots=True)
class TargetEnds:
    """A target's first and last weights, float32.

    Args:
        embedding, head: [V, H]; the same tensor where they are tied.
        norm: [H], before the head; `eps` is its.
        embedding_scale: what the stored embedding is multiplied by in `embedding`.
        logit_cap: c of logits c·tanh(l/c); None where they have none.
    """

    embedding: Tensor
    head: Tensor
    norm: Tensor
    eps: float
    embedding_scale: float = 1.0
    logit_cap: float | None = None

    def states(self, stream: Tensor) -> Tensor:
        """What the head reads of the last layer's residual stream [..., H]; float32."""
        norm = self.norm.to(stream.device)
        return functional.rms_norm(stream.float(), norm.shape, norm, self.eps)


def load_ends(target: TargetSpec) -> TargetEnds:
    """Reads them; a quantised head is decoded: those are the weights that serving multiplies."""
    embedding = read_tensor(target.weights["embed_tokens"]).float()
    head = embedding if target.tie_word_embeddings else _head(target)
    norm = read_tensor(target.weights["norm"]).float() + target.norm_offset
    if target.embedding_scale != 1.0:
        embedding = embedding * target.embedding_scale
    scale, cap = target.embedding_scale, target.logit_cap
    return TargetEnds(embedding, head, norm, target.rms_norm_eps, scale, cap)


def _head(target: TargetSpec) -> Tensor:
    weights = target.weights
    entry, scale = weights[_HEAD], weights.get(f"{_HEAD}.{WEIGHT_SCALE}")
    stored = read_tensor(entry)
    if scale is None:
        return stored.float()
    codes = stored.view(torch.uint8).numpy()
    if entry.dtype == "F8_E4M3":
        return torch.from_numpy(dequantize_fp8(codes, np.float32(read_scalar(scale))))
    whole = np.float32(read_scalar(weights[f"{_HEAD}.{WEIGHT_SCALE_2}"]))
    blocks = read_tensor(scale).view(torch.uint8).numpy()
    return torch.from_numpy(dequantize_nvfp4(codes, blocks, whole))


def read_tensor(entry: TensorEntry) -> Tensor:
    """A tensor as it is stored."""
    with safe_open(entry.file, "pt") as file:
        tensor: Tensor = file.get_tensor(entry.name)
    return tensor
