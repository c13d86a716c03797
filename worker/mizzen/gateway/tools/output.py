"""An answer's text to content, reasoning and calls: both parsers in a row."""

from __future__ import annotations

from mizzen.gateway.openai.output import OutputDelta
from mizzen.gateway.reasoning.parser import ReasoningParser
from mizzen.gateway.tools.base import ToolParser


class FormedOutput:
    """An `OutputParser`: reasoning is split off first, and calls are looked for in the rest."""

    __slots__ = ("_count", "_reasoning", "_tools", "shown")

    def __init__(
        self, reasoning: ReasoningParser | None, tools: ToolParser | None, shown: tuple[str, ...]
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._count = 0
        self.shown = shown
        """See `OutputParser`."""

    @property
    def counts_tokens(self) -> bool:
        """See `OutputParser`."""
        return self._reasoning is not None and self._reasoning.inside

    @property
    def reasoning_tokens(self) -> int:
        """See `OutputParser`; the tags count too."""
        return self._count if self._reasoning is not None and self._reasoning.found else 0

    @property
    def finish_reason(self) -> str | None:
        """See `OutputParser`."""
        return "tool_calls" if self._tools is not None and self._tools.calls else None

    def feed(self, text: str) -> OutputDelta:
        """See `OutputParser`."""
        reasoning = ""
        if self._reasoning is not None:
            self._count += self._reasoning.inside
            reasoning, text = self._reasoning.feed(text)
        return self._delta(reasoning, text)

    def end(self, rest: str = "") -> OutputDelta:
        """See `OutputParser`."""
        reasoning, text = "", rest
        if self._reasoning is not None:
            (thought, said), (held, left) = self._reasoning.feed(rest), self._reasoning.end()
            reasoning, text = thought + held, said + left
        delta = self._delta(reasoning, text)
        if self._tools is None:
            return delta
        last = self._tools.end()
        return OutputDelta(delta.content + last.content, delta.reasoning, delta.tool_calls + last.tool_calls)

    def _delta(self, reasoning: str, text: str) -> OutputDelta:
        if self._tools is None or not text:
            return OutputDelta(text, reasoning)
        found = self._tools.feed(text)
        return OutputDelta(found.content, reasoning, found.tool_calls) if reasoning else found
