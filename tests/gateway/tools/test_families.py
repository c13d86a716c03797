# SPDX-License-Identifier: Apache-2.0
"""Detection of a model's tool family, and conversion of call ids."""

from __future__ import annotations

from pathlib import Path

import pytest

from mizzen.gateway.text.tokenizer import Tokenizer
from mizzen.gateway.tools.families import detect_tool_family, mistral_call_id

FOLDER = Path(__file__).parents[1] / "templates"
DETECTED = [
    ("qwen25", "hermes"),
    ("qwen3", "hermes"),
    ("qwen2", None),
    ("llama31", "llama3"),
    ("llama3", None),
    ("mistral_tools", "mistral"),
    ("mistral", "mistral"),  # detected by the special token of the template
]
SHAPES = {
    "command_a": "cohere",
    "command_r7b": "cohere",
    "deepseek_v2": "granite",
    "ernie45": "hermes",
    "exaone4": "hermes",
    "falcon_h1": "hermes",
    "glm4": "glm4",
    "glm45": "glm45",
    "granite4": "hermes",
    "granite_documents": "granite",
    "hunyuan": "hunyuan",
    "hunyuan_dense": "hunyuan",
    "llama31": "llama3",
    "mistral_small": "mistral",
    "mistral_v3": "mistral",
    "olmo3": "olmo3",
    "olmo3_keywords": "olmo3",
    "phi4_mini": "phi4-mini",
    "qwen25": "hermes",
    "qwen3": "hermes",
    "qwen3_coder": "qwen3-coder",
    "seed_oss": "seed-oss",
    "seed_oss_functions": "seed-oss",
}
"""Families of the templates in the folder `shapes`; the family of the others is unknown."""


@pytest.mark.parametrize(("name", "family"), DETECTED)
def test_family_is_detected_from_the_template(
    name: str, family: str | None, small_tokenizer: Tokenizer
) -> None:
    detected = detect_tool_family("auto", (FOLDER / f"{name}.jinja").read_text(), small_tokenizer)
    assert (detected and detected.name) == family


@pytest.mark.parametrize(
    ("template", "option", "family"),
    [
        ("<tool_call>\n<function=a>\n<parameter=b>", "auto", "qwen3-coder"),
        ("<tool_call>a<arg_key>b</arg_key>", "auto", "glm45"),
        ("<tool_call>a<tool_sep><arg_key>b</arg_key>", "auto", None),
        ("[gMASK]<sop><|observation|>", "auto", "glm4"),
        ("<seed:tool_call><function=a><parameter=b>", "auto", "seed-oss"),
        ("<function_calls>", "auto", "olmo3"),
        ("<tool_calls>", "auto", "hunyuan"),
        ("<tool_calls><tool_call>a</tool_call> <answer>", "auto", "hunyuan"),
        ("no <tool_calls> but <tool_call>", "auto", "hermes"),
        ("no <tool_calls> but <tool_call>\n<function=a>\n<parameter=b>", "auto", "qwen3-coder"),
        ("<|START_ACTION|>", "auto", "cohere"),
        ('<|CHATBOT_TOKEN|>Action: "tool_name"', "auto", "command-r"),
        ("write <|tool_call|> and a list", "auto", "granite"),
        ("<|tool_call|><|/tool_call|>", "auto", "phi4-mini"),
        ("<|start_of_role|><tool_call>", "auto", "hermes"),
        ("[func_name1(params_name1=params_value1)]", "auto", "pythonic"),
        ("<｜tool▁calls▁begin｜><tool_call>", "auto", None),
        ("<tool_call>", "none", None),
        ("anything", "llama3", "llama3"),
    ],
)
def test_option_overrides_the_detected_family(
    template: str, option: str, family: str | None, small_tokenizer: Tokenizer
) -> None:
    detected = detect_tool_family(option, template, small_tokenizer)
    assert (detected and detected.name) == family


def test_detected_families_of_all_templates(small_tokenizer: Tokenizer) -> None:
    detected = {
        path.stem: detect_tool_family("auto", path.read_text(), small_tokenizer)
        for path in (FOLDER / "shapes").glob("*.jinja")
    }
    assert {name: family.name for name, family in sorted(detected.items()) if family is not None} == SHAPES


def test_mistral_call_ids_have_nine_characters() -> None:
    assert mistral_call_id("abcDEF123") == "abcDEF123"
    call_ids = {mistral_call_id(f"call_{i}") for i in range(200)}
    assert len(call_ids) == 200
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in call_ids)
    assert mistral_call_id("call_7") == mistral_call_id("call_7")
