# SPDX-License-Identifier: Apache-2.0
"""Interfaces that turn generated text into the API's output: content, reasoning and tool calls.

    tokens ──Detokenizer──▶ text ──OutputParser──▶ OutputDelta ──ResponseWriter──▶ JSON

A stop string ends an answer only if it occurs in its content, not in reasoning or tool calls. The parser
looks for stop strings, because it knows what is content.

A request's `OutputForm` is created when its body is parsed. Its methods take the `TextModel`, because the
syntax of tool calls and reasoning depends on the model. A request without an `OutputForm` returns all text as
content.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import msgspec

from mizzen.core.request import Int32
from mizzen.core.sampling_params import Grammar
from mizzen.gateway.text.model import TextModel
from mizzen.gateway.text.stop import StopStrings


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """Part of a tool call."""

    index: int
    """Number of the call in its answer, from 0."""
    id: str | None = None
    """Id of the call; None except in its first part."""
    name: str | None = None
    """Name of the function; None except in the call's first part."""
    arguments: str = ""
    """Next characters of the JSON text of the arguments."""


class OutputDelta(msgspec.Struct, frozen=True, gc=False):
    """Part of an answer that a parser returns; empty while the parser must wait for more text."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


class OutputParser(Protocol):
    """Incremental parser of one choice's text; together, the returned deltas form the whole answer."""

    @property
    def shown(self) -> tuple[str, ...]:
        """Special tokens that detokenization must leave in the text; they never become content."""
        ...

    @property
    def marks(self) -> Mapping[int, str]:
        """Characters that replace certain tokens in detokenization, by the ids of the tokens.

        They are lone surrogates, which no other token results in. They never become content.
        """
        ...

    @property
    def counts_tokens(self) -> bool:
        """True while `feed` must be called once per token, so that `reasoning_tokens` is exact."""
        ...

    @property
    def reasoning_tokens(self) -> int:
        """Number of reasoning tokens so far: the number of calls of `feed` with text that is reasoning."""
        ...

    @property
    def finish_reason(self) -> str | None:
        """`tool_calls`, which replaces `stop`, if the output has calls and all are complete; else None."""
        ...

    @property
    def stopped(self) -> bool:
        """True if a stop string has ended the answer; text after the stop string does not count."""
        ...

    @property
    def stop_string(self) -> str | None:
        """Stop string that has ended the answer; None if none has."""
        ...

    def feed(self, text: str) -> OutputDelta:
        """Parse more text; return the new output.

        If there are stop strings, or while `counts_tokens` is true, pass the text of one token per call.
        """
        ...

    def end(self, rest: str = "", *, cut_off: bool = False) -> OutputDelta:
        """Parse the last text, which does not count as a token; return all output that was held back.

        With `cut_off`, it was not the model that ended the text, such as at `max_tokens`.
        """
        ...


class PlainOutput:
    """Parser that returns all text as content."""

    __slots__ = ("_stop",)

    shown: tuple[str, ...] = ()
    marks: Mapping[int, str] = MappingProxyType({})
    counts_tokens = False
    reasoning_tokens = 0
    finish_reason: str | None = None

    def __init__(self, stop: tuple[str, ...] = ()) -> None:
        self._stop = StopStrings(stop) if stop else None

    @property
    def stopped(self) -> bool:
        """True if a stop string has ended the answer."""
        return self.stop_string is not None

    @property
    def stop_string(self) -> str | None:
        """Stop string that has ended the answer; None if none has."""
        return None if self._stop is None else self._stop.matched

    def feed(self, text: str) -> OutputDelta:
        """Return text as content, up to the first stop string; hold back a possible beginning of one."""
        return OutputDelta(text if self._stop is None else self._stop.add(text))

    def end(self, rest: str = "", *, cut_off: bool = False) -> OutputDelta:
        """Return the text that was held back and the last text, up to the first stop string."""
        return OutputDelta(rest if self._stop is None else self._stop.add(rest) + self._stop.flush())


class OutputForm(Protocol):
    """Treatment of a request's tools and of reasoning; it depends on the model that serves the request.

    The object is immutable; all choices of the request share it.
    """

    def template_arguments(self, text: TextModel) -> dict[str, Any]:
        """Return the chat template variables that the form sets, such as `tools`.

        Raises:
            ApiError: 400 if the model does not support the request's tools; the error names the field.
        """
        ...

    def messages(self, text: TextModel, messages: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        """Return a conversation in the form that the model's chat template accepts."""
        ...

    def prompt_section(self, text: TextModel) -> str:
        """Return text that `finish_prompt` adds to the prompt that the template renders; empty for none."""
        ...

    def finish_prompt(self, prompt: str, section: str) -> str:
        """Return the text of a prompt with a section that `prompt_section` returned."""
        ...

    def grammar(self, text: TextModel, prompt: Int32, requested: Grammar | None) -> Grammar | None:
        """Return the grammar that constrains the answer to a prompt (int32 [n]); None for no constraint.

        `requested` is the grammar that the request itself sets.

        Raises:
            ApiError: 400 if a schema is nested too deeply.
            ValueError: `requested` cannot be combined with reasoning or tool calls.
        """
        ...

    def find_schema_field(self, keyword: str, path: str) -> str | None:
        """Return the path, in the request body, of a schema keyword that an engine does not enforce.

        `path` leads from the root of a tool's schema to the subschema with the keyword, with `/` between its
        steps. Return None if no strict tool has the keyword there.
        """
        ...

    def parser(self, text: TextModel, prompt: Int32, stop: tuple[str, ...]) -> OutputParser:
        """Return a parser for the text of one choice; `stop` holds the stop strings.

        The parser begins within reasoning if the end of the prompt (int32 [n]) has opened it.
        """
        ...
