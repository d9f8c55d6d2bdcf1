"""What of this project a GPU can run, and of each public pair how much fits: counted, never run.

One judgement for `targets`, `plan` and `doctor`. A deployment fits where the checks that write it
let it through, an engine where its memory does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dflash_trt.backends.tensorrt.library import LIBRARIES, library_arches
from dflash_trt.building.profile import on_profile, plain_profiles
from dflash_trt.bundle.memory.memory import engine_memory
from dflash_trt.bundle.memory.weight_bytes import (
    draft_weight_bytes,
    shape_weight_bytes,
    target_weight_bytes,
)
from dflash_trt.bundle.support import PLUGINS, TRTLLM, needing_plugins
from dflash_trt.core.formats import Format
from dflash_trt.core.limits import Limits
from dflash_trt.deploy.planning.known_pairs import PairShape, find_pair, pair_names
from dflash_trt.deploy.trtllm.deployment_plan import DeploymentOptions, fit_batch, plan_deployment
from dflash_trt.deploy.trtllm.deployment_rules import choose_backend
from dflash_trt.deploy.trtllm.trtllm_kernels import DOCUMENTED, DRAFT_PACKAGES
from dflash_trt.errors import DflashError
from dflash_trt.graph.form import GraphForm, Precision
from dflash_trt.hardware.chosen_gpu import Card
from dflash_trt.hardware.gpus import Arch, arches
from dflash_trt.models.build_config import BuildConfig, load_config

NEVER_RUN = "none of it has run on a GPU yet: memory is counted, speed unknown"
MOST_USERS = 64
"""Of engines: their linear caches are allocated whole, and larger batches seldom speculate."""
SHORTEST_CHUNK = 16
TEXTS = "TEXTS.jsonl"
"""Stands in commands for texts to quantise with."""


@dataclass(frozen=True, slots=True)
class Capability:
    """Says whether a part of this project runs on a GPU, and how or why not."""

    part: str
    able: bool
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOption:
    """Describes one build of a pair that fits.

    Args:
        precision: of the target: as published, or what it is to be quantised to.
        is_native: whether the GPU multiplies that; otherwise it becomes bf16 first.
        gpus: how many it takes.
        users: sequences of `context` tokens at once: of a deployment those that its profile's batch
            holds whole, of engines the largest power of two that fits, at most MOST_USERS.
        options: of `dflash-trt build --target NAME`.
        is_shipped: whether the configuration has the profile, with limits chosen for the GPU.
    """

    executor: str
    precision: Format
    is_native: bool
    gpus: int
    users: int
    context: int
    options: tuple[str, ...]
    is_shipped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOnGpu:
    """A public pair on a GPU.

    Args:
        published: what its experts, or else its linears, are published in.
        weights: bytes of target and draft as published.
        ways: those that fit, the one to use first.
        obstacles: what kept other ways from it, each once.
    """

    name: str
    published: Format
    weights: int
    ways: tuple[BuildOption, ...]
    obstacles: tuple[str, ...]

    def main_ways(self) -> list[BuildOption]:
        """The first of each kind: deployment and engines."""
        first = {way.executor == TRTLLM: way for way in reversed(self.ways)}
        return [way for way in self.ways if way in first.values()]


def capabilities(card: Card) -> list[Capability]:
    """What of this project runs on `card`, whatever the pair."""
    arch = arches().get(card.arch)
    if arch is None:
        known = ", ".join(arches())
        detail = f"nothing is known of {card.arch}, only of {known}"
        return [Capability("engines and deployments", False, detail)]
    return [_deployment_capability(card, arch), *_capabilities(arch)]


def _deployment_capability(card: Card, arch: Arch) -> Capability:
    part = "TensorRT-LLM deployments"
    if card.gpu is None:
        what = "their profiles are for GPUs that `plan --gpu` knows, which this one is not"
        return Capability(part, False, what)
    profiles = [one for name in pair_names() for one in load_config(name)[0].profiles.values()]
    ships = card.gpu.name in {one.gpu for one in profiles}
    profile = "" if ships else f" --profile {card.gpu.name}x1"
    backend = choose_backend(arch.name)
    packages = ", ".join(DRAFT_PACKAGES[backend].values())
    detail = f"--executor {TRTLLM}{profile}; the draft's attention is {backend}, of {packages}"
    if arch.name not in DOCUMENTED:
        detail += f"; its documents do not name {arch.name}"
    return Capability(part, True, detail)


def _capabilities(arch: Arch) -> Iterator[Capability]:
    """What an architecture itself has; a refusal where it lacks it."""
    for library in LIBRARIES.values():
        known, oldest = library_arches(library), ".".join(map(str, library.oldest))
        where = f"--arch {arch.name}, on any machine" if library.is_rtx else "on such a GPU"
        detail = f"--executor {library.executor} {where}; version {oldest} or newer"
        is_known = arch.name in known
        refusal = f"{library.name} builds for {', '.join(known)}"
        yield Capability(f"{library.name} engines", is_known, detail if is_known else refusal)
    detail = f"none for {arch.name}: TensorRT's attention, linear caches in the compute type"
    if arch.kernels is not None:
        gain = ", ".join([*needing_plugins(), "drawing on the GPU"])
        detail = f"{PLUGINS}, compiled for {arch.kernels}: {gain}"
    yield Capability("kernels of this project", arch.kernels is not None, detail)
    detail = ", ".join(arch.formats)
    if Format.NVFP4 not in arch.formats:
        detail = f"{detail or 'none'}; four-bit experts are multiplied in bf16"
    yield Capability("quantised products", bool(arch.formats), detail)


def judge_pairs(card: Card) -> list[PairOnGpu]:
    """Every public pair on `card`."""
    return [judge_pair(name, card) for name in pair_names()]


def judge_pair(name: str, card: Card, gpus: int = 1) -> PairOnGpu:
    """The pair `name` on `gpus` of `card` or more: one way for each executor that can hold it."""
    pair = find_pair(name)
    config, _ = load_config(name)
    deployments = list(_deployments(name, pair, card, gpus))
    engines = list(_engines(config, pair, card)) if gpus == 1 else []
    found = [one for one in (*deployments, *engines) if isinstance(one, BuildOption)]

    def rank(way: BuildOption) -> tuple[bool, int, bool, int]:
        """A profile that ships, if the GPUs suffice; then few GPUs, as published, most tokens."""
        ships = way.is_shipped and way.gpus == gpus
        return not ships, way.gpus, "--precision" in way.options, -way.users * way.context

    obstacles = dict.fromkeys(one for one in (*deployments, *engines) if isinstance(one, str))
    weights = target_weight_bytes(pair.target) + draft_weight_bytes(pair.draft)
    return PairOnGpu(
        name=name,
        published=pair.target.mlp_format,
        weights=int(weights),
        ways=tuple(sorted(found, key=rank)),
        obstacles=tuple(obstacles),
    )


def _precisions(pair: PairShape, formats: tuple[Format, ...]) -> tuple[Format | None, ...]:
    """As published, then what this project can quantise it to and the GPU multiplies."""
    is_plain = pair.target.experts is None and pair.target.mlp_format is Format.BF16
    return (None, *(formats if is_plain else ()))


def _deployments(name: str, pair: PairShape, card: Card, gpus: int) -> Iterator[BuildOption | str]:
    """The TensorRT-LLM deployment on the fewest GPUs; why fewer or the published do not do."""
    if card.gpu is None:
        return
    profiles = {k: p for k, p in plain_profiles(card.gpu).items() if p.gpus >= gpus}
    if not profiles:
        yield f"no profile of {gpus} or more {card.gpu.name}"
    for key in profiles:
        for precision in _precisions(pair, card.gpu.formats):
            try:
                yield _deployment(name, pair, key, precision)
                return
            except DflashError as error:
                yield error.what


def _deployment(name: str, pair: PairShape, profile: str, precision: Format | None) -> BuildOption:
    """A deployment on `profile`; DflashError where TensorRT-LLM would refuse it."""
    shipped, path = load_config(name)
    _, config = on_profile(shipped, profile, path)
    options: tuple[str, ...] = ("--executor", TRTLLM, "--profile", profile)
    if precision is not None:
        config = config.model_copy(update={"precision": precision, "draft_precision": None})
        options += ("--precision", precision, "--calibration", TEXTS)
    wanted = DeploymentOptions()
    if profile not in shipped.profiles:
        config = fit_batch(config, path, profile, pair, wanted)
    plan = plan_deployment(config, path, profile, pair, wanted)
    stored = plan.pair.target.mlp_format
    return BuildOption(
        executor=TRTLLM,
        precision=stored,
        is_native=plan.gpu.multiplies(stored),
        gpus=plan.profile.gpus,
        users=plan.whole_sequences,
        context=plan.max_seq_len,
        options=options,
        is_shipped=profile in shipped.profiles,
    )


def _engines(config: BuildConfig, pair: PairShape, card: Card) -> Iterator[BuildOption | str]:
    """One way for each library that builds engines for `card`, as little quantised as fits."""
    arch = arches().get(card.arch)
    if arch is None:
        yield f"nothing is known of {card.arch}"
        return
    for library in LIBRARIES.values():
        if arch.name not in library_arches(library):
            continue
        plugins = arch.kernels is not None and not library.is_rtx
        for precision in _precisions(pair, arch.formats):
            users = _engine_users(config, pair, card, precision, plugins=plugins)
            if users:
                break
            yield _too_large(config, pair, card, precision, plugins=plugins)
        else:
            continue
        options: tuple[str, ...] = ("--executor", library.executor)
        if library.is_rtx:
            options += ("--arch", arch.name)
        if plugins:
            options += (PLUGINS,)
        if precision is not None:
            options += ("--precision", precision, "--calibration", TEXTS)
        yield BuildOption(
            executor=library.executor,
            precision=precision or Format.BF16,
            is_native=True,
            gpus=1,
            users=users,
            context=config.max_seq_len,
            options=(*options, "--max-batch", str(users)),
        )


def _engine_users(
    config: BuildConfig, pair: PairShape, card: Card, precision: Format | None, *, plugins: bool
) -> int:
    """The largest power of two that engines on `card` hold at the configuration's length, or 0."""
    users, batch = 0, 1
    while batch <= MOST_USERS:
        if _engine_bytes(config, pair, batch, precision, plugins=plugins) > card.memory_bytes:
            break
        users, batch = batch, 2 * batch
    return users


def _too_large(
    config: BuildConfig, pair: PairShape, card: Card, precision: Format | None, *, plugins: bool
) -> str:
    """What one sequence takes, and whether shorter chunks of prompts would mend that."""

    def needed(chunk: int) -> int:
        shorter = config.model_copy(update={"prefill_chunk": chunk})
        return _engine_bytes(shorter, pair, 1, precision, plugins=plugins)

    chunk = config.prefill_chunk
    what = f"{precision or 'bf16'} engines take {needed(chunk) / 1e9:,.1f} GB for one user"
    while chunk > SHORTEST_CHUNK:
        chunk //= 2
        if needed(chunk) <= card.memory_bytes:
            return f"{what}, {needed(chunk) / 1e9:,.1f} with `prefill_chunk: {chunk}`"
    return what


def _engine_bytes(
    config: BuildConfig, pair: PairShape, batch: int, precision: Format | None, *, plugins: bool
) -> int:
    """What engines for `batch` sequences take in all."""
    target, draft = pair.target, pair.draft
    if precision is not None:
        target = target.in_format(precision)
        draft = draft.in_format(precision)
    weights = shape_weight_bytes(target, draft)
    block = config.block_size or draft.block_size
    replay = block if target.sizes.has_state else None
    form = GraphForm(precision=Precision.BFLOAT16, draws=plugins, replay=replay)
    limits = Limits(batch, config.max_seq_len, block, config.prefill_chunk)
    sizes = target.sizes, draft.sizes
    return int(engine_memory(*sizes, weights, target.vocab_size, limits, form).total)
