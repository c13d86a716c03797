# SPDX-License-Identifier: Apache-2.0
"""Tool call parsers of every family: valid and malformed calls, however the text is split into pieces."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mizzen.gateway.text.tokenizer import Tokenizer
from mizzen.gateway.tools.families import (
    BARE,
    COHERE,
    FAMILIES,
    GLM,
    GRANITE,
    HERMES,
    HUNYUAN,
    LLAMA,
    MISTRAL,
    OLMO,
    PYTHONIC,
    QWEN_XML,
    ToolFamily,
)
from mizzen.gateway.tools.parsers.named import MAX_HEAD
from tool_call_texts import (
    MARKERS,
    TOOLS,
    WRITERS,
    Calls,
    Parsed,
    garbage,
    join_deltas,
    made_calls,
    parse,
    plain_texts,
    split_pieces,
)

# ── properties ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=120)
@given(data=st.data())
def test_parser_reads_the_calls_that_a_family_writes(name: str, data: st.DataObject) -> None:
    family, write = WRITERS[name]
    content, calls = data.draw(plain_texts), data.draw(made_calls)
    if name == "json" or (family is LLAMA and content.lstrip().startswith(("{", "<"))):
        content = ""
    text = write(content, calls)
    found_content, found_calls = parse(family, [text])
    assert found_calls == calls
    assert found_content.strip(" \n") == content.strip(" \n")
    assert parse(family, list(text)) == (found_content, found_calls)
    assert parse(family, data.draw(split_pieces(text))) == (found_content, found_calls)


@pytest.mark.parametrize("family", [*FAMILIES.values(), BARE], ids=lambda one: one.name)
@settings(max_examples=200)
@given(data=st.data())
def test_result_does_not_depend_on_how_text_is_split(family: ToolFamily, data: st.DataObject) -> None:
    text = data.draw(garbage)
    expected = parse(family, [text])
    assert parse(family, list(text)) == expected
    assert parse(family, data.draw(split_pieces(text))) == expected


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=60)
@given(content=plain_texts, calls=made_calls, end=st.integers(0, 400))
def test_truncated_output_gives_a_prefix(name: str, content: str, calls: Calls, end: int) -> None:
    """The calls in a truncated text are a prefix of the calls in the full text."""
    family, write = WRITERS[name]
    text = write(content, calls)
    _, all_calls = parse(family, [text])
    _, truncated_calls = parse(family, [text[:end]])
    assert [name for name, _ in truncated_calls] == [name for name, _ in all_calls][: len(truncated_calls)]
    for (_, truncated), (_, full) in zip(truncated_calls, all_calls, strict=False):
        assert full.startswith(truncated) or truncated == "{}"


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=60)
@given(calls=made_calls, end=st.integers(0, 200))
def test_call_is_open_until_its_arguments_are_complete(name: str, calls: Calls, end: int) -> None:
    family, write = WRITERS[name]
    parser = family.parser(TOOLS)
    deltas = [parser.feed(letter) for letter in write("", calls)[:end]]
    is_open = parser.call_open
    _, partial_calls = join_deltas([*deltas, parser.end()])
    complete = [
        arguments == expected_arguments
        for (_, arguments), (_, expected_arguments) in zip(partial_calls, calls, strict=False)
    ]
    assert is_open == (False in complete[-1:])


def test_call_between_tags_is_open_until_its_closing_tag() -> None:
    parser = QWEN_XML.parser(TOOLS)
    text = "<tool_call>\n<function=weather>\n<parameter=days>\n5\n</parameter>\n</function>"
    seen = []
    for letter in text:
        parser.feed(letter)
        seen.append((parser.call_count, parser.call_open))
    assert seen[0] == (0, False)
    assert set(seen[text.index(">\n<parameter") : -1]) == {(1, True)}
    assert seen[-1] == (1, False)


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral", "granite", "cohere", "glm4"])
@settings(max_examples=40)
@given(content=plain_texts, calls=made_calls)
def test_parser_gives_the_same_output_token_by_token(
    name: str, content: str, calls: Calls, small_tokenizer: Tokenizer
) -> None:
    """The text includes markers that are special tokens."""
    family, write = WRITERS[name]
    text = write(content, calls)
    decoder = small_tokenizer.detokenizer(shown=MARKERS)
    ids = small_tokenizer.encode(text, add_special_tokens=False)
    pieces = [decoder.add((token,)) for token in ids] + [decoder.flush()]
    assert "".join(pieces) == text
    assert parse(family, pieces) == parse(family, [text])


def test_shown_special_tokens_are_in_the_text(small_tokenizer: Tokenizer) -> None:
    ids = small_tokenizer.encode("<|python_tag|>a<|eom_id|>b[ARGS]", add_special_tokens=False)
    assert small_tokenizer.detokenizer().add(ids) == "ab"
    assert small_tokenizer.detokenizer(shown=("<|python_tag|>",)).add(ids) == "<|python_tag|>ab"
    assert small_tokenizer.special_token_id("[ARGS]") == ids[-1]
    assert small_tokenizer.special_token_id("<tool_call>") is None


# ── cases ───────────────────────────────────────────────────────────────────────────────────────────────────

A1 = ("weather", '{"a": 1}')
END = "\n</function>\n</tool_call>"
PLACE = '{"city": "Köln", "note": "hello"}'
XML_FAULTS = [
    # without </parameter>
    ("<parameter=city>\nKöln\n<parameter=note>\nhello\n</parameter>" + END, PLACE),
    ("<parameter=city>\nKöln\n  <parameter=note>\nhello" + END, PLACE),
    ("<parameter=city>Köln<parameter=note>hello</function></tool_call>", PLACE),
    ("<parameter=city>\nKöln\n</parameter>\n<parameter=note>\nhello\n</tool_call>", PLACE),
    ("<parameter=days>\n5\n<parameter=city>\nKöln" + END, '{"days": 5, "city": "Köln"}'),
    ("<parameter=city>\nKöln\n</function>", '{"city": "Köln"}'),
    ("<parameter=city>\nKöln\n</para", '{"city": "Köln"}'),
    ("<parameter=city>\nKöln\n</function>\n</tool", '{"city": "Köln"}'),
    ("<parameter=city>\n", '{"city": ""}'),
    ("<parameter=more>\n[1, 2]\n", '{"more": [1, 2]}'),
    ("<parameter=more>\n[1, 2\n", '{"more": "[1, 2"}'),
    # other closing tags
    ("<parameter=city>\nKöln\n</parameter/>\n<parameter=note>\nhello\n</ parameter >" + END, PLACE),
    # without > after the key
    ("<parameter=more: [1, 2]\n</parameter>" + END, '{"more": [1, 2]}'),
    ("<parameter=more: [1]</parameter>\n<parameter=days=7</parameter>" + END, '{"more": [1], "days": 7}'),
    ("<parameter=city\nKöln\n</parameter>\n<parameter=note hello\n</parameter>" + END, PLACE),
    ("<parameter=note: a -> b</parameter>" + END, '{"note": "a -> b"}'),
    ('<parameter="city">\nKöln\n</parameter>' + END, '{"city": "Köln"}'),
    ("<parameter=more: [" + "1, " * 200 + "1]</parameter>" + END, '{"more": [' + "1, " * 200 + "1]}"),
    ("<parameter=city", '{"city": ""}'),
    # text that only looks like a tag belongs to the value
    ("<parameter=note>\na <parameter=x>\n<parameter=note> b</parameter>" + END,
     '{"note": "a <parameter=x>\\n<parameter=note> b"}'),
    ("<parameter=note>\na\n</function>\nb\n</parameter>" + END, '{"note": "a\\n</function>\\nb"}'),
    ("<parameter=note>\na\n</function>\n</tool_call>\nb\n</parameter>" + END,
     '{"note": "a\\n</function>\\n</tool_call>\\nb"}'),
]  # fmt: skip
"""Calls after `<function=weather>` that a model wrote with faults, and the arguments that it meant."""
CALL = '{"name": "weather", "arguments": {"a": 1}}'
UNKNOWN = '{"name": "x", "arguments": {"a": [1, "]"]}}'
CASES: list[tuple[ToolFamily, str, Parsed]] = [
    # text around calls; white space next to calls belongs to the syntax
    (HERMES, 'Hm.\n<tool_call>\n{"name": "weather", "arguments": {"a": 1}}\n</tool_call>', ("Hm.", [A1])),
    (HERMES, '<tool_call>{"name":"weather","arguments":{"a": 1}}</tool_call> So. ', ("So. ", [A1])),
    (HERMES, "just text \n", ("just text \n", [])),
    (HERMES, "a < b <tool", ("a < b <tool", [])),
    # common mistakes of models, and their intended meaning
    (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "weather"}</tool_call>', ("", [A1])),
    (HERMES, '<tool_call>{"name": "weather", "arguments": {"a": 1}\n</tool_call>', ("", [A1])),
    (HERMES, '<tool_call>{"name": "weather", "arguments": {"a": 1}}}\n</tool_call>', ("", [A1])),
    (HERMES, '<tool_call>{"name": "weather", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", [A1])),
    (HERMES, '<tool_call>{"name": "weather", "parameters": {"a": 1}}', ("", [A1])),
    (HERMES, '<tool_call>{"name": "weather"}</tool_call>', ("", [("weather", "{}")])),
    (HERMES, '<tool_call>{"name": "weather", "arguments": null}</tool_call>', ("", [("weather", "{}")])),
    # text that is not a call is content, without the markers
    (HERMES, "a <tool_call>\nno json\n</tool_call> b", ("a \nno json\n b", [])),
    (HERMES, '<tool_call>{"name": "x", "arguments": {}}</tool_call>', ('{"name": "x", "arguments": {}}', [])),
    (HERMES, '<tool_call>{"name": "weather", "arguments": 5}', ('{"name": "weather", "arguments": 5}', [])),
    (HERMES, '<tool_call>["weather"]</tool_call>', ('["weather"]', [])),
    (HERMES, '<tool_call>{"name": "weather", "arg', ('{"name": "weather", "arg', [])),
    (HERMES, "</tool_call>", ("", [])),
    (QWEN_XML, "<function=get-time>\n</function>", ("", [("get-time", "{}")])),
    (QWEN_XML, "Hm. <function=unknown>\n</function>", ("Hm. unknown>\n", [])),
    (QWEN_XML, "<tool_call>\n<function=" + "x" * 999, ("\n" + "x" * 999, [])),
    (
        QWEN_XML,
        "<tool_call>\n<function=weather>\n<parameter=days>True</parameter></tool_call>So.",
        ("So.", [("weather", '{"days": true}')]),
    ),
    (
        QWEN_XML,
        "<function=weather><parameter=days>\nsoon\n</parameter><parameter=city>Kö",
        ("", [("weather", '{"days": "soon", "city": "Kö"}')]),
    ),
    *[
        (QWEN_XML, f"<tool_call>\n<function=weather>\n{text}", ("", [("weather", arguments)]))
        for text, arguments in XML_FAULTS
    ],
    (LLAMA, '{"name": "weather", "parameters": {"a": 1}}', ("", [A1])),
    (LLAMA, '<|python_tag|>{"type": "function", "name": "weather", "parameters": {"a": 1}}', ("", [A1])),
    (LLAMA, '{"name": "weather", "parameters": {"a": 1}} done', ("done", [A1])),
    (LLAMA, '{"name": "Bob", "age": 3}', ('{"name": "Bob", "age": 3}', [])),
    (LLAMA, '{"answer": 42}', ('{"answer": 42}', [])),
    (LLAMA, 'See {"name": "weather", "parameters": {}}', ('See {"name": "weather", "parameters": {}}', [])),
    (LLAMA, "<|python_tag|>print(1)", ("print(1)", [])),
    (MISTRAL, '[TOOL_CALLS] [{"name": "weather", "arguments": {"a": 1}}]', ("", [A1])),
    (MISTRAL, 'Hm. [TOOL_CALLS]{"name": "weather", "arguments": {"a": 1}}', ("Hm.", [A1])),
    (MISTRAL, '[TOOL_CALLS]weather{"a": 1}', ("", [A1])),
    (MISTRAL, '[TOOL_CALLS]weather[CALL_ID]abc123DEF[ARGS]{"a": 1}', ("", [A1])),
    (MISTRAL, '[TOOL_CALLS]unknown[ARGS]{"a": 1}', ('unknown{"a": 1}', [])),
    (MISTRAL, "[TOOL_CALLS] [1, 2]", (" [1, 2]", [])),
    (MISTRAL, "[TOOL_CALLS]" + "x" * (MAX_HEAD + 9), ("x" * (MAX_HEAD + 9), [])),
    (GRANITE, '<|tool_call|>[{"name": "weather", "arguments": {"a": 1}}]', ("", [A1])),
    (GRANITE, '<tool_call>{"name": "weather", "arguments": {"a": 1}}</tool_call>', ("", [A1])),
    (GRANITE, "Hm. <|tool_call|>none", ("Hm. none", [])),
    (COHERE, '<|START_ACTION|>[{"tool_name": "weather", "parameters": {"a": 1}}]<|END_ACTION|>', ("", [A1])),
    (COHERE, '<|START_ACTION|>[{"tool_name": "x", "parameters": {}}]<|END_ACTION|>',
     ('[{"tool_name": "x", "parameters": {}}]', [])),
    (HUNYUAN, '<tool_calls><tool_call>{"name": "weather", "arguments": {"a": 1}}</tool_call></tool_calls>',
     ("", [A1])),
    (HUNYUAN, "<tool_calls>[]</tool_calls>.", ("[].", [])),
    (GLM, '\nweather \n{"a": 1}', ("", [A1])),
    (GLM, "\nweather is fine\n{", ("\nweather is fine\n{", [])),
    (GLM, 'weather {"a": 1}', ('weather {"a": 1}', [])),
    (GLM, 'Hm.<|assistant|>weather\n{"a": 1}<|observation|>', ("Hm.", [A1])),
    (BARE, '[{"name":"weather","arguments":{"a": 1}}]', ("", [A1])),
    (BARE, "[1, 2]", ("[1, 2]", [])),
    # an element of a list that is not a call is content; the elements after it may be calls
    *[
        (family, f"{opening}[{', '.join(elements)}]{closing}", expected)
        for family, opening, closing in (
            (BARE, "", ""),
            (COHERE, "<|START_ACTION|>", "<|END_ACTION|>"),
            (GRANITE, "<|tool_call|>", ""),
            (HUNYUAN, "<tool_calls>", "</tool_calls>"),
        )
        for elements, expected in (
            ([UNKNOWN, CALL], (f"[{UNKNOWN}", [A1])),
            ([CALL, UNKNOWN, CALL], (UNKNOWN, [A1, A1])),
            ([CALL, UNKNOWN], (f"{UNKNOWN}]", [A1])),
            (['{"x": 1}', UNKNOWN], (f'[{{"x": 1}}, {UNKNOWN}]', [])),
        )
    ],
    (COHERE, '<|START_ACTION|>[{"tool_name": "x"<|END_ACTION|>So.', ('[{"tool_name": "x"So.', [])),
    (PYTHONIC, '[weather(a=1), x(b="), ]"), weather(a=1)]', ('x(b="), ]")', [A1, A1])),
    (OLMO, "<function_calls>x(a=1)\nweather(a=1)</function_calls>", ("x(a=1)", [A1])),
    (PYTHONIC, "[x(b=[1, (2)]) , weather(a=1)]", ("[x(b=[1, (2)])", [A1])),
    (OLMO, "<function_calls>weather(a=1)\nand also\nweather(a=1)</function_calls>", ("and also", [A1, A1])),
    # neither prose nor text after a list has calls
    *[
        (PYTHONIC, text, (text, []))
        for text in (
            "[see the docs, weather(a=1)]",
            "[Note] I looked, weather(a=1)",
            "[x(1) is it, weather(a=1)]",
            "[x(1), which is it, weather(a=1)]",
            "[x(a=1)] So, weather(a=1)",
        )
    ],
    (PYTHONIC, "[weather(a=1), x(a=1)] So, weather(a=1)", ("x(a=1)] So, weather(a=1)", [A1])),
    *[
        (OLMO, f"<function_calls>{text}</function_calls>", (text, []))
        for text in (
            "I look it up:\nweather(a=1)",
            "weather is what I call:\nweather(a=1)",
            "call(s) that I make:\nweather(a=1)",
            "\nx(a=\nweather(a=1)",
        )
    ],
]  # fmt: skip


@pytest.mark.parametrize(("family", "text", "expected"), CASES)
def test_parser_handles_malformed_calls(family: ToolFamily, text: str, expected: Parsed) -> None:
    assert parse(family, [text]) == expected
    assert parse(family, list(text)) == expected
    assert not any(marker in expected[0] for marker in MARKERS)


def test_arguments_are_streamed_as_written() -> None:
    parser = HERMES.parser(TOOLS)
    pieces = ('<tool_call>{"name": "weather", ', '"arguments": {"ci', 'ty": "Kö', 'ln"}', "}</tool_call>")
    deltas = [parser.feed(piece) for piece in pieces]
    streamed = [[(call.name, call.arguments) for call in delta.tool_calls] for delta in deltas]
    assert streamed == [
        [],
        [("weather", ""), (None, '{"ci')],
        [(None, 'ty": "Kö')],
        [(None, 'ln"}')],
        [],
    ]


def test_call_that_is_cut_off_stays_incomplete() -> None:
    parser = QWEN_XML.parser(TOOLS)
    first = parser.feed("<function=weather><parameter=city>\nKöl")
    assert join_deltas([first, parser.end(cut_off=True)]) == ("", [("weather", '{"city": "Köl')])
    assert parser.call_open


def test_json_that_is_not_a_call_is_not_held_back() -> None:
    parser = LLAMA.parser(TOOLS)
    assert parser.feed('{"answer').content == ""
    assert parser.feed('": "So').content == '{"answer": "So'
    assert parser.feed(" it is").content == " it is"


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=100)
@example(content="", calls=[("weather", "{}")], stop=" ")
@given(content=plain_texts, calls=made_calls, stop=st.text("abc <{[\n.,tol", min_size=1, max_size=3))
def test_stop_strings_apply_only_to_content(name: str, content: str, calls: Calls, stop: str) -> None:
    family, write = WRITERS[name]
    if name == "json" or (family is LLAMA and content.lstrip().startswith(("{", "<"))):
        content = ""
    text = write(content, calls)

    def parse_with_stop(pieces: Sequence[str]) -> tuple[Parsed, bool]:
        parser = family.parser(TOOLS, (stop,))
        deltas = [parser.feed(piece) for piece in pieces]
        return join_deltas([*deltas, parser.end()]), parser.stopped

    (parsed_content, parsed_calls), stopped = expected = parse_with_stop([text])
    assert parse_with_stop(list(text)) == expected
    assert stop not in parsed_content
    if stopped:
        assert text.startswith((parsed_content + stop, parsed_content.rstrip() + stop))
        assert parsed_calls == []
    else:
        assert (parsed_content, parsed_calls) == parse(family, [text])


@pytest.mark.parametrize("family", [HERMES, LLAMA, MISTRAL, BARE], ids=lambda one: one.name)
def test_unpaired_surrogate_is_not_an_argument(family: ToolFamily) -> None:
    """An unpaired surrogate cannot be encoded as UTF-8, so it cannot be sent."""
    call = r'{"name": "add_2", "arguments": "{\"a\": \"\ud800\"}"}'
    text = {HERMES: f"<tool_call>{call}</tool_call>", MISTRAL: f"[TOOL_CALLS][{call}]"}.get(family, call)
    content, calls = parse(family, [text])
    assert calls == []
    assert r"\ud800" in content.encode().decode()
