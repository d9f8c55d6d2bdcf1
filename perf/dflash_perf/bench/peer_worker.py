"""One way of decoding, in a process of its own that answers JSON lines: `bench peers` asks it.

`python peer_worker.py KIND MODEL THREADS` first tells what it opened, {"model": …}, or why it did
not, {"error": …}. Each line [[prompt's token ids, …], N] is answered by [[token ids, head, steps,
prefill s, decode s], …]: N tokens for each prompt, greedy, ends of text ignored; the first `head`
of them end the prefill, and the steps bring the others. It runs in whatever Python has a peer's
library, so only the ways of this project import any of it.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

Emit = Callable[[Sequence[int]], object]
Decode = Callable[[list[int], int, Emit], None]
"""Continues a prompt by so many tokens, and emits those of each step."""


def _open_ours(model: str, threads: int, drafts: bool = True) -> tuple[str, Decode]:
    import dflash_trt

    pair = dflash_trt.load(model, threads=threads, speculation=drafts)

    def decode(prompt: list[int], count: int, emit: Emit) -> None:
        for event in pair.stream(prompt, max_tokens=count, ignore_eos=True):
            emit(event.token_ids)

    schedule = pair.schedule.describe() if pair.schedule else "no schedule: drafts while they pay"
    return schedule if drafts else "target_only", decode


def _open_llama_cpp(model: str, threads: int) -> tuple[str, Decode]:
    """A GGUF file in llama.cpp, by the calls of its C interface."""
    lib = import_module("llama_cpp")
    lib.llama_backend_init()
    opened = lib.llama_model_load_from_file(model.encode(), lib.llama_model_default_params())
    if not opened:
        raise ValueError("llama.cpp cannot load it")
    settings = lib.llama_context_default_params()
    settings.n_ctx = settings.n_batch = 2048
    settings.n_threads = settings.n_threads_batch = threads
    context = lib.llama_init_from_model(opened, settings)
    greedy = lib.llama_sampler_init_greedy()

    def decode(prompt: list[int], count: int, emit: Emit) -> None:
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        tokens = (lib.llama_token * len(prompt))(*prompt)
        for _ in range(count):
            if lib.llama_decode(context, lib.llama_batch_get_one(tokens, len(tokens))):
                raise ValueError("llama.cpp cannot decode")
            tokens = (lib.llama_token * 1)(lib.llama_sampler_sample(greedy, context, -1))
            emit(tokens[:])

    text = ctypes.create_string_buffer(256)
    lib.llama_model_desc(opened, text, 256)
    size = lib.llama_model_size(opened) / 2**20
    return f"{text.value.decode()}, {size:.0f} MiB, {_releases('llama-cpp-python')}", decode


def _open_openvino(model: str, threads: int) -> tuple[str, Decode]:
    """A folder that optimum-intel exported, in OpenVINO GenAI."""
    lib, numpy = import_module("openvino_genai"), import_module("numpy")
    to_tensor = import_module("openvino").Tensor
    pipeline = lib.LLMPipeline(model, "CPU", INFERENCE_NUM_THREADS=threads)

    def decode(prompt: list[int], count: int, emit: Emit) -> None:
        def write(_: Any, ids: int | list[int]) -> Any:
            emit([ids] if isinstance(ids, int) else ids)
            return lib.StreamingStatus.RUNNING

        streamer = type("Streamer", (lib.StreamerBase,), {"write": write, "end": lambda _: None})
        ids = numpy.array([prompt], dtype="int64")
        inputs = lib.TokenizedInputs(to_tensor(ids), to_tensor(numpy.ones_like(ids)))
        wanted = lib.GenerationConfig(max_new_tokens=count, ignore_eos=True, do_sample=False)
        pipeline.generate(inputs, wanted, streamer())

    size = sum(one.stat().st_size for one in Path(model).glob("openvino_model.*")) / 2**20
    return f"{size:.0f} MiB, {_releases('openvino-genai')}", decode


def _open_transformers(model: str, threads: int) -> tuple[str, Decode]:
    """A checkpoint in transformers, computed in the format that it is stored in."""
    torch, transformers = import_module("torch"), import_module("transformers")
    torch.set_num_threads(threads)
    opened = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()

    def decode(prompt: list[int], count: int, emit: Emit) -> None:
        told = iter([lambda _: None])  # the prompt comes first
        streamer = SimpleNamespace(put=lambda ids: next(told, emit)(ids.tolist()), end=lambda: None)
        ids = torch.tensor([prompt])
        wanted = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
        with torch.inference_mode():
            opened.generate(ids, attention_mask=torch.ones_like(ids), streamer=streamer, **wanted)

    return f"{opened.dtype}, {_releases('transformers', 'torch')}", decode


def _releases(*names: str) -> str:
    return ", ".join(f"{name} {version(name)}" for name in names)


KINDS: dict[str, Callable[[str, int], tuple[str, Decode]]] = {
    "plain": lambda model, threads: _open_ours(model, threads, drafts=False),
    "drafts": _open_ours,
    "llama.cpp": _open_llama_cpp,
    "openvino": _open_openvino,
    "transformers": _open_transformers,
}


def timed(decode: Decode, prompt: list[int], count: int) -> list[object]:
    """Token ids, how many ended the prefill, steps after it, seconds of prefill and of steps."""
    ids: list[int] = []
    ends: list[tuple[int, float]] = []  # of steps: tokens by then, and when

    def emit(tokens: Sequence[int]) -> None:
        ids.extend(tokens)
        if tokens:
            ends.append((len(ids), time.perf_counter()))

    began = time.perf_counter()
    decode(prompt, count, emit)
    head, first = ends[0]
    return [ids, head, len(ends) - 1, first - began, time.perf_counter() - first]


def main(kind: str, model: str, threads: str) -> None:
    """Answers the lines of stdin; what libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    try:
        told, decode = KINDS[kind](model, int(threads))
    except Exception as error:  # whatever a library raises is why it is skipped
        missing = isinstance(error, ModuleNotFoundError) and error.name
        reason = f"{missing} is not installed: --peer-python" if missing else str(error)
        reason = " ".join(reason.replace(f"{Path(model).parent}/", "").split())
        print(json.dumps({"error": reason[:300]}), file=answers)
        return
    print(json.dumps({"model": told}), file=answers)
    for line in sys.stdin:
        prompts, count = json.loads(line)
        print(json.dumps([timed(decode, one, count) for one in prompts]), file=answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
