# SPDX-License-Identifier: Apache-2.0
"""Reasoning is separated from content, however text is split into pieces; reasoning tokens are counted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mizzen.core.sampling_params import Grammar, GrammarKind
from mizzen.gateway.reasoning.families import (
    COHERE,
    DEEPSEEK,
    FAMILIES,
    GRANITE,
    GRANITE_32,
    HUNYUAN,
    MAGISTRAL,
    QWEN,
    SEED,
    ReasoningFamily,
    detect_reasoning_family,
    grammar_format,
)
from mizzen.gateway.requests.output import OutputDelta
from mizzen.gateway.text.tokenizer import Tokenizer
from mizzen.gateway.tools.families import HERMES
from mizzen.gateway.tools.parsed_output import ParsedOutput

texts = st.text("ab \n<>/thinkTHINK[]ü", max_size=20).filter(
    lambda text: not any(tag in text for tag in ("<think>", "</think>", "[THINK]", "[/THINK]"))
)
fragments = st.sampled_from(["<think>", "</think>", "<thi", "</th", "think>", " ", "\n\n", "a", "<", "ü"])


def parse(family: ReasoningFamily, pieces: Sequence[str], prompt: str = "") -> tuple[str, str]:
    parser = family.parser(prompt)
    if parser is None:
        return "", "".join(pieces)
    deltas = [parser.feed(piece) for piece in pieces] + [parser.end()]
    return "".join(reasoning for reasoning, _ in deltas), "".join(content for _, content in deltas)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
@settings(max_examples=100)
@given(reasoning=texts, content=texts, opened=st.booleans(), space=st.sampled_from(["", "\n", "\n\n"]))
def test_reasoning_is_split_from_content(
    family: ReasoningFamily, reasoning: str, content: str, opened: bool, space: str
) -> None:
    prompt = f"<|assistant|>{family.begins[0]}\n" if opened else "<|assistant|>\n"
    begin = "" if opened else family.begins[0] + space
    text = f"{begin}{reasoning}{space}{family.ends[0]}{space}{content}"
    result = parse(family, [text], prompt)
    assert result == (reasoning.strip(" \n"), content.lstrip(" \n"))
    assert parse(family, list(text), prompt) == result


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
@settings(max_examples=200)
@given(
    data=st.data(),
    places=st.lists(st.integers(0, 60), max_size=8),
    ending=st.sampled_from(["", "begin", "end"]),
)
def test_result_does_not_depend_on_how_text_is_split(
    family: ReasoningFamily, data: st.DataObject, places: list[int], ending: str
) -> None:
    prompt = {"": "", "begin": family.begins[0] + "\n", "end": family.begins[0] + family.ends[0]}[ending]
    tags = [*family.tags, *(family.answer.before if family.answer is not None else ())]
    starts = [tag[:cut] for tag in tags for cut in (1, len(tag) - 1)]
    own = st.sampled_from([*tags, *starts, " " * 9, "\n" * 65])
    text = "".join(data.draw(st.lists(fragments | texts | own, max_size=10)))
    cuts = sorted(min(place, len(text)) for place in places)
    pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    expected = parse(family, [text], prompt)
    assert parse(family, pieces, prompt) == expected
    assert parse(family, list(text), prompt) == expected


@pytest.mark.parametrize(
    ("family", "prompt", "text", "expected"),
    [
        (QWEN, "", "<think>\nhm\n</think>\n\nyes", ("hm", "yes")),
        (QWEN, "", "no thought", ("", "no thought")),
        (QWEN, "", " <b>", ("", " <b>")),
        (QWEN, "", "<think>\n\n</think>\n\nyes", ("", "yes")),
        (QWEN, "", "<think>cut sho", ("cut sho", "")),
        (QWEN, "", "<think>cut </thi", ("cut </thi", "")),
        (QWEN, "", "<thi", ("", "<thi")),
        (QWEN, "", "a <think>b</think>", ("", "a <think>b</think>")),
        (QWEN, "x<think>\n", "hm</think>yes", ("hm", "yes")),
        (QWEN, "x<think>\n\n</think>\n\n", "yes</think>", ("", "yes</think>")),
        (DEEPSEEK, "", "hm</think>yes", ("hm", "yes")),
        (DEEPSEEK, "", "<think>hm</think>yes", ("hm", "yes")),
        (DEEPSEEK, "", "<thi", ("<thi", "")),
        (DEEPSEEK, "x</think>", "yes", ("", "yes")),
        (MAGISTRAL, "", "[THINK]hm[/THINK]yes", ("hm", "yes")),
        (COHERE, "", "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>a<|END_RESPONSE|>", ("hm", "a")),
        (COHERE, "", "<|START_RESPONSE|>a<|END_RESPONSE|>\n", ("", "a")),
        (COHERE, "<|START_THINKING|><|END_THINKING|>", "<|START_RESPONSE|>a", ("", "a")),
        (COHERE, "<|START_THINKING|>", "hm<|END_THINKING|>a", ("hm", "a")),
        (HUNYUAN, "", "<think>\nhm\n</think>\n<answer>\na\n</answer>", ("hm", "a")),
        (HUNYUAN, "", "<answer>\na </answer> b\n</answer>", ("", "a </answer> b")),
        (HUNYUAN, "", "a <answer>b</answer>", ("", "a <answer>b")),
        (HUNYUAN, "", "\n" * 80 + "<answer>a</answer>", ("", "\n" * 80 + "<answer>a")),
        (QWEN, "", " \n <thin", ("", " \n <thin")),
        (GRANITE, "", "<think>hm</think><response>a</response>", ("hm", "a")),
        (GRANITE, "", "<response>a</response>\n<tool_call>b", ("", "a<tool_call>b")),
        (GRANITE_32, "", "Here is my thought process: hm Here is my response: a", ("hm", "a")),
        (GRANITE_32, "", "Here's my thought process:\nhm\nHere's my response:\na", ("hm", "a")),
        (GRANITE_32, "", "Here is my view.", ("", "Here is my view.")),
        (SEED, "x<seed:think><seed:cot_budget_reflect>", "hm</seed:think>a", ("hm", "a")),
    ],
)
def test_parser_handles_unusual_tags(
    family: ReasoningFamily, prompt: str, text: str, expected: tuple[str, str]
) -> None:
    assert parse(family, [text], prompt) == expected
    assert parse(family, list(text), prompt) == expected


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("</think>", "qwen3"),
        ("</think> </answer>", "hunyuan"),
        ("</think> </response>", "granite"),
        ("<|END_THINKING|>", "cohere"),
        ("<seed:think> </seed:think>", "seed-oss"),
        ("after 'Here is my thought process:' and after 'Here is my response:'", "granite32"),
        ("[/THINK]", "magistral"),
        ("</answer>", None),
        ("", None),
    ],
)
def test_family_is_detected_from_the_template(template: str, name: str | None, tokenizer: Tokenizer) -> None:
    family = detect_reasoning_family("auto", template, tokenizer)
    assert (family and family.name) == name


def feed(output: ParsedOutput, tokens: Sequence[str]) -> OutputDelta:
    deltas = [output.feed(token) for token in tokens] + [output.end()]
    return OutputDelta(
        "".join(delta.content for delta in deltas),
        "".join(delta.reasoning for delta in deltas),
        tuple(call for delta in deltas for call in delta.tool_calls),
    )


def test_call_after_reasoning_is_parsed() -> None:
    output = ParsedOutput(QWEN.parser(""), HERMES.parser(["f"]), ())
    tokens = ["<think>", "\n", "a ", "call", "\n", "</think>", "\n\n", "<tool_call>", '{"name": "f"}']
    assert output.counts_tokens
    delta = feed(output, tokens)
    assert (delta.reasoning, delta.content) == ("a call", "")
    assert [call.name for call in delta.tool_calls if call.name] == ["f"]
    assert output.reasoning_tokens == 6
    assert not output.counts_tokens
    assert output.finish_reason == "tool_calls"


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "</think>"}}\n</tool_call>'


@settings(max_examples=200)
@given(
    parts=st.lists(fragments | texts | st.just(CALL), max_size=8),
    places=st.lists(st.integers(0, 90), max_size=8),
    prompt=st.sampled_from(["", "<think>\n"]),
)
def test_reasoning_and_call_parsers_agree_on_any_split(
    parts: list[str], places: list[int], prompt: str
) -> None:
    text = "".join(parts)
    cuts = sorted(min(place, len(text)) for place in places)
    pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    def parse_pieces(pieces_: Sequence[str]) -> tuple[str, str, list[tuple[int, str]]]:
        output = ParsedOutput(QWEN.parser(prompt), HERMES.parser({"f": {}}), ())
        delta = feed(output, pieces_)
        calls: dict[int, str] = {}
        for call in delta.tool_calls:
            calls[call.index] = calls.get(call.index, "") + call.arguments
        assert output.finish_reason == ("tool_calls" if calls else None)
        return delta.content, delta.reasoning, sorted(calls.items())

    assert parse_pieces(pieces) == parse_pieces([text]) == parse_pieces(list(text))


@pytest.mark.parametrize(
    ("tokens", "prompt", "count"),
    [
        (["yes", " no"], "", 0),
        ([" ", "<", "b"], "", 0),
        (["<think>", "x", "</think>", "y"], "", 3),
        (["x", "</think>", "y"], "<think>", 2),
        (["x", "", "y"], "<think>", 3),
        (["y"], "<think></think>", 0),
    ],
)
def test_reasoning_tokens_are_counted(tokens: list[str], prompt: str, count: int) -> None:
    output = ParsedOutput(QWEN.parser(prompt), None, ())
    feed(output, tokens)
    assert output.reasoning_tokens == count
    assert output.finish_reason is None


def test_grammars_become_formats_after_reasoning() -> None:
    schema = grammar_format(Grammar(GrammarKind.JSON_SCHEMA, '{"type": "array"}'))
    assert (schema["type"], schema["json_schema"]) == ("json_schema", {"type": "array"})
    assert grammar_format(Grammar(GrammarKind.JSON_OBJECT))["json_schema"] == {"type": "object"}
    assert grammar_format(Grammar(GrammarKind.REGEX, "a+")) == {"type": "regex", "pattern": "a+"}
    assert grammar_format(Grammar(GrammarKind.EBNF, "root ::= x")) == {
        "type": "grammar",
        "grammar": "root ::= x",
    }
    tag = Grammar(GrammarKind.STRUCTURAL_TAG, '{"type": "structural_tag", "format": {"type": "any_text"}}')
    assert grammar_format(tag) == {"type": "any_text"}
    with pytest.raises(ValueError, match="format"):
        grammar_format(Grammar(GrammarKind.STRUCTURAL_TAG, '{"type": "structural_tag", "structures": []}'))
