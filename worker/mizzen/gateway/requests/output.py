"""What an answer's text becomes: content, reasoning and tool calls.

    tokens ──Detokenizer──▶ text ──OutputParser──▶ OutputDelta ──Writer──▶ JSON

Stop strings end an answer where its content holds one: neither reasoning nor calls are cut by them. So it is
the parser, which knows what is content, that looks for them.

An `OutputForm` is chosen when a request is parsed; what depends on the model (the look of its tool calls) it
decides once the model's text side is known. Requests without one give their text as content.
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
    """More of one tool call."""

    index: int
    """Counts an answer's calls from 0."""
    id: str | None = None
    """With a call's first piece, as `name`."""
    name: str | None = None
    arguments: str = ""
    """The next characters of the arguments' JSON text."""


class OutputDelta(msgspec.Struct, frozen=True, gc=False):
    """What a piece of text adds to an answer; empty while a parser must wait for more."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


class OutputParser(Protocol):
    """Parses the text of one choice as it comes. What all calls return joins to the whole answer."""

    @property
    def shown(self) -> tuple[str, ...]:
        """Special tokens that must be in the text that it gets; it leaves them out of the content itself."""
        ...

    @property
    def counts_tokens(self) -> bool:
        """Whether `feed` must be called for each token by itself now, so that `reasoning_tokens` is exact."""
        ...

    @property
    def reasoning_tokens(self) -> int:
        """How many calls of `feed` were reasoning."""
        ...

    @property
    def finish_reason(self) -> str | None:
        """OpenAI's finish_reason in place of `stop`, once it is known: `tool_calls`, all of them whole."""
        ...

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the answer; what comes behind it is none of it."""
        ...

    def feed(self, text: str) -> OutputDelta:
        """Take the next text: one token's while `counts_tokens`, and where there are stop strings."""
        ...

    def end(self, rest: str = "") -> OutputDelta:
        """Take the rest of the text, which is no token of its own; return that and what was held back."""
        ...


class PlainOutput:
    """All text is content."""

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
        return self._stop is not None and self._stop.found is not None

    def feed(self, text: str) -> OutputDelta:
        """See `OutputParser`."""
        return OutputDelta(text if self._stop is None else self._stop.add(text))

    def end(self, rest: str = "") -> OutputDelta:
        """See `OutputParser`."""
        return OutputDelta(rest if self._stop is None else self._stop.add(rest) + self._stop.flush())


class OutputForm(Protocol):
    """What a request's tools and reasoning options mean for one model. Frozen; shared by its choices."""

    def template_arguments(self, text: TextModel) -> dict[str, Any]:
        """Return what the chat template gets besides the messages: `tools`, and variables of its own.

        Raises:
            ApiError: 400, what was asked for cannot be had from this model; names the field.
        """
        ...

    def messages(self, text: TextModel, given: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        """Return the conversation as the model's template takes it."""
        ...

    def grammar(self, text: TextModel, prompt: Int32, given: Grammar | None) -> Grammar | None:
        """Return what the answer to a prompt (token ids [n]) must conform to; `given` is the request's own.

        Raises:
            ApiError: as `template_arguments`.
            ValueError: `given` cannot stand beside reasoning or calls.
        """
        ...

    def find_schema_field(self, keyword: str, path: str) -> str | None:
        """Return the field of the request whose schema holds a keyword that an engine does not enforce.

        `path` leads there from the schema, with `/` between its steps; None where no tool's schema holds it.
        """
        ...

    def parser(self, text: TextModel, prompt: Int32, stop: tuple[str, ...]) -> OutputParser:
        """Return a parser for one choice, which stop strings may end.

        The prompt's end (token ids [n]) may have begun the reasoning.
        """
        ...
