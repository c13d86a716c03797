# SPDX-License-Identifier: Apache-2.0
"""Parser of harmony messages: malformed headers and cut answers, and independence of how text is divided."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mizzen.gateway.harmony.header import MAX_SECTION
from mizzen.gateway.harmony.markers import ANY_MARK, MARKS
from mizzen.gateway.harmony.output_parser import HarmonyParser
from mizzen.gateway.requests.answer import join_deltas, join_tool_calls
from mizzen.gateway.requests.output import OutputDelta

ROLE = "<|start|>assistant"
TO = "to=functions.weather"


def marked(text: str) -> str:
    """Return a text as detokenization returns it, with marks instead of markers."""
    return re.sub("|".join(map(re.escape, MARKS)), lambda marker: MARKS[marker[0]], text)


def parse(
    pieces: list[str], prompt: str = ROLE, stop: tuple[str, ...] = (), *, cut_off: bool = False
) -> tuple[str, str, list[tuple[str, str]], str | None]:
    """Return the reasoning, the content, the calls, and the finish reason of an answer in pieces."""
    parser = HarmonyParser({}, ["weather"], stop)
    parser.skip_prompt(marked(prompt))
    delta = OutputDelta()
    for piece in pieces:
        delta = join_deltas(delta, parser.feed(piece))
    delta = join_deltas(delta, parser.end(cut_off=cut_off))
    calls = [(call.name or "", call.arguments) for call in join_tool_calls(delta.tool_calls)]
    return delta.reasoning, delta.content, calls, parser.finish_reason


CASES = {
    "two calls": (
        f"<|channel|>commentary {TO}<|message|>[1]<|end|>{ROLE}<|channel|>commentary {TO}<|message|>[2]",
        ("", "", [("weather", "[1]"), ("weather", "[2]")], "tool_calls"),
    ),
    "call on the channel of reasoning": (
        f"<|channel|>analysis {TO} code<|message|>{{}}",
        ("", "", [("weather", "{}")], "tool_calls"),
    ),
    "call of a tool by its bare name": (
        "<|channel|>commentary to=weather<|message|>{}",
        ("", "", [("weather", "{}")], "tool_calls"),
    ),
    "call without arguments": (
        f" {TO}<|channel|>commentary<|message|><|call|>",
        ("", "", [("weather", "{}")], "tool_calls"),
    ),
    "built-in tool": ("<|channel|>analysis to=python code<|message|>1+1<|call|>", ("1+1", "", [], None)),
    "several thoughts": (
        f"<|channel|>analysis<|message|>a<|end|>{ROLE}<|channel|>analysis<|message|>b<|end|>",
        ("a\n\nb", "", [], None),
    ),
    "type after the answer's channel": (
        "<|channel|>final <|constrain|>json<|message|>{}",
        ("", "{}", [], None),
    ),
    "no channel": ("<|message|>Yes.<|return|>", ("", "Yes.", [], None)),
    "unknown channel": ("<|channel|>other<|message|>Yes.", ("", "Yes.", [], None)),
    "channel without its message": ("<|channel|>final Yes, I am.", ("", "Yes, I am.", [], None)),
    "arguments right after their type": (
        f'<|channel|>commentary {TO}<|constrain|>json{{"a": 1}}<|call|>',
        ("", "", [("weather", '{"a": 1}')], "tool_calls"),
    ),
    "no format at all": ("Yes, I am.", ("", "Yes, I am.", [], None)),
    "text that begins like a role": ("<|end|>assistant is a role", ("", "assistant is a role", [], None)),
    "text that begins like a recipient": ("to be", ("", "to be", [], None)),
    "no start of the second message": (
        "<|channel|>analysis<|message|>a<|end|><|channel|>final<|message|>b",
        ("a", "b", [], None),
    ),
    "no end of the first message": (
        f"<|channel|>analysis<|message|>a{ROLE}<|channel|>final<|message|>b",
        ("a", "b", [], None),
    ),
    "channel within a text": (
        "<|channel|>analysis<|message|>a<|channel|>final<|message|>b",
        ("a", "b", [], None),
    ),
    "markers that mean nothing": (
        "<|end|>\n<|call|><|message|>a<|message|>b<|constrain|>c",
        ("", "abc", [], None),
    ),
    "another role": ("<|start|>tool to=assistant<|channel|>commentary<|message|>a", ("", "a", [], None)),
    "endless header": ("<|channel|>" + "a" * 2 * MAX_SECTION, ("", "a" * 2 * MAX_SECTION, [], None)),
    "cut channel": ("<|channel|>anal", ("", "", [], None)),
    "cut recipient": ("<|channel|>commentary to=functions.we", ("", "", [], None)),
    "cut type": (f"<|channel|>commentary {TO} js", ("", "", [], None)),
    "recipient after the type": (f"<|constrain|> {TO}", ("", f"{TO}", [], None)),
    "cut role": ("<|end|><|start|>assis", ("", "", [], None)),
}


@pytest.mark.parametrize("name", CASES)
def test_answer_is_split(name: str) -> None:
    text, expected = CASES[name]
    assert parse([marked(text)]) == expected
    assert parse([*marked(text)]) == expected


def test_call_that_is_cut_off_stays_incomplete() -> None:
    text = [*marked(f"<|channel|>commentary {TO}<|message|>")]
    assert parse(text, cut_off=True) == ("", "", [("weather", "")], None)
    assert parse([*text, "{"], cut_off=True) == ("", "", [("weather", "{")], None)


@pytest.mark.parametrize("prompt", ["", ROLE, f"{ROLE}<|channel|>final<|message|>", "<|end|>"])
@pytest.mark.parametrize(
    "word", ["assistant", "assistant assistant", "an assistant", "ass", "to", " t", "tool"]
)
def test_answer_of_words_of_a_header_is_text(prompt: str, word: str) -> None:
    """Without a marker after them, words with which a header might begin are the answer."""
    assert parse([word], prompt) == ("", word, [], None)
    assert parse([*word], prompt) == ("", word, [], None)
    assert parse([marked(f"{word}<|return|>")], prompt) == ("", word, [], None)


def test_role_without_its_start_is_no_text() -> None:
    text = marked(f"<|channel|>analysis<|message|>a<|end|>assistant {TO}<|channel|>commentary<|message|>[1]")
    assert parse([*text]) == ("a", "", [("weather", "[1]")], "tool_calls")


def test_words_of_an_answer_that_is_cut_off() -> None:
    assert parse(["assistant"], "", cut_off=True) == ("", "assistant", [], None)
    assert parse([" to"], cut_off=True) == ("", "", [], None)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("<|start|>assistant<|channel|>analysis<|message|>", ("b", "", [], None)),
        ("<|start|>assistant<|channel|>final<|message|>", ("", "b", [], None)),
        (
            f"<|start|>assistant<|channel|>commentary {TO}<|message|>",
            ("", "", [("weather", "b")], "tool_calls"),
        ),
        ("", ("", "b", [], None)),
    ],
)
def test_prompt_may_open_a_message(prompt: str, expected: object) -> None:
    assert parse(["b"], prompt) == expected


def test_stop_strings_are_found_across_messages_of_content() -> None:
    text = marked("<|channel|>commentary<|message|>a b<|end|><|channel|>final<|message|>c d")
    assert parse([*text], stop=("b\n\nc",)) == ("", "a ", [], None)
    assert parse([*text], stop=("x",)) == ("", "a b\n\nc d", [], None)


PARTS = [
    *MARKS,
    *("assistant", "analysis", "commentary", "final", " to=functions.weather", " to=python", "json", " json"),
    *(" ", "\n", "Yes", '{"a": 1}', "t", "to", "ü", "<|end|", "user", "functions.weather to=assistant"),
]
ANSWERS = st.lists(st.one_of(st.sampled_from(PARTS), st.text(max_size=4)), max_size=24).map("".join)


@given(st.data(), ANSWERS, st.booleans(), st.sampled_from([(), ("Yes",), ("\n\n", "a")]))
def test_result_does_not_depend_on_the_pieces(
    data: st.DataObject, answer: str, cut_off: bool, stop: tuple[str, ...]
) -> None:
    text = marked(answer)
    whole = parse([text], stop=stop, cut_off=cut_off)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(pieces, stop=stop, cut_off=cut_off) == whole
    reasoning, content, calls, _ = whole
    for shown in (reasoning, content, *(arguments for _, arguments in calls)):
        assert not ANY_MARK.search(shown)


@given(st.lists(st.tuples(st.sampled_from(["analysis", "commentary", "final", TO]), st.text(min_size=1))))
@example([("final", "to"), ("analysis", "<|end|>")])
def test_no_text_is_lost(messages: list[tuple[str, str]]) -> None:
    headers = {TO: f" {TO}<|channel|>commentary json"}
    messages = [(channel, ANY_MARK.sub("", text) or "x") for channel, text in messages]
    answer = f"{MARKS['<|end|>']}".join(
        marked(f"{ROLE}{headers.get(channel, '<|channel|>' + channel)}<|message|>") + text
        for channel, text in messages
    )
    reasoning, content, calls, _ = parse([answer], "")
    assert reasoning == "\n\n".join(text for channel, text in messages if channel == "analysis")
    assert content == "\n\n".join(text for channel, text in messages if channel in ("commentary", "final"))
    expected = [text if text.strip() else text + "{}" for channel, text in messages if channel == TO]
    assert [arguments for _, arguments in calls] == expected
