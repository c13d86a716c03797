# SPDX-License-Identifier: Apache-2.0
"""Grammars of harmony answers, checked with the engine's compiler: reasoning is free, the rest is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import xgrammar
from tokenizers import decoders, models, pre_tokenizers

from mizzen.core.sampling_params import Grammar, GrammarKind
from mizzen.engine.grammar.xgrammar_backend import GrammarBuilder, GrammarTarget
from mizzen.gateway.harmony.markers import CALL, MARKS, RETURN
from mizzen.gateway.harmony.output_form import HarmonyForm, find_harmony_form
from mizzen.gateway.text.tokenizer import Tokenizer
from mizzen.gateway.tools.tool_choice import OfferedTools, parse_tools
from mizzen.gateway.tools.tool_schemas import Function, NamedFunction, NamedTool, Tool

HEAD = "<|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>Hm, [1]\n<|end|>"
PLAN = f"{HEAD}<|channel|>commentary<|message|>I look.<|end|>"
FINAL = f"{HEAD}<|channel|>final"
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Köln", "Bonn"]}},
    "required": ["city"],
    "additionalProperties": False,
}
DIGITS = Grammar(GrammarKind.REGEX, "[0-9]{2}")
TOOLS = [Tool("function", Function("weather", None, CITY, True)), Tool("function", Function("time"))]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[HarmonyForm, GrammarBuilder]:
    """Return the form of a byte tokenizer with the format's tokens, and a grammar compiler for it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([*MARKS])
    folder: Path = tmp_path_factory.mktemp("model")
    inner.save(str(folder / "tokenizer.json"))
    ends = tuple(Tokenizer(inner).encode(RETURN + CALL, add_special_tokens=False))
    target = GrammarTarget(folder=str(folder), vocab_size=inner.get_vocab_size(), end_token_ids=ends)
    form = find_harmony_form("gpt-oss", "gpt-oss", "", Tokenizer(inner))
    assert form is not None
    return form, GrammarBuilder(target, threads=1, nesting=64)


def accepts(
    built: tuple[HarmonyForm, GrammarBuilder],
    answer: str,
    tools: OfferedTools | None = None,
    requested: Grammar | None = None,
    prompt: str = HEAD,
) -> bool:
    """Return whether the grammar of a request allows a complete answer."""
    form, builder = built
    encode = form.tokenizer.encode
    grammar = form.grammar(np.array(encode(prompt, False), np.int32), tools, requested)
    assert grammar is not None
    match = xgrammar.GrammarMatcher(builder.compile(grammar))
    return all(match.accept_token(token) for token in encode(answer, False)) and match.is_terminated()


def offered(choice: Any = None, parallel: bool | None = None) -> OfferedTools:
    tools = parse_tools(TOOLS, choice, parallel)
    assert tools is not None
    return tools


def call(arguments: str, name: str = "weather", end: str = CALL) -> str:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}{end}"


BONN = '{"city":"Bonn"}'


def test_format_holds_for_the_answer_and_not_for_reasoning(built: Any) -> None:
    for answer in (f"{THOUGHT}{FINAL}", f"{THOUGHT}{HEAD}{THOUGHT}{FINAL}", "<|channel|>final"):
        for kind in ("", " <|constrain|>json", "<|constrain|>json"):
            assert accepts(built, f"{answer}{kind}<|message|>42<|return|>", requested=DIGITS)
        assert not accepts(built, f"{answer}<|message|>4x<|return|>", requested=DIGITS)
        assert not accepts(built, f"{answer}<|message|>4<|return|>", requested=DIGITS)
    assert not accepts(built, f"{THOUGHT}{PLAN}{FINAL}<|message|>42<|return|>", requested=DIGITS)
    assert not accepts(built, f"{THOUGHT}<|return|>", requested=DIGITS)


@pytest.mark.parametrize("choice", ["required", NamedTool(NamedFunction("weather"))])
def test_forced_call_follows_reasoning(built: Any, choice: Any) -> None:
    tools = offered(choice)
    assert accepts(built, f"{THOUGHT}{HEAD}{call(BONN)}", tools)
    assert accepts(built, call(BONN), tools)
    other = f" to=functions.weather<|channel|>commentary json<|message|>{BONN}<|call|>"
    assert accepts(built, THOUGHT + HEAD + other, tools)
    assert not accepts(built, f"{THOUGHT}{HEAD}{call(BONN.replace('Bonn', 'Rome'))}", tools)
    assert not accepts(built, f"{THOUGHT}{FINAL}<|message|>Hi.<|return|>", tools)
    assert accepts(built, call("{}", "time"), tools) is (choice == "required")
    assert not accepts(built, call("{}", "other"), tools)


def test_strict_tool_may_be_called_or_not(built: Any) -> None:
    tools = offered()
    assert accepts(built, f"{THOUGHT}{PLAN}{HEAD}{call(BONN)}", tools)
    assert accepts(built, f"{THOUGHT}{FINAL}<|message|>Hi, you!<|return|>", tools)
    assert not accepts(built, f"{THOUGHT}{HEAD}{call(BONN[:-1] + ',1')}", tools)


def test_format_and_tools_exclude_each_other(built: Any) -> None:
    tools = offered()
    assert accepts(built, f"{THOUGHT}{HEAD}{call(BONN)}", tools, DIGITS)
    assert accepts(built, f"{THOUGHT}{FINAL}<|message|>42<|return|>", tools, DIGITS)
    assert not accepts(built, f"{THOUGHT}{FINAL}<|message|>Hi<|return|>", tools, DIGITS)


def test_prompt_may_open_a_message(built: Any) -> None:
    opened = f"{HEAD}<|channel|>analysis<|message|>"
    assert accepts(built, f"Hm.<|end|>{FINAL}<|message|>42<|return|>", requested=DIGITS, prompt=opened)
    assert accepts(built, "42<|return|>", requested=DIGITS, prompt=f"{FINAL}<|message|>")
    closed = "<|start|>user<|message|>a<|end|>"
    assert accepts(built, f"{FINAL}<|message|>42<|return|>", requested=DIGITS, prompt=closed)
    with pytest.raises(ValueError, match="chat template"):
        accepts(built, "", requested=DIGITS, prompt=f"{HEAD}<|channel|>")
