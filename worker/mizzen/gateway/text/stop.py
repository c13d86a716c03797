"""Stop strings across token borders."""

from __future__ import annotations


class StopStrings:
    """Cuts one stream of text at the first stop string that completes.

    Of the text that came, only what may still become the start of a stop string is held back. Where several
    stop strings complete with the same character, the longest counts. Each character is looked at once for
    each stop string (Knuth, Morris and Pratt), however much is held back.
    """

    __slots__ = ("_held", "_stops", "found")

    def __init__(self, stops: tuple[str, ...]) -> None:
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._stops = [_Stop(stop) for stop in stops]
        self._held: list[str] = []
        """What is held back, as it came."""
        self.found: str | None = None
        """The stop string that ended the text."""

    def add(self, text: str) -> str:
        """Take the next text and return what is certain to come before any stop string."""
        if self.found is not None or not text:
            return ""
        held = max((stop.seen for stop in self._stops), default=0)
        ends = [
            (end, end - len(stop.text), stop) for stop in self._stops if (end := stop.add(text)) is not None
        ]
        if ends:
            _, start, stop = min(ends, key=lambda one: one[:2])
            self.found = stop.text
            # Positions count from the beginning of `text`; what is held comes before it.
            before, self._held = "".join(self._held), []
            return (before + text)[: held + start]
        keep = max((stop.seen for stop in self._stops), default=0)
        if keep >= held + len(text):
            self._held.append(text)
            return ""
        whole = "".join(self._held) + text
        cut = len(whole) - keep
        self._held = [whole[cut:]] if keep else []
        return whole[:cut]

    def flush(self) -> str:
        """Return what was held back: nothing completes it. What comes next is a text of its own."""
        held, self._held = "".join(self._held), []
        for stop in self._stops:
            stop.seen = 0
        return held


class _Stop:
    """How much of one stop string the text ends with."""

    __slots__ = ("_back", "seen", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.seen = 0
        """Characters of the stop string that the text so far ends with."""
        self._back = [0] * len(text)
        """For each length less 1: the next shorter beginning that such a beginning ends with."""
        length = 0
        for at in range(1, len(text)):
            while length and text[at] != text[length]:
                length = self._back[length - 1]
            length += text[at] == text[length]
            self._back[at] = length

    def add(self, text: str) -> int | None:
        """Take the next text; return where in it the stop string first ends, or None."""
        own, back, seen, first = self.text, self._back, self.seen, self.text[0]
        at, last = 0, len(text)
        while at < last:
            if not seen:  # most text holds nothing of it: that is found out quickly
                at = text.find(first, at)
                if at < 0:
                    break
            character = text[at]
            while seen and character != own[seen]:
                seen = back[seen - 1]
            seen += character == own[seen]
            at += 1
            if seen == len(own):
                return at
        self.seen = seen
        return None


def partial(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop` without completing it."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
