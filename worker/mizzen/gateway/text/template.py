"""A model's chat template: messages to the text that the model was trained on."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import jinja2

from mizzen.gateway.text.sandbox import MAX_CHARACTERS, TemplateEnvironment
from mizzen.gateway.text.tokenizer import is_template, read_files

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
RENDER_SECONDS = 5.0
FILE = "chat_template.jinja"

_REASONING = ("reasoning_content", "thinking", "reasoning")


class TemplateError(ValueError):
    """A chat template cannot be read, or refuses the messages; the text says why."""


class ChatTemplate:
    """Renders messages as Transformers' `apply_chat_template` does. Safe to use from several threads."""

    def __init__(
        self,
        template: str | Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
        seconds: float = RENDER_SECONDS,
    ) -> None:
        """Compile a template, or several by name ("default", and "tool_use" for requests with tools).

        Raises:
            TemplateError: a template's syntax is wrong, or there is no default among several.
        """
        sources = {"default": template} if isinstance(template, str) else dict(template)
        if "default" not in sources:
            raise TemplateError(f'no chat template is named "default", only {", ".join(sorted(sources))}')
        self._environment = TemplateEnvironment()
        self._seconds = seconds
        self._special_tokens = dict(special_tokens or {})
        self.source = "\n".join(sources.values())
        """The text of all templates."""
        self._templates = {name: self._compile(name, source) for name, source in sources.items()}

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> ChatTemplate | None:
        """Build the template of a model from file contents by name; None when the model has none.

        One in a file of its own replaces those of the tokenizer's configuration; others lie in a folder.

        Raises:
            TemplateError: a file is no JSON or UTF-8, or as the constructor.
        """
        config = read_json(files, "tokenizer_config.json")
        templates = {} if FILE in files else templates_of(config.get("chat_template"))
        for name in files:
            if name == FILE or is_template(name):
                templates["default" if name == FILE else PurePath(name).stem] = read_text(files, name)
        if not templates:
            return None
        return cls(templates, special_tokens(read_json(files, "special_tokens_map.json"), config))

    @classmethod
    def load(cls, folder: str | Path) -> ChatTemplate | None:
        """Build the template of a model's folder; None when the model has none.

        Raises:
            TemplateError: as `from_files`.
        """
        return cls.from_files(read_files(Path(folder)))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Return the prompt of a conversation of plain JSON values.

        With `continue_final_message` it ends with the last message's text, for the model to go on from there.

        Raises:
            TemplateError: there is no message, the template refuses them, or rendering exceeds a bound.
        """
        if not messages:
            raise TemplateError("messages must hold at least one message")
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        values = {
            **self._special_tokens,
            **variables,
            "messages": [plain(message) for message in messages],
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        bounds = self._environment.bounds
        bounds.deadline = time.monotonic() + self._seconds
        try:
            text = self._join(self._templates[name], values)
            return cut_behind_last(text, values["messages"][-1]) if continue_final_message else text
        except jinja2.TemplateError as error:
            raise TemplateError(error.message or str(error)) from error
        except RecursionError:
            raise TemplateError("the chat template or a message is nested too deeply") from None
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise TemplateError(f"the chat template cannot render these messages: {error}") from error
        finally:
            bounds.deadline = float("inf")

    def _join(self, template: jinja2.Template, values: dict[str, Any]) -> str:
        parts: list[str] = []
        size = 0
        for part in template.generate(values):
            size += len(part)
            if size > MAX_CHARACTERS:
                raise jinja2.TemplateRuntimeError(f"the prompt has more than {MAX_CHARACTERS} characters")
            parts.append(part)
        return "".join(parts)

    def _compile(self, name: str, source: str) -> jinja2.Template:
        try:
            return self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"the {name} chat template, line {error.lineno}: {error.message}") from error


def cut_behind_last(text: str, message: Mapping[str, Any]) -> str:
    """Return a prompt up to the end of its last message's text, as Transformers does.

    Raises:
        TemplateError: the message has no text, or the template does not show it.
    """
    content = message.get("content")
    shown = content.strip() if isinstance(content, str) else ""
    at = text.rfind(shown) if shown else -1
    if at < 0:
        raise TemplateError("continue_final_message: the last message has no text that the template shows")
    if shown != content and content and text.startswith(content.lstrip(), at):
        shown = content.lstrip()  # a template that keeps the trailing space
    return text[: at + len(shown)]


def plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without keys of None, its reasoning under the names that templates read."""
    result = {key: value for key, value in message.items() if value is not None}
    reasoning = next((result[key] for key in _REASONING if key in result), None)
    if reasoning is not None:
        result = {"thinking": reasoning, **result, "reasoning_content": reasoning}
    return result


def templates_of(found: object) -> dict[str, str]:
    """Return the templates of a tokenizer's configuration by name: one, or a list of named ones.

    Raises:
        TemplateError: it is something else.
    """
    if found is None:
        return {}
    entries: list[Any] = found if isinstance(found, list) else [{"name": "default", "template": found}]
    pairs: list[tuple[Any, Any]] = [
        (entry.get("name"), entry.get("template")) for entry in entries if isinstance(entry, dict)
    ]
    if len(pairs) < len(entries) or not all(isinstance(part, str) for pair in pairs for part in pair):
        rule = "must be a text, or a list of objects with name and template"
        raise TemplateError(f"tokenizer_config.json: chat_template {rule}")
    return dict(pairs)


def special_tokens(*configs: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens by name; a later configuration goes before an earlier one."""
    tokens: dict[str, str] = {}
    for config in configs:
        for name in SPECIAL_TOKENS:
            value = config.get(name)
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                tokens[name] = content
    return tokens


def read_text(files: Mapping[str, bytes], name: str) -> str:
    """Return a file as text.

    Raises:
        TemplateError: the file is not UTF-8.
    """
    try:
        return files[name].decode()
    except UnicodeDecodeError as error:
        raise TemplateError(f"{name} is not UTF-8: {error}") from error


def read_json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Return a file's JSON object, an empty one when the file is missing.

    Raises:
        TemplateError: the file is no JSON object.
    """
    if name not in files:
        return {}
    try:
        found = json.loads(read_text(files, name))
    except json.JSONDecodeError as error:
        raise TemplateError(f"{name} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise TemplateError(f"{name} holds no JSON object")
    return found
