"""Answer: known tokens, what a target said to a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_trt.errors import DflashError


@dataclass(frozen=True, slots=True)
class Answer:
    """What the target said to a prompt; `set_name` and `tags` say where figures are counted.

    `token_ids` are the output's, with the token that ended it. One token takes no step, for it
    comes from the prefill.
    """

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    set_name: str = ""
    tags: tuple[str, ...] = ()

    @property
    def known_ids(self) -> list[int]:
        """Prompt and output together."""
        return [*self.prompt_ids, *self.token_ids]


def check_answers(answers: Sequence[Answer], vocab_size: int, max_seq_len: int) -> None:
    """Refuses what a bundle of these limits could not have said.

    Raises:
        DflashError: no answer, an empty prompt, an id outside the vocabulary, or more tokens than
            a sequence may have (usage).
    """
    if not answers:
        raise DflashError("there is no answer to replay", usage=True)
    for number, answer in enumerate(answers, start=1):
        if not len(answer.prompt_ids):
            raise _unusable("its prompt holds no token", number)
        check_ids(answer.known_ids, vocab_size, max_seq_len, f"answer {number}")


def check_ids(ids: Sequence[int], vocab_size: int, max_seq_len: int, where: str) -> None:
    """Raises DflashError (usage) for ids that are no sequence of the target."""
    outside = next((one for one in ids if not 0 <= one < vocab_size), None)
    if outside is not None:
        what = f"token id {outside} is outside the vocabulary of {vocab_size}"
        raise DflashError(what, where=where, usage=True)
    if len(ids) > max_seq_len:
        raise DflashError(
            f"{len(ids)} tokens exceed the bundle's max_seq_len of {max_seq_len}",
            where=where,
            fix="build the bundle with a larger --max-seq-len, or leave the sequence out",
            usage=True,
        )


def _unusable(what: str, number: int) -> DflashError:
    return DflashError(what, where=f"answer {number}", usage=True)
