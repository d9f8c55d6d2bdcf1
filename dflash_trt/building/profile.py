"""What `build --profile` means: limits, a precision, and the GPU to build engines for."""

from __future__ import annotations

from dflash_trt.backends.tensorrt.library import LIBRARIES
from dflash_trt.config import BuildConfig, HardwareProfile
from dflash_trt.errors import DflashError
from dflash_trt.hardware.table import find_gpu


def apply_profile(config: BuildConfig, profile: HardwareProfile) -> BuildConfig:
    """`config` with what `profile` says in its place.

    A precision replaces the configuration's for both models: the draft's was chosen for the old.
    """
    given = {"max_batch": profile.max_batch, "max_seq_len": profile.max_seq_len}
    update: dict[str, object] = {key: value for key, value in given.items() if value is not None}
    if profile.precision is not None:
        update |= {"precision": profile.precision, "draft_precision": None}
    return config.model_copy(update=update)


def profile_arch(profile: HardwareProfile, executor: str, arch: str | None) -> str:
    """The architecture to build engines for.

    Raises:
        DflashError: the CPU has no use for a profile, engines run on one GPU, or --arch is
            another than the profile's (usage).
    """
    what, fix = None, "leave it out"
    if executor not in LIBRARIES:
        what = f"profiles describe GPUs; executor {executor} has none"
    elif profile.gpus > 1:
        what = f"has {profile.gpus} GPUs; engines run on one"
        fix = "choose a profile of one GPU, or --executor trtllm"
    elif arch not in (None, find_gpu(profile.gpu).arch):
        what = f"is for {find_gpu(profile.gpu).arch}, --arch says {arch}"
        fix = "leave one of them out"
    if what is not None:
        raise DflashError(what, where="--profile", fix=fix, usage=True)
    return find_gpu(profile.gpu).arch
