"""Stop strings across token borders."""

from __future__ import annotations


class StopStrings:
    """Cuts one stream of text at the first stop string that completes.

    Of the text that came, only what may still become the start of a stop string is held back. Where several
    stop strings complete with the same character, the longest counts.
    """

    __slots__ = ("_held", "_stops", "found")

    def __init__(self, stops: tuple[str, ...]) -> None:
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._stops = stops
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the text."""

    def add(self, text: str) -> str:
        """Take the next text and return what is certain to come before any stop string."""
        if self.found is not None or not text:
            return ""
        text = self._held + text
        matches = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if matches:
            _, start, self.found = min(matches)
            self._held = ""
            return text[:start]
        keep = max((partial(text, stop) for stop in self._stops), default=0)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """Return what was held back; the stream has ended without completing it."""
        held, self._held = self._held, ""
        return held


def partial(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop` without completing it."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
