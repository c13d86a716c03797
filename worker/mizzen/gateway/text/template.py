# SPDX-License-Identifier: Apache-2.0
"""A model's chat template, which renders messages to the text format that the model was trained on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, TypeVar

import jinja2

from mizzen.gateway.text.call_history import PROBE_TOOL, CallForm, arrange_calls, detect_call_form
from mizzen.gateway.text.content_form import ContentForm, arrange_contents, detect_content_form, has_image
from mizzen.gateway.text.image_marks import ImageMark
from mizzen.gateway.text.sandbox import MAX_CHARACTERS, TemplateEnvironment
from mizzen.gateway.text.tokenizer import is_chat_template, read_files
from mizzen.gateway.text.tool_form import ToolForm, arrange_tools, detect_tool_form

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
RENDER_SECONDS = 5.0
FILE, PROCESSOR_FILE = "chat_template.jinja", "chat_template.json"

END_MARK = "END_OF_TEXT_TO_CONTINUE "
"""Text that marks the end of the message that the model continues; its trailing space shows whether the
template strips the text."""

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning that clients and templates use; the first one takes precedence."""

Form = TypeVar("Form")


class TemplateError(ValueError):
    """A chat template is invalid or rejects the messages; the error's text says why."""


class ChatTemplate:
    """A model's chat template; renders messages like Transformers' `apply_chat_template`. Thread-safe."""

    def __init__(
        self,
        template: str | Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
        seconds: float = RENDER_SECONDS,
        mark: ImageMark | None = None,
    ) -> None:
        """Compile one template, or several by name ("default", and "tool_use" for requests with tools).

        Args:
            template: Source of the template, or sources by name.
            special_tokens: Special tokens by name, such as `bos_token`; they are variables of the template.
            seconds: Maximum duration of a rendering.
            mark: Mark of images, which replaces their placeholder in prompts; None for a text model.

        Raises:
            TemplateError: a template has a syntax error, or no template is named "default".
        """
        sources = {"default": template} if isinstance(template, str) else dict(template)
        if "default" not in sources:
            raise TemplateError(f'no chat template is named "default", only: {", ".join(sorted(sources))}')
        self._mark = mark
        if mark is not None:
            sources = {name: source.replace(mark.placeholder, mark.text) for name, source in sources.items()}
        self._environment = TemplateEnvironment()
        self._seconds = seconds
        self._special_tokens = dict(special_tokens or {})
        self.source = "\n".join(sources.values())
        """Sources of all templates, joined."""
        self._templates = {name: self._compile(name, source) for name, source in sources.items()}
        self._call_forms: dict[tuple[str, bool], CallForm] = {}
        """Forms of calls by the name of the template and whether tools are offered."""
        self._tool_forms: dict[str, ToolForm] = {}
        """Forms of tools by the name of the template."""
        self._content_forms: dict[str, ContentForm] = {}
        """Forms of contents by the name of the template."""

    @classmethod
    def from_files(cls, files: Mapping[str, bytes], mark: ImageMark | None = None) -> ChatTemplate | None:
        """Build a model's chat template; return None if it has none. `files` maps file names to contents.

        `chat_template.jinja` takes precedence over `chat_template.json`, and that over the template in
        `tokenizer_config.json`. Additional templates are in a separate folder. `mark` is the mark of images.

        Raises:
            TemplateError: a file is not valid JSON or UTF-8, or a template is invalid.
        """
        config = read_json(files, "tokenizer_config.json")
        processor = read_json(files, PROCESSOR_FILE).get("chat_template")
        source = config.get("chat_template") if processor is None else processor
        templates = {} if FILE in files else named_templates(source)
        for name in files:
            if name == FILE or is_chat_template(name):
                templates["default" if name == FILE else PurePath(name).stem] = read_text(files, name)
        if not templates:
            return None
        tokens = special_token_map(read_json(files, "special_tokens_map.json"), config)
        return cls(templates, tokens, mark=mark)

    @classmethod
    def load(cls, folder: str | Path) -> ChatTemplate | None:
        """Build the chat template of the model in a folder; None if it has no template.

        Raises:
            TemplateError: a file is not valid JSON or UTF-8, or a template is invalid.
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
        """Return the prompt for a conversation, whose messages consist of JSON values.

        Calls and their results are passed to the template in the form in which it shows them
        (`call_history`). With `continue_final_message`, the prompt ends with the last message's text, which
        the model then continues.

        Raises:
            TemplateError: there are no messages, the template rejects them, or rendering exceeds the limit on
                time or size.
        """
        if not messages:
            raise TemplateError("messages must hold at least one message")
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        normalized = [normalize_message(message) for message in messages]
        bounds = self._environment.bounds
        bounds.deadline = time.monotonic() + self._seconds
        try:
            if any(message.get("tool_calls") or message.get("role") == "tool" for message in normalized):
                normalized = arrange_calls(normalized, self._call_form(name, tools is not None))
            if continue_final_message:
                normalized[-1] = mark_end(normalized[-1])
            values: dict[str, Any] = {"tools": tools}
            if tools:
                normalized, values = arrange_tools(normalized, tools, self._tool_form(name))
            normalized = self._arrange_contents(name, normalized)
            values |= {
                **self._special_tokens,
                **variables,
                "messages": normalized,
                "tools": tools,
                "documents": documents,
                "add_generation_prompt": add_generation_prompt,
            }
            text = self._render_text(self._templates[name], values)
        finally:
            bounds.deadline = float("inf")
        return cut_at_mark(text, messages[-1].get("content") or "") if continue_final_message else text

    def _call_form(self, name: str, with_tools: bool) -> CallForm:
        """Return the form in which a template shows calls; the template is probed once.

        Raises:
            TemplateError: probing exceeds the limit on time.
        """
        form = self._call_forms.get((name, with_tools))
        if form is not None:
            return form
        variables = {"tools": [PROBE_TOOL] if with_tools else None}
        form = self._detect(lambda: detect_call_form(lambda messages: self._probe(name, messages, variables)))
        self._call_forms[name, with_tools] = form
        return form

    def _arrange_contents(self, name: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages with their contents in the form in which a template shows text and images.

        Raises:
            TemplateError: the template shows no images in the results of calls, but a result has one, or
                probing exceeds the limit on time.
        """
        mark = self._mark
        if mark is None:
            return messages
        form = self._content_forms.get(name)
        if form is None:
            form = self._detect(
                lambda: detect_content_form(lambda messages: self._probe(name, messages, {}), mark)
            )
            self._content_forms[name] = form
        if not form.results and any(message["role"] == "tool" and has_image(message) for message in messages):
            raise TemplateError("the chat template shows no images in the results of tool calls")
        return arrange_contents(messages, form, mark)

    def _tool_form(self, name: str) -> ToolForm:
        """Return the form in which a template shows tools; the template is probed once.

        Raises:
            TemplateError: probing exceeds the limit on time.
        """
        form = self._tool_forms.get(name)
        if form is None:
            form = self._detect(lambda: detect_tool_form(lambda *probe: self._probe(name, *probe)))
            self._tool_forms[name] = form
        return form

    def _detect(self, detect: Callable[[], Form]) -> Form:
        """Return the result of `detect`, which renders short conversations.

        Raises:
            TemplateError: that exceeds the limit on time.
        """
        try:
            form = detect()
            self._environment.bounds.check()  # a form that was detected too late may be wrong
        except jinja2.TemplateError as error:
            raise TemplateError(error.message or str(error)) from error
        return form

    def _probe(self, name: str, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str | None:
        """Return the prompt for a short conversation; None if the template rejects it."""
        self._environment.bounds.check()
        common = {"messages": messages, "documents": None, "add_generation_prompt": True}
        try:
            return self._render_text(self._templates[name], {**self._special_tokens, **variables, **common})
        except TemplateError:
            return None

    def _render_text(self, template: jinja2.Template, values: dict[str, Any]) -> str:
        """Render a template within the current deadline.

        Raises:
            TemplateError: the template rejects the values, or rendering exceeds the limit on time or size.
        """
        try:
            return self._render_parts(template, values)
        except jinja2.TemplateError as error:
            raise TemplateError(error.message or str(error)) from error
        except RecursionError:
            raise TemplateError("the chat template or a message is nested too deeply") from None
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise TemplateError(f"the chat template cannot render these messages: {error}") from error

    def _render_parts(self, template: jinja2.Template, values: dict[str, Any]) -> str:
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


def mark_end(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose text ends with `END_MARK`, at which the rendered prompt is cut.

    Raises:
        TemplateError: the message has no text.
    """
    content = message.get("content")
    if not isinstance(content, str) or not content.strip():
        raise TemplateError("continue_final_message: the last message has no text to continue")
    return {**message, "content": content + END_MARK}


def cut_at_mark(text: str, content: str) -> str:
    """Return a rendered prompt up to the end of the last message's text `content`, as Transformers does.

    Raises:
        TemplateError: the template does not render the text.
    """
    at = text.rfind(END_MARK.strip())
    if at < 0 or content.strip() not in text:
        raise TemplateError("continue_final_message: the template does not show the last message's text")
    kept = text[:at]
    return kept if text.startswith(END_MARK, at) else kept.rstrip()  # the template strips the text


def normalize_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without null values, and with its reasoning under all names that templates use."""
    result = {key: value for key, value in message.items() if value is not None}
    reasoning = next((result[key] for key in REASONING_FIELDS if key in result), None)
    if reasoning is not None:
        result = {"thinking": reasoning, **result, "reasoning_content": reasoning}
    return result


def named_templates(chat_template: object) -> dict[str, str]:
    """Return the templates in a tokenizer configuration's `chat_template`, by name.

    The value is a single template, which is named "default", or a list of named templates.

    Raises:
        TemplateError: `chat_template` has another type.
    """
    if chat_template is None:
        return {}
    entries: list[Any] = (
        chat_template if isinstance(chat_template, list) else [{"name": "default", "template": chat_template}]
    )
    pairs: list[tuple[Any, Any]] = [
        (entry.get("name"), entry.get("template")) for entry in entries if isinstance(entry, dict)
    ]
    if len(pairs) < len(entries) or not all(isinstance(part, str) for pair in pairs for part in pair):
        rule = "must be text, or a list of objects with name and template"
        raise TemplateError(f"tokenizer_config.json: chat_template {rule}")
    return dict(pairs)


def special_token_map(*configs: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens by name, such as `bos_token`; later configurations override earlier ones."""
    tokens: dict[str, str] = {}
    for config in configs:
        for name in SPECIAL_TOKENS:
            value = config.get(name)
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                tokens[name] = content
    return tokens


def read_text(files: Mapping[str, bytes], name: str) -> str:
    """Return the content of a text file.

    Raises:
        TemplateError: the file is not UTF-8.
    """
    try:
        return files[name].decode()
    except UnicodeDecodeError as error:
        raise TemplateError(f"{name} is not UTF-8: {error}") from error


def read_json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Return the JSON object in a file, or an empty object if the file is missing.

    Raises:
        TemplateError: the file is not a JSON object.
    """
    if name not in files:
        return {}
    try:
        content = json.loads(read_text(files, name))
    except json.JSONDecodeError as error:
        raise TemplateError(f"{name} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise TemplateError(f"{name} is not a JSON object")
    return content
