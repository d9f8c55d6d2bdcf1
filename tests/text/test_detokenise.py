"""Pieces of text: whole characters, nothing lost, cut at stop strings."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from dflash_trt.decoding import Generator, Request
from dflash_trt.decoding.state import RequestState
from dflash_trt.decoding.statistics import StatisticsRecorder
from dflash_trt.text.detokenise import Detokenizer, StopStrings, TextStream
from tests.standins.executor import FakeExecutor
from tests.text.tokenizers import make_byte_level, make_plain


@cache
def make_byte_fallback() -> Tokenizer:
    """As sentencepiece models are: spaces as ▁, unknown characters as bytes, one space dropped."""
    texts = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "é"]
    vocabulary = {text: index for index, text in enumerate(texts)}
    model = models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    spaces, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), strip])
    return tokenizer


@cache
def make_word_level() -> Tokenizer:
    return Tokenizer(models.WordLevel({"one": 0, "two": 1, "<pad>": 2}, unk_token="<pad>"))


MAKERS = [make_byte_level, make_byte_fallback, make_word_level]


@pytest.mark.parametrize("make", MAKERS)
@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_pieces_join_to_the_whole_decode(make, data: st.DataObject) -> None:  # type: ignore[no-untyped-def]
    """Any token ids, so invalid UTF-8 too."""
    tokenizer = make()
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=40))
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token_id) for token_id in ids]
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(ids, skip_special_tokens=True)


@given(
    pieces=st.lists(st.text(alphabet="ab", max_size=4), max_size=20),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=3),
)
@settings(max_examples=500, deadline=None)
def test_stop_strings_against_their_definition(pieces: list[str], stops: list[str]) -> None:
    """Text up to the first stop string there is when one first is; no longer held than needed.

    Kept, it follows that text, of those that begin there the least.
    """
    watch, keeping = StopStrings(stops), StopStrings(stops, keeps_stop=True)
    seen, whole, kept = "", "", ""
    for piece in pieces:
        whole += piece
        seen += watch.push(piece)
        kept += keeping.push(piece)
        starts = [whole.find(stop) for stop in stops if stop in whole]
        assert (watch.match is not None) == bool(starts)
        if starts:
            assert seen == whole[: min(starts)] and kept == seen + (watch.match or "")
            return
        held = whole[len(seen) :]
        assert whole.startswith(seen)
        assert not held or any(stop.startswith(held) for stop in stops)
    assert seen + watch.flush() == whole


@pytest.mark.parametrize(
    ("given", "stops", "shown", "stop"),
    [
        ("ab|<end>|cd", ("x", "<end>"), "ab", "<end>"),
        ("ab|<end>|cd", ("<end>", "bc"), "ab", "<end>"),
        ("abc|<end>", ("<end>", "bc"), "a", "bc"),
        ("ab|<end>|c", ("<turn>", "d>c"), "abc", None),
        ("abÃ|<end>|c", ("<end>",), "ab\N{REPLACEMENT CHARACTER}", "<end>"),
        ("ab|<turn>|c", ("<turn>\n",), "ab", "<turn>\n"),
        ("ab|<mark>|c", ("<mark>",), "ab", "<mark>"),
    ],
)
def test_special_tokens_are_stops(
    given: str, stops: tuple[str, ...], shown: str, stop: str | None
) -> None:
    """They have no text, but for the mark, which is shown; one takes the blanks behind it."""
    core = make_plain("<end>", "<mark>")
    core.add_special_tokens([AddedToken("<turn>", rstrip=True)])
    assert core.encode("<turn>\n").ids == [core.token_to_id("<turn>")]
    parts = (one if one[0] == "<" else [*one] for one in given.split("|"))
    ids = [core.token_to_id(t) for one in parts for t in ([one] if isinstance(one, str) else one)]
    stream = TextStream(core, stops, {core.token_to_id("<mark>")})
    text = "".join(map(stream.push, ids)) + stream.flush()
    assert (text, stream.stop_string) == (shown, stop)


def test_a_stop_string_completed_at_the_very_end_is_a_stop() -> None:
    """Byte tokens are held until their run ends, and here the length limit ends it."""
    tokenizer = make_byte_fallback()
    state = RequestState(
        request_id=0,
        request=Request(prompt_ids=(0,), max_tokens=2),
        max_tokens=2,
        rows=4,
        stop_ids=frozenset(),
        stream=TextStream(tokenizer, ["!"]),
        recorder=StatisticsRecorder(0.0),
        flow=0,
    )
    assert state.append_tokens([tokenizer.token_to_id("a"), tokenizer.token_to_id("<0x21>")]) == 2
    event = state.to_event(taken=2, accepted_tokens=1, now=1.0)
    assert (event.text, event.pieces, event.finish_reason) == ("a", ("a", ""), "stop")


class TestInEngine:
    """Text through the generator: the fake model's tokens, read with a real tokenizer."""

    def make_generator(self, **fields: object) -> Generator:
        tokenizer = make_byte_level()
        return Generator(
            FakeExecutor(vocab_size=tokenizer.get_vocab_size(), draft_skill=0.9, max_seq_len=128),
            tokenizer=tokenizer,
            **fields,  # type: ignore[arg-type]
        )

    def test_a_stop_string_ends_the_output_at_its_token(self) -> None:
        [free] = self.make_generator().generate([Request(prompt_ids=(1,), max_tokens=60)])
        assert free.text is not None
        for start in range(0, len(free.text) - 4, 3):
            stop = free.text[start : start + 4]
            if "\N{REPLACEMENT CHARACTER}" in stop:
                continue
            request = Request(prompt_ids=(1,), max_tokens=60, stop_strings=(stop,))
            [result] = self.make_generator().generate([request])
            assert result.finish_reason == "stop"
            assert result.text == free.text[: free.text.find(stop)]
            assert result.token_ids == free.token_ids[: len(result.token_ids)]
            decoded = make_byte_level().decode(list(result.token_ids))
            assert stop in decoded
            assert stop not in make_byte_level().decode(list(result.token_ids[:-1]))

    def test_what_ends_the_output_is_shown_where_that_is_asked(self) -> None:
        """And special tokens, but for one that ends it."""
        [free] = self.make_generator().generate([Request(prompt_ids=(1,), max_tokens=20)])
        end = free.token_ids[12]
        cut = free.token_ids.index(end)
        core = make_byte_level()
        for keeps in (False, True):
            request = Request(
                prompt_ids=(1,), stop_token_ids=(end,), include_stop_str_in_output=keeps
            )
            [result] = self.make_generator().generate([request])
            assert result.token_ids == free.token_ids[: cut + 1]
            assert result.text == core.decode(list(free.token_ids[: cut + keeps]))
        core.add_special_tokens([core.id_to_token(free.token_ids[0])])
        for skips in (False, True):
            generator = self.make_generator()
            generator._tokenizer = core
            request = Request(prompt_ids=(1,), max_tokens=1, skip_special_tokens=skips)
            [result] = generator.generate([request])
            assert result.text == ("" if skips else core.decode([free.token_ids[0]], False))
