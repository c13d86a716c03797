# SPDX-License-Identifier: Apache-2.0
"""Chat templates render as in Transformers, within limits of time and size."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest

from mizzen.gateway.text.model import LONG_CHARACTERS, estimate_characters
from mizzen.gateway.text.template import ChatTemplate, TemplateError

FOLDER = Path(__file__).parents[1] / "templates"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "It's <b>weather</b> & größer",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"id": "a1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "  Hi <there> 'you' & \"me\" {{ x }} 😀 "}],
    "system": [{"role": "system", "content": "Be brief.\n"}, {"role": "user", "content": "Hi"}],
    "turns": [
        {"role": "user", "content": "a", "name": None},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb "},
        {"role": "user", "content": "c"},
    ],
    "reasoning": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning": "because", "tool_calls": None},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "reasoning_content": "so"},
    ],
    "tools": [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "12 °C", "tool_call_id": "a1"},
        {"role": "tool", "content": "13 °C", "tool_call_id": "a1"},
    ],
    "wrong order": [{"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
    "null content": [{"role": "user", "content": None}],
}
WITHOUT_CALLS = {"llama3", "mistral", "qwen2"}
"""Templates that do not show calls; test_template_shapes has the conversations with calls."""
EXTRAS: list[dict[str, Any]] = [{}, {"enable_thinking": False}, {"date_string": "1 Jan 2026"}]


@pytest.fixture(scope="module")
def transformers_tokenizer(tokenizer_files: dict[str, bytes]) -> Any:
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = tokenizers.Tokenizer.from_buffer(tokenizer_files["tokenizer.json"])
    return PreTrainedTokenizerFast(tokenizer_object=inner, **TOKENS)


def try_render(render: Any, messages: Any, **options: Any) -> str | None:
    """Return the rendered text; None if the template rejects the messages."""
    try:
        return render(messages, **options)
    except Exception:
        return None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_rendering_equals_transformers(transformers_tokenizer: Any, name: str, conversation: str) -> None:
    source = (FOLDER / f"{name}.jinja").read_text()
    template = ChatTemplate(source, TOKENS)
    messages = CONVERSATIONS[conversation]
    if conversation == "tools" and name in WITHOUT_CALLS:
        return
    rendered = 0
    for extra, tools, prompt in itertools.product(EXTRAS, (None, [TOOL]), (True, False)):
        options = {"tools": tools, "add_generation_prompt": prompt, **extra}
        own = try_render(template.render, messages, **options)
        options |= {"chat_template": source, "tokenize": False}
        assert own == try_render(transformers_tokenizer.apply_chat_template, messages, **options)
        rendered += own is not None
    if conversation in ("one", "system", "turns"):
        assert rendered


def test_token_ids_equal_transformers_without_a_second_bos(
    transformers_tokenizer: Any, tokenizer_files: dict[str, bytes]
) -> None:
    from mizzen.gateway.text.tokenizer import Tokenizer

    template = ChatTemplate.from_files(tokenizer_files)
    assert template is not None
    tokenizer = Tokenizer.from_files(tokenizer_files)
    messages = CONVERSATIONS["turns"]
    ids = tokenizer.encode(template.render(messages), add_special_tokens=False)
    source = json.loads(tokenizer_files["tokenizer_config.json"])["chat_template"]
    transformers_ids = transformers_tokenizer.apply_chat_template(
        messages, chat_template=source, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert ids == transformers_ids
    assert ids.count(tokenizer.token_id("<s>") or 0) == 1


def test_template_file_overrides_the_tokenizer_config() -> None:
    config = {"chat_template": [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]}
    files = {"tokenizer_config.json": json.dumps(config).encode()}
    named = ChatTemplate.from_files(files)
    assert named is not None
    user = [{"role": "user", "content": "x"}]
    assert named.render(user) == "d"
    assert named.render(user, tools=[TOOL]) == "t"
    files["chat_template.jinja"] = b"file {{ eos_token }}{{ pad_token }}"
    files["special_tokens_map.json"] = b'{"eos_token": {"content": "E"}, "pad_token": null}'
    from_file = ChatTemplate.from_files(files)
    assert from_file is not None
    assert from_file.render(user) == from_file.render(user, tools=[TOOL]) == "file E"
    assert ChatTemplate.from_files({"tokenizer_config.json": b"{}"}) is None


def test_template_folder_saved_by_transformers_is_loaded(
    transformers_tokenizer: Any, tokenizer_files: dict[str, bytes], tmp_path: Path
) -> None:
    transformers_tokenizer.chat_template = {"default": "d", "tool_use": "t {{ tools[0].function.name }}"}
    try:
        transformers_tokenizer.save_pretrained(tmp_path)
    finally:
        transformers_tokenizer.chat_template = None
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    user = [{"role": "user", "content": "x"}]
    assert template.render(user) == "d"
    assert template.render(user, tools=[TOOL]) == "t weather"
    assert "t {{ tools" in template.source


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config.json": b"[]"}, "not a JSON object"),
        ({"tokenizer_config.json": b'{"chat_template": ["x"]}'}, "chat_template must be text, or a list"),
        ({"tokenizer_config.json": b'{"chat_template": [{"name": "default"}]}'}, "name and template"),
        ({"tokenizer_config.json": b"{"}, "not JSON"),
        ({"chat_template.jinja": b"\xff"}, "not UTF-8"),
        ({"chat_template.jinja": b"a\n{% if %}"}, "line 2"),
        ({"tokenizer_config.json": b'{"chat_template": [{"name": "rag", "template": "x"}]}'}, "only: rag"),
    ],
)
def test_invalid_template_files_are_named(files: dict[str, bytes], message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        ChatTemplate.from_files(files)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "^roles must alternate$"),
        ("{{ messages[0].content + 1 }}", "cannot render"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe|undefined"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% set ns = namespace(__class__=1) %}", "underscore"),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", "underscore"),
        ("{{ cycler.__init__.__globals__.os }}", "unsafe|undefined"),
        ("{{ 'x' * 999999999 }}", "too large"),
        ("{{ 10 ** 99999 }}", "too large"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "nested too deeply"),
        ("{% for a in range(99999) %}{{ 'x' * 100000 }}{% endfor %}", "characters|too long"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "too long"),
        (
            "{% set ns=namespace(x='a') %}{% for a in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
            "too large|too long",
        ),
    ],
)
def test_sandbox_rejects_unsafe_and_unbounded_templates(source: str, message: str) -> None:
    template = ChatTemplate(source, TOKENS, seconds=0.3)
    began = time.process_time()
    with pytest.raises(TemplateError, match=message):
        template.render(CONVERSATIONS["one"])
    assert time.process_time() - began < 20


def test_conversation_without_messages_is_rejected() -> None:
    with pytest.raises(TemplateError, match="at least one"):
        ChatTemplate("x").render([])


def test_loop_variables_work_with_the_deadline_check() -> None:
    source = (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.revindex }}{{ loop.last }} "
        "{% endfor %}"
    )
    nested = (
        "{% for a in [1,2,3] if a != 2 %}{{ a }}{% else %}none{% endfor %}"
        "{% for k, v in {'x': 1}.items() %}{{ k }}{% break %}{% endfor %}"
    )
    messages = [{"role": "user", "content": "x"}] * 2
    assert ChatTemplate(source).render(messages) == "1/22False 2/21True "
    assert ChatTemplate(nested).render(messages) == "13x"


@pytest.mark.parametrize(
    "value",
    [
        {"content": "x" * 5000},
        {"tool_calls": [{"function": {"name": "f", "arguments": {"deep": [{"text": "x" * 5000}]}}}]},
        {"tool_calls": [{"function": {"name": "f", "arguments": {"x" * 5000: 1}}}]},
        [{"function": {"name": "f", "description": "x" * 5000}}],
        {"numbers": [1] * 1000},
    ],
)
def test_long_text_is_detected_anywhere_in_a_conversation(value: Any) -> None:
    """Long conversations must be detected, because they are rendered and tokenized in a thread."""
    assert estimate_characters((({"role": "user", "content": "a"},), {"some": value})) > LONG_CHARACTERS
    assert estimate_characters((({"role": "user", "content": "a"},), {"some": 1})) < LONG_CHARACTERS
    assert estimate_characters([value] * 1000) < LONG_CHARACTERS + 20_000  # stops soon after the limit
