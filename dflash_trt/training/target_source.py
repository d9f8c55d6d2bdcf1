"""The target of a training: a checkpoint, a bundle's weights, or a configuration's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from dflash_trt.bundle.bundle import open_bundle
from dflash_trt.bundle.manifest import MANIFEST_NAME, TOKENIZER_FOLDER
from dflash_trt.core.files import resolved
from dflash_trt.errors import DflashError, nearest
from dflash_trt.graph.form import CacheDtype
from dflash_trt.models.build_config import load_config, resolve_builtin, target_names
from dflash_trt.models.hub import find_checkpoint
from dflash_trt.models.target import TargetSpec, read_target
from dflash_trt.text.tokenizer import BundleTokenizer


@dataclass(frozen=True, slots=True)
class TrainingTarget:
    """What is trained for.

    Args:
        spec: the checkpoint, read from its header.
        tokenizer_folder: where tokenizer.json lies; beside the weights, but for a bundle.
        cache_dtype: what its KV caches hold: features depend on it.
        template_options: variables that the configuration gives every chat.
        name: what the draft's card calls it.
    """

    spec: TargetSpec
    tokenizer_folder: Path
    cache_dtype: CacheDtype
    template_options: Mapping[str, bool | str]
    name: str

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
        return _from_bundle(folder)
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
            found = resolve_builtin(checkpoint) or find_checkpoint(
                checkpoint, base=path.parent, revision=config.target.revision, option="--target"
            )
        else:
            found = find_checkpoint(name, base=Path(), revision=None, option="--target")
        folder = found
    target = TrainingTarget(
        read_target(folder), folder, CacheDtype.COMPUTE, options, resolved(folder).name
    )
    return _with_end_ids(target)


def _from_bundle(folder: Path) -> TrainingTarget:
    bundle = open_bundle(folder)
    target = TrainingTarget(
        read_target(folder / "weights" / "target"),
        folder / TOKENIZER_FOLDER,
        CacheDtype(bundle.manifest.kv_dtype),
        {},
        bundle.manifest.target.checkpoint,
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
