"""A conversation with a served model over gRPC, streamed: the template is rendered here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence

from dflash_trt.errors import DflashError
from dflash_trt.sampling.params import SamplingParams
from dflash_trt.serving.client.client import GenerationRequest, ServedModel, TextDelta
from dflash_trt.text.detokenise import AnswerPiece
from dflash_trt.text.thoughts import find_format, open_answer
from dflash_trt.text.tokenizer import BundleTokenizer


class GrpcChat:
    """The model `tensorrt_llm` at `address` (host:port), with the chat template of `tokenizer`.

    Triton server takes texts: whoever asks has to write the conversation as the model reads it.

    Raises:
        DflashError: a tokenizer without a chat template (usage).
    """

    def __init__(
        self,
        address: str,
        tokenizer: BundleTokenizer,
        sampling: SamplingParams,
        *,
        max_tokens: int | None,
        stop_strings: tuple[str, ...],
        template_options: Mapping[str, bool | str],
    ) -> None:
        renderer = tokenizer.open_renderer()
        if renderer is None:
            fix = "generate --prompt continues a text"
            raise DflashError("its tokenizer has no chat template", fix=fix, usage=True)
        self._renderer, self._answers = renderer, find_format(tokenizer.core)
        self._address, self._sampling = address, sampling
        self._max_tokens, self._stops = max_tokens, stop_strings
        self._variables = template_options

    @property
    def greeting(self) -> str:
        return f"the model at grpc://{self._address}"

    def answer(
        self, messages: Sequence[Mapping[str, str]]
    ) -> Generator[tuple[str, str], None, None]:
        """New text as it comes: ("content" | "reasoning", text). Closing it ends the answer.

        Raises:
            DflashError: nobody answers, or the server refuses.
        """
        prompt = self._renderer.render([dict(one) for one in messages], self._variables)
        request = GenerationRequest(
            prompt=prompt,
            max_tokens=self._max_tokens,
            sampling=self._sampling,
            stop_strings=self._stops,
            add_special_tokens=False,
        )
        channels = None
        if self._answers is not None:
            channels = open_answer(self._answers, self._stops, prompt)
        with asyncio.Runner() as runner:
            model = runner.run(_connect(self._address))
            deltas = model.stream(request)
            try:
                while (delta := runner.run(_next(deltas))) is not None:
                    if channels is None:
                        yield "content", delta.text
                        continue
                    yield from _pieces(channels.push(delta.token_ids))
                    if delta.result is not None:
                        yield from _pieces(channels.flush())
            finally:
                runner.run(_leave(model, deltas))


def _pieces(piece: AnswerPiece) -> list[tuple[str, str]]:
    both = (("reasoning", piece.reasoning), ("content", piece.content))
    return [(kind, text) for kind, text in both if text]


async def _connect(address: str) -> ServedModel:
    return ServedModel(address)


async def _next(deltas: AsyncGenerator[TextDelta, None]) -> TextDelta | None:
    return await anext(deltas, None)


async def _leave(model: ServedModel, deltas: AsyncGenerator[TextDelta, None]) -> None:
    await deltas.aclose()
    await model.close()
