# SPDX-License-Identifier: Apache-2.0
"""Incremental decoding gives the same text as decoding all tokens at once, with and without stop strings."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mizzen.gateway.text.stop import StopStrings
from mizzen.gateway.text.stream import TextStream
from mizzen.gateway.text.tokenizer import Tokenizer, TokenizerError

TEXTS = st.text(
    alphabet=st.one_of(st.sampled_from("ab .\n😀é世▁<0xE2>"), st.characters(codec="utf-8")), max_size=60
)


def decode_in_chunks(data: st.DataObject, ids: list[int]) -> list[list[int]]:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(ids)), max_size=len(ids))))
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


@settings(max_examples=150)
@given(data=st.data())
def test_pieces_of_any_tokens_join_to_the_full_decoding(
    any_tokenizer: Tokenizer, data: st.DataObject
) -> None:
    """Random ids, including unknown ones, produce all kinds of invalid UTF-8."""
    token = st.integers(0, any_tokenizer.vocab_size + 3)
    ids = data.draw(st.lists(token, max_size=40))
    skip = data.draw(st.booleans())
    detokenizer = any_tokenizer.detokenizer(skip)
    pieces = [detokenizer.add(chunk) for chunk in decode_in_chunks(data, ids)]
    assert "".join([*pieces, detokenizer.flush()]) == any_tokenizer.decode(ids, skip)


SIGNS = "e\u0301", "\u1100\u1161\u11a8", "\u03b1\u0313\u0300\u0345", "a", "  ", "\n\n", "hello ", "\U0001f600"
"""Texts from which streams are built; NFC normalization shortens some sequences of them."""


@settings(max_examples=100)
@given(signs=st.lists(st.sampled_from(SIGNS), max_size=8), times=st.integers(1, 200), text=TEXTS)
def test_characters_per_token_is_an_upper_bound(
    any_tokenizer: Tokenizer, signs: list[str], times: int, text: str
) -> None:
    full_text, most = "".join(signs) * times + text, any_tokenizer.characters_per_token
    assert not most or len(full_text) <= most * len(any_tokenizer.encode(full_text, False))


def test_byte_level_tokenizer_has_a_bound(tokenizer_files: dict[str, bytes]) -> None:
    assert 8 <= Tokenizer.from_files(tokenizer_files).characters_per_token <= 512


@settings(max_examples=100)
@given(text=TEXTS, data=st.data())
def test_pieces_of_encoded_text_join_to_the_full_decoding(
    any_tokenizer: Tokenizer, text: str, data: st.DataObject
) -> None:
    ids = any_tokenizer.encode(text)
    detokenizer = any_tokenizer.detokenizer()
    pieces = [detokenizer.add(chunk) for chunk in decode_in_chunks(data, ids)]
    assert "".join([*pieces, detokenizer.flush()]) == any_tokenizer.decode(ids)


def test_no_piece_ends_inside_a_character(any_tokenizer: Tokenizer) -> None:
    text = "naïve 世界 👨‍👩‍👧 end"
    ids = any_tokenizer.encode(text)
    detokenizer = any_tokenizer.detokenizer()
    pieces = [detokenizer.add([token]) for token in ids]
    full_text = any_tokenizer.decode(ids)
    assert "".join([*pieces, detokenizer.flush()]) == full_text
    if "�" not in full_text:
        assert not any("�" in piece for piece in pieces)


def test_cost_per_token_is_constant(any_tokenizer: Tokenizer) -> None:
    """Each stream repeats one token that is a worst case, such as a byte that never completes a character."""
    for token in ("<0xE2>", "â", "a"):
        if (number := any_tokenizer.token_id(token)) is not None:
            detokenizer = any_tokenizer.detokenizer()
            began = time.process_time()
            for _ in range(20_000):
                detokenizer.add((number,))
            assert time.process_time() - began < 20


def reference_cut(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    """Check every prefix of a text, and cut the text at the stop string that is completed first.

    Returns:
        The text before the stop string, and whether one was found.
    """
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@settings(max_examples=300)
@given(
    pieces=st.lists(st.text("ab\n", max_size=4), max_size=12),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3).map(tuple),
)
def test_stop_strings_cut_as_in_the_full_text(pieces: list[str], stops: tuple[str, ...]) -> None:
    stopper = StopStrings(stops)
    delivered = ""
    arrived = ""
    for piece in pieces:
        if stopper.matched is not None:
            break
        arrived += piece
        delivered += stopper.add(piece)
        expected, hit = reference_cut(arrived, stops)
        assert hit == (stopper.matched is not None)
        assert expected.startswith(delivered)
        if not hit:
            held_back = arrived[len(delivered) :]
            assert not held_back or any(stop.startswith(held_back) for stop in stops), (
                "held back without need"
            )
    assert delivered + stopper.flush() == reference_cut(arrived, stops)[0]


@settings(max_examples=100)
@given(text=TEXTS, stop=st.text(min_size=1, max_size=3), data=st.data())
def test_stream_counts_tokens_up_to_the_stop_string(
    any_tokenizer: Tokenizer, text: str, stop: str, data: st.DataObject
) -> None:
    ids = any_tokenizer.encode(text)
    stream = TextStream(any_tokenizer, (stop,))
    delivered, used = "", 0
    for chunk in decode_in_chunks(data, ids):
        if stream.stopped:
            break
        piece, count = stream.add(chunk)
        delivered, used = delivered + piece, used + count
    delivered += stream.flush()
    full_text = any_tokenizer.decode(ids)
    assert delivered == reference_cut(full_text, (stop,))[0]
    if not stream.stopped:
        assert used == len(ids)


def test_flushed_text_does_not_start_a_stop_string() -> None:
    stopper = StopStrings(("aab",))
    assert (stopper.add("xaa"), stopper.flush(), stopper.add("b")) == ("x", "aa", "b")
    assert (stopper.add("aab"), stopper.matched) == ("", "aab")


def test_empty_stop_string_is_rejected() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(("",))


def test_encode_adds_special_tokens_once(model_folder: Path) -> None:
    tokenizer = Tokenizer.load(model_folder)
    bos = tokenizer.token_id("<s>")
    assert tokenizer.encode("hello")[0] == bos
    assert tokenizer.encode("<s>hello", add_special_tokens=False).count(bos or 0) == 1
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"


def test_truncation_in_tokenizer_json_is_ignored(tokenizer_files: dict[str, bytes]) -> None:
    import tokenizers

    inner = tokenizers.Tokenizer.from_buffer(tokenizer_files["tokenizer.json"])
    inner.enable_truncation(4)
    inner.enable_padding(length=100)
    assert (
        len(Tokenizer.from_files({"tokenizer.json": inner.to_str().encode()}).encode("hello there you")) > 4
    )


def test_tokenizer_errors_say_what_is_wrong() -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        Tokenizer.from_files({})
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_files({"tokenizer.json": b"{]"})


def test_long_partial_stop_matches_are_cheap() -> None:
    stopper, delivered = StopStrings(tuple("a" * 4000 + end for end in "bcde")), 0
    began = time.process_time()
    for _ in range(20_000):
        delivered += len(stopper.add("aaa"))
    assert (
        time.process_time() - began < 8
    )  # 10 times the expected time; comparing the longest suffixes would take a minute
    assert delivered == 60_000 - 4000
    assert stopper.add("bcd") == ""
    assert stopper.matched == "a" * 4000 + "b"
