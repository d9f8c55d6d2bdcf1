"""Requests with ragged prompts, their runs, and the comparison of two runs to the bit."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from dflash_trt.backends.base import Executor
from dflash_trt.decoding import Generator, GeneratorOptions, Request, RequestResult, SamplingParams
from tests.pairs import TinyPair
from tests.reference.compare import assert_bitwise_equal
from tests.reference.eagle import ReferenceEagle, write_eagle
from tests.reference.generate import forward_with_taps
from tests.reference.mtp import fit_mtp, write_mtp

OUTPUT = 56


def make_requests(vocab: int, count: int, sampling: SamplingParams | None = None) -> list[Request]:
    """Ragged prompts of 1 … 90 tokens."""
    rng = random.Random(count)
    lengths = [1, 2, 90, *(rng.randint(1, 90) for _ in range(count - 3))]
    return [
        Request(
            prompt_ids=tuple(rng.randrange(2, vocab - 1) for _ in range(length)),
            max_tokens=OUTPUT,
            sampling=sampling or SamplingParams(),
            ignore_eos=True,
        )
        for length in lengths
    ]


def run(executor: Executor, requests: list[Request], **options: object) -> list[RequestResult]:
    settings = GeneratorOptions(record_logits=True, **options)  # type: ignore[arg-type]
    return Generator(executor, options=settings).generate(requests)


def run_baseline(executor: Executor, requests: list[Request]) -> list[RequestResult]:
    return [run(executor, [request], speculation=False)[0] for request in requests]


def check_groups(
    executor: Executor,
    requests: list[Request],
    expected: list[RequestResult],
    batch: int,
    **options: object,
) -> None:
    """Runs `batch` requests at a time; each says what is `expected` of it, to the bit."""
    for first in range(0, len(requests), batch):
        group = slice(first, first + batch)
        for want, got in zip(
            expected[group], run(executor, requests[group], **options), strict=True
        ):
            assert_same(want, got, f"batch {batch}, {options}")


def check_copied_prefix(executor: Executor) -> None:
    """Samples of one prompt, and prompts that part from it, while it decodes; caches are linear.

    The same bits and the same acceptance, step by step, as alone.
    """
    rng = random.Random(5)
    prompt = tuple(rng.randrange(2, 62) for _ in range(50))
    prompts = [prompt, prompt, (*prompt[:33], 7, 9), prompt[:20], (9, *prompt), prompt]
    drawn = SamplingParams(temperature=0.8)
    requests = [
        Request(
            prompt_ids=one,
            max_tokens=OUTPUT,
            ignore_eos=True,
            sampling=replace(drawn, seed=seed) if seed % 2 else SamplingParams(),
        )
        for seed, one in enumerate(prompts)
    ]
    copied = []
    for request, got in zip(requests, run(executor, requests), strict=True):
        (want,) = run(executor, [request])
        assert_same(want, got, f"{len(request.prompt_ids)} tokens")
        histograms = [one.statistics.acceptance_histogram for one in (want, got)]
        assert histograms[0] == histograms[1]
        copied.append(got.statistics.cached_prompt_tokens)
    assert copied == [None, 49, 33, 19, None, 49]


def check_shared_prefix(
    linear: Executor,
    paged: Executor,
    tails: Iterable[int],
    before_step: Callable[[Generator], None] = lambda generator: None,
    **options: object,
) -> None:
    """A prefix of ten pages, then tails of so many tokens: computed once, and nothing differs.

    The same acceptance, step by step, as without it: the drafter's context comes along.
    """
    rng = random.Random(4)
    system = [rng.randrange(2, 62) for _ in range(80)]
    prompts = [(*system, *(rng.randrange(2, 62) for _ in range(tail))) for tail in (0, *tails)]
    requests = [Request(prompt_ids=one, max_tokens=OUTPUT, ignore_eos=True) for one in prompts]
    settings = GeneratorOptions(record_logits=True, **options)  # type: ignore[arg-type]
    generator = Generator(paged, options=settings)
    cached = []
    for request in requests:
        (want,) = run(linear, [request])
        generator.submit(request)
        (got,) = finish(generator, before_step)
        assert_same(want, got, f"{len(request.prompt_ids)} tokens")
        cached.append(got.statistics.cached_prompt_tokens)
        for name in ("acceptance_length", "acceptance_histogram", "conditional_acceptance"):
            assert getattr(got.statistics, name) == getattr(want.statistics, name)
    assert cached == [0, *[80] * (len(requests) - 1)]


def finish(generator: Generator, before_step: Callable[[Generator], None]) -> list[RequestResult]:
    """Results of what was submitted, in its order."""
    results = []
    while generator.has_work:
        before_step(generator)
        results += [event.result for event in generator.step() if event.result is not None]
    return sorted(results, key=lambda result: result.request_id)


def assert_same(expected: RequestResult, actual: RequestResult, name: str) -> None:
    assert actual.token_ids == expected.token_ids, name
    assert expected.logits is not None and actual.logits is not None
    assert_bitwise_equal(actual.logits, expected.logits, name)


def run_traffic(
    generator: Generator,
    requests: list[Request],
    expected: list[RequestResult],
    rng: random.Random,
    *,
    arrivals: float = 0.4,
    cancels: float = 0.02,
    before_step: Callable[[], None] = lambda: None,
) -> list[RequestResult]:
    """Every request comes twice at random moments, some are cancelled at others.

    What a request has said by its end is what it says alone, to the bit where logits are recorded.
    """
    waiting = list(range(len(requests))) * 2
    rng.shuffle(waiting)
    live: dict[int, int] = {}
    results: list[RequestResult] = []
    while waiting or generator.has_work:
        while waiting and rng.random() < arrivals:
            index = waiting.pop()
            live[generator.submit(requests[index])] = index
        if live and rng.random() < cancels:
            generator.cancel(rng.choice(list(live)))
        before_step()
        for got in [event.result for event in generator.step() if event.result is not None]:
            want, length = expected[live.pop(got.request_id)], len(got.token_ids)
            assert got.token_ids == want.token_ids[:length]
            assert got.finish_reason == ("cancelled" if length < len(want.token_ids) else "length")
            if length and want.logits is not None:
                assert got.logits is not None
                assert_bitwise_equal(got.logits, want.logits[:length], "traffic")
            results.append(got)
    return results


def count_tokens(results: list[RequestResult]) -> int:
    return sum(len(result.token_ids) for result in results)


def write_fitted_eagle(folder: Path, base: TinyPair, taps: Sequence[int], count: int) -> Path:
    """The target of `base` and a head for it in `folder`, by least squares over `count` answers."""
    vocab = base.pair.target.vocab_size
    (folder / "target").symlink_to(base.folder / "target")
    draft = write_eagle(folder / "draft", base.folder / "target", taps=taps, draft_vocab=None)
    head = ReferenceEagle.load(draft, base.reference, taps)
    inputs, wanted = [], []
    asked = make_requests(vocab, count)
    for request, one in zip(asked, run_baseline(base.open(), asked), strict=True):
        ids = torch.tensor([*request.prompt_ids, *one.token_ids])
        _, features = forward_with_taps(base.reference, ids[None], taps, norms_last=False)
        answer = len(request.prompt_ids)  # prompts are noise
        inputs.append(head.hidden(ids[:-1], features[0, :-2])[answer - 1 :])
        wanted.append(ids[answer + 1 :])
    x, y = torch.cat(inputs), torch.nn.functional.one_hot(torch.cat(wanted), vocab).float()
    fitted = torch.linalg.solve(x.T @ x + 0.1 * torch.eye(x.shape[1]), x.T @ y).T
    tensors = load_file(draft / "model.safetensors")
    save_file(tensors | {"lm_head.weight": fitted.contiguous()}, draft / "model.safetensors")
    return folder


def write_fitted_mtp(folder: Path, base: TinyPair, asked: Sequence[Request]) -> Path:
    """The target of `base` in `folder`, with a layer that is fitted to its answers, as both."""
    target = write_mtp(Path(shutil.copytree(base.folder / "target", folder / "target")))
    examples, last = [], (base.pair.target.num_layers - 1,)
    for request, one in zip(asked, run_baseline(base.open(), list(asked)), strict=True):
        ids = torch.tensor([*request.prompt_ids, *one.token_ids])
        examples.append((ids, forward_with_taps(base.reference, ids[None], last)[1][0]))
    fit_mtp(target, base.reference, examples)
    (folder / "draft").symlink_to(target)
    return folder
