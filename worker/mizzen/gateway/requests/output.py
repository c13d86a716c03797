"""Protocols between generated text and the API's output: content, reasoning and tool calls.

    tokens ──Detokenizer──▶ text ──OutputParser──▶ OutputDelta ──Writer──▶ JSON

A stop string ends an answer only if it occurs in its content, not in reasoning or tool calls. The parser
looks for stop strings, because it knows what is content.

A request's `OutputForm` is chosen when its body is parsed. Whatever depends on the model, such as its tool
call syntax, is decided once the model's text side is known. Requests without a form return their text as
content.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from mizzen.core.request import Int32
from mizzen.core.sampling_params import Grammar
from mizzen.gateway.text.model import TextModel
from mizzen.gateway.text.stop import StopStrings


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """Part of one tool call."""

    index: int
    """Number of the call in its answer, from 0."""
    id: str | None = None
    """Id of the call, with its first part."""
    name: str | None = None
    """Name of the function, with the call's first part."""
    arguments: str = ""
    """Next characters of the arguments' JSON text."""


class OutputDelta(msgspec.Struct, frozen=True, gc=False):
    """Part of an answer that some text adds; empty while a parser must wait for more text."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


class OutputParser(Protocol):
    """Parses the text of one choice incrementally. The returned deltas join to the whole answer."""

    @property
    def shown(self) -> tuple[str, ...]:
        """Special tokens that must be part of the text; the parser removes them from the content."""
        ...

    @property
    def counts_tokens(self) -> bool:
        """True if `feed` must get single tokens now, so that `reasoning_tokens` is exact."""
        ...

    @property
    def reasoning_tokens(self) -> int:
        """Number of `feed` calls with reasoning."""
        ...

    @property
    def finish_reason(self) -> str | None:
        """OpenAI's finish_reason instead of `stop`, once known: `tool_calls` if all calls are complete."""
        ...

    @property
    def stopped(self) -> bool:
        """True if a stop string has ended the answer; text after it does not belong to it."""
        ...

    def feed(self, text: str) -> OutputDelta:
        """Parse the next text: that of one token while `counts_tokens`, and if there are stop strings."""
        ...

    def end(self, rest: str = "") -> OutputDelta:
        """Parse the rest of the text, which is not a token of its own; return it and what was held back."""
        ...


class PlainOutput:
    """Parser that returns all text as content."""

    __slots__ = ("_stop",)

    shown: tuple[str, ...] = ()
    counts_tokens = False
    reasoning_tokens = 0
    finish_reason: str | None = None

    def __init__(self, stop: tuple[str, ...] = ()) -> None:
        self._stop = StopStrings(stop) if stop else None

    @property
    def stopped(self) -> bool:
        """See `OutputParser`."""
        return self._stop is not None and self._stop.matched is not None

    def feed(self, text: str) -> OutputDelta:
        """See `OutputParser`."""
        return OutputDelta(text if self._stop is None else self._stop.add(text))

    def end(self, rest: str = "") -> OutputDelta:
        """See `OutputParser`."""
        return OutputDelta(rest if self._stop is None else self._stop.add(rest) + self._stop.flush())


class OutputForm(Protocol):
    """Meaning of a request's tools and reasoning options for one model. Frozen; shared by its choices."""

    def template_arguments(self, text: TextModel) -> dict[str, Any]:
        """Return the chat template's arguments besides the messages: `tools`, and variables of its own.

        Raises:
            ApiError: 400 if the model cannot do what was requested; names the field.
        """
        ...

    def messages(self, text: TextModel, given: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        """Return the conversation in the form that the model's template takes."""
        ...

    def grammar(self, text: TextModel, prompt: Int32, given: Grammar | None) -> Grammar | None:
        """Return the grammar of the answer to a prompt (int32 [n]); `given` is the request's own.

        Raises:
            ApiError: as `template_arguments`.
            ValueError: `given` cannot be combined with reasoning or tool calls.
        """
        ...

    def find_schema_field(self, keyword: str, path: str) -> str | None:
        """Return the request's field whose schema has a keyword that an engine does not enforce, or None.

        `path` leads there from the schema, with `/` between its steps. None if no tool's schema has it.
        """
        ...

    def parser(self, text: TextModel, prompt: Int32, stop: tuple[str, ...]) -> OutputParser:
        """Return a parser for one choice, which stop strings may end.

        The end of the prompt (int32 [n]) may have opened the reasoning.
        """
        ...
