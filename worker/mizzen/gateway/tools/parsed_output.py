"""An answer's text to content, reasoning and calls: both parsers in a row."""

from __future__ import annotations

from mizzen.gateway.reasoning.parser import ReasoningParser
from mizzen.gateway.requests.output import OutputDelta
from mizzen.gateway.text.stop import StopStrings
from mizzen.gateway.tools.parser_base import ToolParser


class FormedOutput:
    """An `OutputParser`: reasoning is split off first, and calls are looked for in the rest."""

    __slots__ = ("_count", "_only_calls", "_reasoning", "_stop", "_tools", "shown")

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: ToolParser | None,
        shown: tuple[str, ...],
        stop: tuple[str, ...] = (),
        *,
        only_calls: bool = False,
    ) -> None:
        """Take both parsers; `stop` is for answers without tools, whose parser has the strings itself.

        With `only_calls` a grammar lets nothing else through: a call that is cut before its name is known is
        no content.
        """
        self._reasoning = reasoning
        self._tools = tools
        self._stop = StopStrings(stop) if stop else None
        self._only_calls = only_calls
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
        """See `OutputParser`. The name of an answer whose last call is not whole would be a lie."""
        tools = self._tools
        return "tool_calls" if tools is not None and tools.calls and not tools.open else None

    @property
    def stopped(self) -> bool:
        """See `OutputParser`."""
        if self._tools is not None:
            return self._tools.stopped
        return self._stop is not None and self._stop.found is not None

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
            held = "" if self._stop is None else self._stop.flush()
            return OutputDelta(delta.content + held, delta.reasoning)
        last = self._tools.end()
        content = "" if self._only_calls else delta.content + last.content
        return OutputDelta(content, delta.reasoning, delta.tool_calls + last.tool_calls)

    def _delta(self, reasoning: str, text: str) -> OutputDelta:
        if self._tools is None:
            return OutputDelta(text if self._stop is None else self._stop.add(text), reasoning)
        if not text:
            return OutputDelta(reasoning=reasoning)
        found = self._tools.feed(text)
        if reasoning or self._only_calls:
            return OutputDelta("" if self._only_calls else found.content, reasoning, found.tool_calls)
        return found
