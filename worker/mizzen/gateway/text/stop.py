# SPDX-License-Identifier: Apache-2.0
"""Search for stop strings, which may span tokens, in a stream of text."""

from __future__ import annotations


class StopStrings:
    """Incremental search that cuts a stream of text before the first stop string that is complete.

    Text is held back only while it may be the beginning of a stop string. If the same character completes
    several stop strings, the longest one counts. Each character is examined once per stop string
    (Knuth-Morris-Pratt), regardless of how much text is held back.
    """

    __slots__ = ("_pending", "_stops", "matched")

    def __init__(self, stops: tuple[str, ...]) -> None:
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._stops = [_StopMatcher(stop) for stop in stops]
        self._pending: list[str] = []
        """Text that is held back, in the pieces in which it arrived."""
        self.matched: str | None = None
        """Stop string that ended the text; None until one is complete."""

    def add(self, text: str) -> str:
        """Add text; return the new text that is certainly not part of a stop string."""
        if self.matched is not None or not text:
            return ""
        pending_length = max((stop.matched_length for stop in self._stops), default=0)
        ends = [
            (end, end - len(stop.text), stop) for stop in self._stops if (end := stop.add(text)) is not None
        ]
        if ends:
            _, start, stop = min(ends, key=lambda end: end[:2])
            self.matched = stop.text
            # Positions count from the start of `text`; pending text precedes it.
            before, self._pending = "".join(self._pending), []
            return (before + text)[: pending_length + start]
        keep = max((stop.matched_length for stop in self._stops), default=0)
        if keep >= pending_length + len(text):
            self._pending.append(text)
            return ""
        pending_text = "".join(self._pending) + text
        cut = len(pending_text) - keep
        self._pending = [pending_text[cut:]] if keep else []
        return pending_text[:cut]

    def flush(self) -> str:
        """Return the text that was held back, and forget the partial match; the search can go on."""
        pending, self._pending = "".join(self._pending), []
        for stop in self._stops:
            stop.matched_length = 0
        return pending


class _StopMatcher:
    """Knuth-Morris-Pratt matcher of one stop string."""

    __slots__ = ("_failure", "matched_length", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched_length = 0
        """Length of the longest prefix of the stop string that the text so far ends with."""
        self._failure = [0] * len(text)
        """KMP failure function: entry n is the length of the longest proper border of `text[: n + 1]`."""
        length = 0
        for at in range(1, len(text)):
            while length and text[at] != text[length]:
                length = self._failure[length - 1]
            length += text[at] == text[length]
            self._failure[at] = length

    def add(self, text: str) -> int | None:
        """Add text; return the index in `text` just after the first match, or None if there is no match."""
        own, failure, matched_length, first = self.text, self._failure, self.matched_length, self.text[0]
        at, last = 0, len(text)
        while at < last:
            if not matched_length:  # fast path: most text contains no part of the stop string
                at = text.find(first, at)
                if at < 0:
                    break
            character = text[at]
            while matched_length and character != own[matched_length]:
                matched_length = failure[matched_length - 1]
            matched_length += character == own[matched_length]
            at += 1
            if matched_length == len(own):
                return at
        self.matched_length = matched_length
        return None


def partial_match_length(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
