"""Writes a TensorRT-LLM deployment: YAML files, Triton repositories, sweeps, README, weights."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import yaml

from dflash_trt.core.files import find_file
from dflash_trt.core.links import check_copies, copy_file, place_files
from dflash_trt.core.progress import Progress
from dflash_trt.core.publish import staged_folder
from dflash_trt.deploy.other_engines import SERVED, serving_command
from dflash_trt.deploy.trtllm.arguments import (
    MOUNT,
    SPLIT_PORTS,
    Sources,
    model_arguments,
    packages,
    router_file,
    serve_arguments,
    split_arguments,
)
from dflash_trt.deploy.trtllm.deployment_plan import DeploymentPlan
from dflash_trt.deploy.trtllm.deployment_record import (
    DEPLOYMENT,
    OWN_DRAFTS,
    RECORD_NAME,
    ROUTER_FILE,
    TITLES,
    Deployment,
    DeploymentMemory,
    Variant,
    yaml_files,
)
from dflash_trt.deploy.trtllm.deployment_rules import check_deployed
from dflash_trt.deploy.trtllm.trtllm_kernels import REASONING_PARSERS
from dflash_trt.errors import DflashError
from dflash_trt.hardware.gpus import LEAST_MEMORY
from dflash_trt.models.draft_kinds import DraftKind
from dflash_trt.version import __version__

INTERACTIVITY = "200,500"
CHECKPOINT_SUFFIXES = (".json", ".safetensors", ".jinja", ".txt", ".model", ".tiktoken")
"""What TensorRT-LLM reads of a checkpoint: no code, no pickles."""
OTHERS_DRAFT: dict[Variant, DraftKind] = {"dflash": "DFlash", "mtp": "MTP"}
"""What vLLM and SGLang call a variant's draft, where both document it."""
_SWEEP_OSL = 1024


def describe_deployment(plan: DeploymentPlan, sources: Sources) -> Deployment:
    """The record of a deployment, whose LLM arguments are checked.

    Raises:
        DflashError: arguments that TensorRT-LLM would refuse or compute wrongly (usage).
    """
    locations = sources.locations
    deployment = Deployment(
        name=plan.name,
        created_by=f"dflash-trt {__version__}",
        tensorrt_llm=plan.version.name,
        checked=plan.version.documented,
        profile_name=plan.profile_name,
        profile=plan.profile,
        target=locations["target"],
        draft=locations.get("draft"),
        eagle3=locations.get("eagle3"),
        precision=dict(sources.precision),
        variants=sources.variants,
        max_batch=plan.max_batch,
        max_seq_len=plan.max_seq_len,
        max_draft_len=plan.max_draft_len,
        trained_block=plan.pair.draft.block_size,
        architecture=plan.pair.architecture,
        experts=plan.pair.target.experts_format,
        windows=plan.pair.target.has_windows,
        recurrent=plan.pair.target.sizes.has_state,
        attention_backend=plan.backend,
        llm_args=plan.options.model_dump(exclude_unset=True),
        memory=_memory(plan),
    )
    for variant in sources.variants:
        for arguments in _arguments(plan, sources, variant):
            check_deployed(arguments, deployment, plan.where)
    return deployment


def write_deployment(
    plan: DeploymentPlan,
    sources: Sources,
    destination: Path,
    progress: Progress,
    *,
    overwrite: bool = False,
    copy_weights: bool = False,
    quantize: Callable[[Path], Mapping[str, Path]] | None = None,
) -> Deployment:
    """Writes `plan` to `destination`, whole or not at all.

    `quantize` writes models into a temporary folder and returns theirs, by role.

    Raises:
        DflashError: see `describe_deployment`; a destination that may not be written, a disk that
            refuses.
    """
    deployment = describe_deployment(plan, sources)
    with staged_folder(destination, overwrite=overwrite, kind=DEPLOYMENT) as folder:
        for variant in sources.variants:
            _write_variant(folder, plan, sources, variant)
        _write_scripts(folder, plan, sources)
        (folder / "README.md").write_text(_readme(plan, sources), "utf-8")
        (folder / RECORD_NAME).write_text(deployment.model_dump_json(indent=2) + "\n", "utf-8")
        # Beside it in its temporary folder: on the same filesystem, and gone when that goes.
        made = {} if quantize is None else quantize(folder.with_name("quantized"))
        folders = {**sources.folders, **made}
        if folders:
            _place_weights(folders, folder, destination, progress, copy=copy_weights)
    return deployment


def _memory(plan: DeploymentPlan) -> DeploymentMemory:
    took = plan.memory
    return DeploymentMemory(
        gpu_memory=took.gpu_memory,
        weights=int(took.weights),
        draft_context=int(took.draft_cache),
        states=int(took.states),
        fraction=took.fraction,
        kv_pool=int(took.target_cache),
        kv_sequence=int(took.target_kv),
        sequences=took.users,
    )


def _arguments(plan: DeploymentPlan, sources: Sources, variant: Variant) -> list[dict[str, Any]]:
    """What the files of `yaml_files` hold."""
    if variant == "disaggregated":
        return split_arguments(plan, sources)
    made = (serve_arguments, model_arguments)
    return [make(plan, sources, variant) for make in made]


def _write_variant(folder: Path, plan: DeploymentPlan, sources: Sources, variant: Variant) -> None:
    """The YAML files, the Triton repository and the sweep of one variant."""
    title = f"{TITLES[variant]} of {plan.name} on {plan.hardware}"
    checked = f"Checked against {plan.version.documented}."
    head = f"# LLM arguments: {title}.\n# {checked}\n"
    for name, values in zip(yaml_files(variant), _arguments(plan, sources, variant), strict=True):
        _write_yaml(folder / name, head, values)
    if is_split := variant == "disaggregated":
        router = f"# `trtllm-serve disaggregated`: {title}.\n"
        _write_yaml(folder / ROUTER_FILE, router, router_file())
    else:
        template = _template("config.pbtxt")
        _write(folder / "triton" / variant / "tensorrt_llm" / "config.pbtxt", template)
    sweep = f"# `dflash-trt sweep`: {title}, served by trtllm-serve.\n"
    _write_yaml(folder / "sweep" / f"{variant}.yaml", sweep, _sweep(plan, variant, 1 + is_split))


def _write_scripts(folder: Path, plan: DeploymentPlan, sources: Sources) -> None:
    """What looks at a machine, what serves from Triton server, sweeps of other engines."""
    draft = plan.pair.draft
    stated: dict[str, Any] = {
        "target_layer_ids": list(draft.target_layer_ids),
        "mask_token_id": draft.mask_token_id,
        "block_size": draft.block_size,
    }
    if sources.draft is None:
        stated = {"mtp_num_hidden_layers": 1}
    elif draft.markov_rank:
        stated |= {"block_size": draft.block_size - 1, "markov_rank": draft.markov_rank}
    preflight = _render(
        "preflight.py.j2",
        plan,
        sources,
        packages=json.dumps({one: packages(plan, one) for one in sources.variants}, indent=4),
        least_share=LEAST_MEMORY,
        draft=json.dumps(sources.locations["target" if sources.draft is None else "draft"]),
        stated=json.dumps(stated),
    )
    _write(folder / "preflight.py", preflight)
    script = folder / "serve-triton.sh"
    _write(script, _render("serve-triton.sh.j2", plan, sources))
    script.chmod(0o755)
    for engine in _peers(plan, sources):
        sweep = f"# `dflash-trt sweep`: {plan.name} on {plan.hardware}, served by {engine}.\n"
        _write_yaml(folder / f"sweep/{engine.lower()}.yaml", sweep, _sweep(plan, engine))


def _sweep(plan: DeploymentPlan, name: str, sides: int = 1) -> dict[str, Any]:
    """Prompts come from the command line; all are measured at the same loads.

    `sides` are servers that each have the profile's GPUs.
    """
    powers = [1 << power for power in range(plan.users.bit_length())]
    configuration: dict[str, Any] = {
        "name": name,
        "kind": "chat",
        "url": "http://127.0.0.1:8000",
        "model": plan.name,
        "gpus": plan.profile.gpus * sides,
        "hardware": plan.hardware_of(sides),
    }
    if plan.chat_template_kwargs:
        kwargs = {"chat_template_kwargs": plan.chat_template_kwargs}
        configuration["parameters"] = kwargs
    return {
        "configurations": [configuration],
        "osl": _SWEEP_OSL,
        "temperature": 0.0,
        "concurrency": sorted({*powers, plan.users}),
    }


def _peers(plan: DeploymentPlan, sources: Sources) -> dict[str, str]:
    """What serves the same pair with other engines, by their names; nothing beyond one node."""
    kind = OTHERS_DRAFT.get(sources.drafting)
    if kind is None or plan.profile.nodes > 1 or plan.options.enable_attention_dp:
        return {}
    drafts, commands = plan.max_draft_len, dict[str, str]()
    cache = serve_arguments(plan, sources, "autoregressive")["kv_cache_config"]
    # They run in the deployment's folder, wherever that lies.
    models = {role: at.removeprefix(f"{MOUNT}/") for role, at in sources.locations.items()}
    asked = (
        plan.profile.expert_parallel is not None,
        cache.get("dtype") == "fp8",
        not cache["enable_block_reuse"],
    )
    for title, asks in SERVED[kind].items():
        engine = title.split(maxsplit=1)[0]
        commands[engine] = serving_command(
            engine,
            asks.format(drafts, drafts + 1),
            models.get("draft", ""),
            asked,
            target=models["target"],
            name=plan.name,
            gpus=plan.profile.gpus,
            tokens=plan.max_seq_len,
            users=plan.max_batch,
        )
    return commands


def _readme(plan: DeploymentPlan, sources: Sources) -> str:
    locations, lines = sources.locations, []
    for variant in sources.variants:
        line = f"`{variant}`: {TITLES[variant]}"
        if variant == "eagle3":
            line += f" with {locations['eagle3']}, {sources.eagle3_draft_len} drafts"
        elif variant in OWN_DRAFTS:
            own = locations.get("draft", "the target's own layer")
            line += f" with {own}, {plan.max_draft_len} drafts"
            if plan.schedule is not None:
                steps = [f"{drafts} up to {batch}" for batch, drafts in plan.schedule.items()]
                last = max(plan.schedule)
                steps += [f"none above {last}"] if last < plan.max_batch else []
                line += f" ({', '.join(steps)} sequences)"
        lines.append(line)
    body: dict[str, Any] = {
        "model": plan.name,
        "messages": [{"role": "user", "content": "Write a quicksort in Python."}],
        "max_tokens": 256,
    }
    if plan.chat_template_kwargs:
        body["chat_template_kwargs"] = plan.chat_template_kwargs
    quantized = {role: f"{role} ({name})" for role, name in sources.precision.items()}
    return _render(
        "README.md.j2",
        plan,
        sources,
        draft=plan.pair.draft,
        local=[quantized.get(role, role) for role in sources.folders],
        variants=lines,
        title=TITLES[sources.drafting],
        memory=_memory(plan),
        needed=packages(plan, sources.drafting),
        parsers=REASONING_PARSERS.get(plan.pair.architecture or "", ()),
        chat=json.dumps(body),
        results=f"../results-{plan.name}-{plan.profile_name}",
        interactivity=INTERACTIVITY,
        peers=_peers(plan, sources),
        ports=SPLIT_PORTS,
    )


def _place_weights(
    folders: Mapping[str, Path], folder: Path, destination: Path, progress: Progress, *, copy: bool
) -> None:
    """Brings the checkpoints' files into weights/, under their own names."""
    placed: dict[Path, Path] = {}
    for role, source in folders.items():
        files_of = (path for path in sorted(source.iterdir()) if not path.is_dir())
        found = [path for path in files_of if path.suffix in CHECKPOINT_SUFFIXES]
        if not any(path.suffix == ".safetensors" for path in found):
            raise DflashError("has no .safetensors weights", where=source)
        placed |= {folder / "weights" / role / path.name: find_file(path) for path in found}
    if not copy:
        place_files(placed, destination, "weights", progress)
        return
    progress.stage("copying weights", check_copies(placed.values(), destination))
    for path, source in placed.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        copy_file(source, path, progress.advance)


def _write_yaml(path: Path, comment: str, values: Mapping[str, Any]) -> None:
    """In ASCII, because TensorRT-LLM's Triton model reads in the locale's encoding."""
    comment = comment.replace("×", "x").encode("ascii", "backslashreplace").decode()
    _write(path, comment + yaml.safe_dump(dict(values), sort_keys=False))


def _template(name: str) -> str:
    return (files("dflash_trt.deploy.trtllm") / "templates" / name).read_text(encoding="utf-8")


def _render(template: str, plan: DeploymentPlan, sources: Sources, **values: Any) -> str:
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False
    )
    environment.filters["quote"] = shlex.quote  # for a shell
    return environment.from_string(_template(template)).render(values, plan=plan, sources=sources)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
