# SPDX-License-Identifier: Apache-2.0
"""Grammars of tool calls, checked by random walks: forced grammars produce only calls."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import tokenizers
import xgrammar
from tokenizers import decoders, models, pre_tokenizers

from mizzen.core.sampling_params import Grammar, GrammarKind
from mizzen.engine.grammar.errors import GrammarError
from mizzen.engine.grammar.xgrammar_backend import GrammarBuilder, GrammarTarget
from mizzen.gateway.reasoning.families import COHERE as COHERE_THINKING
from mizzen.gateway.reasoning.families import (
    DEEPSEEK,
    GRANITE,
    GRANITE_32,
    HUNYUAN,
    MAGISTRAL,
    QWEN,
    ReasoningFamily,
    grammar_format,
)
from mizzen.gateway.reasoning.families import SEED as SEED_THINKING
from mizzen.gateway.text.tokenizer import Tokenizer
from mizzen.gateway.tools import structural_tags
from mizzen.gateway.tools.call_formats import CallSchema
from mizzen.gateway.tools.families import (
    BARE,
    COHERE,
    FAMILIES,
    GLM,
    GLM_XML,
    HERMES,
    LLAMA,
    MISTRAL,
    OLMO,
    PYTHONIC,
    SEED,
    ToolFamily,
)
from mizzen.gateway.tools.parsed_output import ParsedOutput
from mizzen.gateway.tools.structural_tags import ANY_OBJECT, NO_ARGUMENTS, Format

SCHEMAS: dict[str, Format] = {
    "weather": {
        "type": "object",
        "properties": {"city": {"enum": ["Köln", 'a"b']}, "days": {"type": "integer"}},
        "required": ["city"],
    },
    "any": ANY_OBJECT,
    "none": NO_ARGUMENTS,
    "many": {
        "type": "object",
        "properties": {
            "a": {"type": "boolean"},
            "b": {"$ref": "#/$defs/word"},
            "c": {"type": ["null", "integer"]},
        },
        "$defs": {"word": {"type": "integer"}},
        "additionalProperties": False,
    },
}
CALLS = [CallSchema(name, schema) for name, schema in SCHEMAS.items()]
END = 0
MAX_TOKENS = 600
WALKS = 12


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, GrammarBuilder]:
    """Return a byte tokenizer with the markers of all families, and a grammar compiler for it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(models.BPE({"</s>": END} | {c: i for i, c in enumerate(alphabet, 1)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["</s>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"])
    inner.add_special_tokens(["<|tool_call|>", "<|START_ACTION|>", "<|END_ACTION|>", "<|START_THINKING|>"])
    inner.add_special_tokens(["<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"])
    inner.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    folder: Path = tmp_path_factory.mktemp("model")
    inner.save(str(folder / "tokenizer.json"))
    target = GrammarTarget(folder=str(folder), vocab_size=inner.get_vocab_size(), end_token_ids=(END,))
    return Tokenizer(inner), GrammarBuilder(target, threads=1, nesting=64)


def matcher(builder: GrammarBuilder, grammar: Grammar) -> xgrammar.GrammarMatcher:
    return xgrammar.GrammarMatcher(builder.compile(grammar))


def walk(match: xgrammar.GrammarMatcher, size: int, chance: random.Random, text: Tokenizer) -> list[int]:
    """Return at most MAX_TOKENS random tokens that the grammar allows; stop once it allows the end token."""
    mask = xgrammar.allocate_token_bitmask(1, size)
    closing = [text.encode(mark, False)[0] for mark in '"}]']
    tokens: list[int] = []
    while len(tokens) < MAX_TOKENS:
        match.fill_next_token_bitmask(mask)
        words = [int(word) & 0xFFFFFFFF for word in mask[0].tolist()]
        allowed = [i for i in range(size) if words[i // 32] >> (i % 32) & 1]
        if END in allowed:
            match.accept_token(END)
            return tokens
        ends = [token for token in closing if token in allowed]
        token = chance.choice(ends if ends and chance.random() < 0.6 else allowed)
        assert match.accept_token(token)
        tokens.append(token)
    return tokens


def check(family: ToolFamily, tokens: list[int], text: Tokenizer, reasoning: ReasoningFamily | None) -> bool:
    """Check that the output consists only of calls; return True, or False if MAX_TOKENS cut it off."""
    shown = (*family.shown_tokens, *(reasoning.tags if reasoning is not None else ()))
    decoder = text.detokenizer(shown=shown)
    output = ParsedOutput(
        reasoning.parser("") if reasoning is not None else None, family.parser(SCHEMAS), shown
    )
    deltas = [output.feed(decoder.add((token,))) for token in tokens]
    deltas += [output.feed(decoder.flush()), output.end()]
    calls: list[tuple[str, str]] = []
    for piece in (piece for delta in deltas for piece in delta.tool_calls):
        if piece.name is not None:
            calls.append((piece.name, ""))
        calls[-1] = (calls[-1][0], calls[-1][1] + piece.arguments)
    if len(tokens) == MAX_TOKENS:
        return False
    assert calls
    assert "".join(delta.content for delta in deltas) == ""
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    assert output.finish_reason == "tool_calls"
    return True


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("family", [*FAMILIES.values(), BARE], ids=lambda family: family.name)
def test_forced_grammars_allow_only_calls(
    family: ToolFamily, many: bool, tokenizer: tuple[Tokenizer, GrammarBuilder]
) -> None:
    text, builder = tokenizer
    grammar = structural_tags.structural_tag_grammar(family.forced(CALLS, many, text))
    compiled = builder.compile(grammar)
    ended = 0
    for seed in range(WALKS):
        tokens = walk(xgrammar.GrammarMatcher(compiled), text.vocab_size, random.Random(seed), text)
        ended += check(family, tokens, text, None)
    assert ended >= WALKS // 2


AFTER_REASONING = [
    (HERMES, QWEN),
    (BARE, DEEPSEEK),
    (MISTRAL, MAGISTRAL),
    (FAMILIES["cohere"], COHERE_THINKING),
    (FAMILIES["hunyuan"], HUNYUAN),
    (FAMILIES["granite"], GRANITE_32),
    (SEED, SEED_THINKING),
]


@pytest.mark.parametrize(("family", "reasoning"), AFTER_REASONING, ids=lambda family: family.name)
def test_forced_grammars_allow_calls_after_reasoning(
    family: ToolFamily, reasoning: ReasoningFamily, tokenizer: tuple[Tokenizer, GrammarBuilder]
) -> None:
    text, builder = tokenizer
    format = reasoning.format_with_reasoning(family.forced(CALLS, False, text), "", text)
    begin = "" if reasoning.always_open else reasoning.begins[0]
    reasoning_text = f"{begin}\nhm <b>\n{reasoning.ends[0]}\n\n"
    ids = text.encode(reasoning_text, add_special_tokens=False)
    compiled = builder.compile(structural_tags.structural_tag_grammar(format))
    for seed in range(4):
        match = xgrammar.GrammarMatcher(compiled)
        assert all(match.accept_token(token) for token in ids)
        rest = walk(match, text.vocab_size, random.Random(seed), text)
        check(family, [*ids, *rest], text, reasoning)


def accepts(builder: GrammarBuilder, grammar: Grammar, text: Tokenizer, answer: str) -> bool:
    match = matcher(builder, grammar)
    ids = text.encode(answer, add_special_tokens=False)
    return all(match.accept_token(token) for token in ids) and match.accept_token(END)


YES_OR_NO = Grammar(GrammarKind.REGEX, "yes|no")


@pytest.mark.parametrize("reasoning", [QWEN, DEEPSEEK, MAGISTRAL], ids=lambda family: family.name)
def test_line_breaks_precede_constrained_text_only_after_reasoning(
    reasoning: ReasoningFamily, tokenizer: tuple[Tokenizer, GrammarBuilder]
) -> None:
    """The parser drops line breaks after reasoning, but without reasoning they would be content."""
    text, builder = tokenizer
    format = reasoning.format_with_reasoning(grammar_format(YES_OR_NO), "", text)
    grammar = structural_tags.structural_tag_grammar(format)
    thought = f"{'' if reasoning.always_open else reasoning.begins[0]}\nhm\n{reasoning.ends[0]}"
    for answer in ("yes", "\nno", "\n\nyes"):
        assert accepts(builder, grammar, text, thought + answer)
    assert not accepts(builder, grammar, text, thought + "\n\n\nyes")
    if reasoning.always_open:
        return
    assert accepts(builder, grammar, text, "yes")
    compiled = builder.compile(grammar)
    for answer in ("\nyes", "\n\nno", " yes", "maybe"):
        assert not accepts(builder, grammar, text, answer)
    for seed in range(WALKS):
        tokens = walk(xgrammar.GrammarMatcher(compiled), text.vocab_size, random.Random(seed), text)
        output = ParsedOutput(reasoning.parser(""), None, reasoning.tags)
        answer = text.decode(tokens, skip_special_tokens=False).removesuffix("</s>")
        content = output.feed(answer).content + output.end().content
        assert content in ("yes", "no") or tokens[-1] != END


@pytest.mark.parametrize(
    ("reasoning", "answer", "good"),
    [
        (COHERE_THINKING, "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>yes<|END_RESPONSE|>", True),
        (COHERE_THINKING, "<|START_RESPONSE|>no<|END_RESPONSE|>", True),
        (COHERE_THINKING, "<|START_RESPONSE|>maybe<|END_RESPONSE|>", False),
        (COHERE_THINKING, "yes", True),
        (HUNYUAN, "<think>\nhm\n</think>\n<answer>\nno\n</answer>", True),
        (GRANITE, "<think>hm</think><response>yes</response>", True),
        (GRANITE, "<response>yes</response> and", False),
        (GRANITE_32, "Here is my thought process: hm\nHere is my response:\n\nno", True),
    ],
)
def test_constrained_text_may_be_between_answer_tags(
    reasoning: ReasoningFamily, answer: str, good: bool, tokenizer: tuple[Tokenizer, GrammarBuilder]
) -> None:
    text, builder = tokenizer
    format = reasoning.format_with_reasoning(grammar_format(YES_OR_NO), "", text)
    assert accepts(builder, structural_tags.structural_tag_grammar(format), text, answer) is good
    if good:
        parser = reasoning.parser("")
        assert parser is not None
        assert (parser.feed(answer)[1] + parser.end()[1]) in ("yes", "no")


GOOD = '{"city":"Köln"}'
BAD = '{"city":"Rom"}'
WIDE = '{"city": "Köln"}'
COHERE_CALL = '{"tool_call_id": "0", "tool_name": "weather", "parameters": '
GLM_XML_CALL = "Hm.<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"
SEED_CALL = (
    "<seed:tool_call>\n<function=weather>\n<parameter=city>{}</parameter>\n</function>\n</seed:tool_call>"
)
FREE: list[tuple[ToolFamily, str, bool]] = [
    (HERMES, "just text", True),
    (HERMES, f'Hm.\n<tool_call>\n{{"name": "weather", "arguments": {GOOD}}}\n</tool_call>', True),
    (HERMES, f'Hm.\n<tool_call>\n{{"name": "weather", "arguments": {BAD}}}\n</tool_call>', False),
    (HERMES, f'Hm.\n<tool_call>\n{{"name": "weather", "arguments": {WIDE}}}\n</tool_call>', False),
    (HERMES, '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>', False),
    (LLAMA, "just text", True),
    (LLAMA, f'{{"name": "weather", "parameters": {GOOD}}}', True),
    (LLAMA, f'{{"name": "weather", "parameters": {BAD}}}', False),
    (MISTRAL, "just text", True),
    (MISTRAL, f'Hm.[TOOL_CALLS][{{"name": "weather", "arguments": {GOOD}}}]', True),
    (MISTRAL, f'Hm.[TOOL_CALLS][{{"name": "weather", "arguments": {BAD}}}]', False),
    (COHERE, "just text", True),
    (COHERE, f'<|START_ACTION|>[\n    {COHERE_CALL}{GOOD}}}\n]<|END_ACTION|>', True),
    (COHERE, f'<|START_ACTION|>[\n    {COHERE_CALL}{BAD}}}\n]<|END_ACTION|>', False),
    (GLM, "\njust text", True),
    (GLM, f"weather\n{GOOD}", True),
    (GLM, f"weather\n{BAD}", False),
    (GLM_XML, GLM_XML_CALL.format("Köln"), True),
    (GLM_XML, GLM_XML_CALL.format("Rom"), False),
    (SEED, SEED_CALL.format("Köln"), True),
    (SEED, SEED_CALL.format("Rom"), False),
    (OLMO, 'Hm.<function_calls>weather(city="Köln", days=2)\nnone()</function_calls>', True),
    (OLMO, '<function_calls>weather(city="Rom")</function_calls>', False),
    (OLMO, "<function_calls>weather(days=2)</function_calls>", False),
    (OLMO, '<function_calls>many(b=5)\nmany(a=true, c=null)\nmany()</function_calls>', True),
    (OLMO, "<function_calls>many(, a=true)</function_calls>", False),
    (OLMO, '<function_calls>any(**{"x":[1]})</function_calls>', True),
    (PYTHONIC, '[weather(city="Köln"), none()]', True),
    (PYTHONIC, '[weather(city="Rom")]', False),
    (PYTHONIC, "[1] text", True),
]  # fmt: skip


@pytest.mark.parametrize(("family", "answer", "good"), FREE)
def test_free_grammars_allow_text_and_valid_calls(
    family: ToolFamily, answer: str, good: bool, tokenizer: tuple[Tokenizer, GrammarBuilder]
) -> None:
    text, builder = tokenizer
    assert (
        accepts(builder, structural_tags.structural_tag_grammar(family.free(CALLS, True, text)), text, answer)
        is good
    )


def test_one_call_is_the_limit_without_parallel_calls(tokenizer: tuple[Tokenizer, GrammarBuilder]) -> None:
    text, builder = tokenizer
    call = '<tool_call>\n{"name": "none", "arguments": {}}\n</tool_call>'
    for build in (HERMES.forced, HERMES.free):
        single = structural_tags.structural_tag_grammar(build(CALLS, False, text))
        parallel = structural_tags.structural_tag_grammar(build(CALLS, True, text))
        assert accepts(builder, single, text, call)
        assert not accepts(builder, single, text, f"{call}\n{call}")
        assert accepts(builder, parallel, text, f"{call}\n{call}")


def test_grammar_allows_a_call_or_the_requested_format(tokenizer: tuple[Tokenizer, GrammarBuilder]) -> None:
    text, builder = tokenizer
    requested: Any = structural_tags.json_value({"type": "array", "items": {"type": "integer"}})
    grammar = structural_tags.structural_tag_grammar(
        structural_tags.either(HERMES.forced(CALLS, True, text), requested)
    )
    assert accepts(builder, grammar, text, "[1,2]")
    assert accepts(builder, grammar, text, '<tool_call>\n{"name": "none", "arguments": {}}\n</tool_call>')
    assert not accepts(builder, grammar, text, "text")


def test_unenforceable_schema_is_rejected(tokenizer: tuple[Tokenizer, GrammarBuilder]) -> None:
    text, builder = tokenizer
    calls = [*CALLS, CallSchema("odd", {"type": "object", "properties": {"a": {"not": {"type": "null"}}}})]
    for build in (HERMES.forced, LLAMA.free, MISTRAL.free):
        with pytest.raises(GrammarError, match="not"):
            builder.compile(structural_tags.structural_tag_grammar(build(calls, True, text)))
