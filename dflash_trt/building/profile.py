"""The hardware profile of a build: a configuration's own, or plain GPUs by name and number."""

from __future__ import annotations

from pathlib import Path

from dflash_trt.errors import DflashError, nearest, one_line
from dflash_trt.hardware.gpus import Gpu, find_gpu, gpu_names
from dflash_trt.models.build_config import BuildConfig, HardwareProfile

MOST_PLAIN = 8


def plain_profiles(gpu: Gpu) -> dict[str, HardwareProfile]:
    """1, 2, 4 and 8 of `gpu`, as many as its link joins, by name: "l40sx2" is two L40S.

    They say nothing of limits: deployments get the batch that fits, engines the configuration's.
    """
    counts = (1 << power for power in range(min(gpu.link_gpus, MOST_PLAIN).bit_length()))
    return {
        f"{gpu.name}x{count}": HardwareProfile(
            gpu=gpu.name,
            gpus=count,
            nodes=max(1, count // gpu.node_gpus),
            tensor_parallel=count,
        )
        for count in counts
    }


def is_plain(name: str, profile: HardwareProfile) -> bool:
    """Whether `profile` says no more than its name does."""
    known = profile.gpu.lower() in gpu_names()
    return known and profile == plain_profiles(find_gpu(profile.gpu)).get(name)


def _plain(name: str, config: BuildConfig, path: Path) -> tuple[str, BuildConfig]:
    """`name` as `config` has it, in any case of letters; `config` with plain GPUs of that name.

    Raises:
        DflashError: a GPU that is known, in a number that is no profile (usage).
    """
    lower = name.lower()
    gpu = lower.rpartition("x")[0]
    if lower in config.profiles or gpu not in gpu_names():
        return (lower if lower in config.profiles else name), config
    plain = plain_profiles(find_gpu(gpu))
    if lower not in plain:
        own = [key for key in config.profiles if key.startswith(f"{gpu}x")]
        raise DflashError(
            f"no profile {one_line(name, 40)!r} in {path.name}, and no such number of {gpu}",
            where="--profile",
            fix=f"choose one of {', '.join(dict.fromkeys([*plain, *own]))}",
            usage=True,
        )
    return lower, config.model_copy(update={"profiles": config.profiles | {lower: plain[lower]}})


def on_profile(config: BuildConfig, name: str | None, path: Path) -> tuple[str, BuildConfig]:
    """The profile called `name`, or the only one; and `config` with its limits and precision.

    Raises:
        DflashError: no such profile (with the nearest), or several to choose from (usage).
    """
    if name is not None and name not in config.profiles:
        name, config = _plain(name, config, path)
    names = list(config.profiles)
    if name is None and len(names) == 1:
        name = names[0]
    if name is None or name not in config.profiles:
        unknown = "which profile of" if name is None else f"no profile {one_line(name, 40)!r} in"
        if not names:
            what = f"{path.name} has no hardware profiles"
            fix = "add `profiles: {NAME: {gpu: …, gpus: …, tensor_parallel: …}}` to a copy of it"
        else:
            what = f"{unknown} {path.name}{'' if name is None else nearest(name, names)}"
            fix = f"choose one of {', '.join(names)}"
        raise DflashError(what, where="--profile", fix=fix, usage=True)
    profile = config.profiles[name]
    given = {"max_batch": profile.max_batch, "max_seq_len": profile.max_seq_len}
    update: dict[str, object] = {key: value for key, value in given.items() if value is not None}
    if profile.precision is not None:
        update |= {"precision": profile.precision, "draft_precision": None}
    return name, config.model_copy(update=update)
