"""Questions: the prompts of a diagnosis as texts, in the forms in which they may be served."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

from dflash_trt.text.tokenizer import BundleTokenizer

THINKING = "enable_thinking"


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt as text, its set, and tags such as its language or category."""

    text: str
    set_name: str = ""
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Form:
    """How prompts become tokens: `raw` text, or a user's message in the chat template.

    `thinking` is the template's enable_thinking; None leaves it to the template.
    """

    raw: bool = False
    thinking: bool | None = None

    @property
    def text(self) -> str:
        if self.raw:
            return "without the chat template"
        if self.thinking is None:
            return "with the chat template"
        return f"with thinking {'on' if self.thinking else 'off'}"


def encode(tokenizer: BundleTokenizer, texts: Sequence[str], form: Form) -> list[list[int]]:
    """Token ids of `texts` in a form; without a template all are raw."""
    if form.raw or tokenizer.chat_template is None:
        return [tokenizer.encode(text) for text in texts]
    variables = {} if form.thinking is None else {THINKING: form.thinking}
    return tokenizer.encode_chats(texts, variables=variables)


def other_forms(tokenizer: BundleTokenizer, served: Form) -> list[Form]:
    """The forms that are tried beside the one that is served, each apart from it in one thing."""
    renderer = tokenizer.open_renderer()
    if renderer is None:
        return []
    with closing(renderer):
        can_think = renderer.knows(THINKING)
    if served.raw:
        return [Form()]
    thinking = [not served.thinking] if served.thinking is not None else [True, False]
    return [Form(raw=True), *(Form(thinking=one) for one in thinking if can_think)]
