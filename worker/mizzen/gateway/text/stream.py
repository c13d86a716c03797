"""One answer's tokens to its text: detokenizing and stop strings together."""

from __future__ import annotations

from collections.abc import Sequence

from mizzen.gateway.text.stop import StopStrings
from mizzen.gateway.text.tokenizer import Tokenizer


class TextStream:
    """Text of one stream of tokens, cut at the first stop string."""

    __slots__ = ("_detokenizer", "_stop")

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()) -> None:
        self._detokenizer = tokenizer.detokenizer()
        self._stop = StopStrings(stop) if stop else None

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._stop is not None and self._stop.found is not None

    def add(self, ids: Sequence[int]) -> tuple[str, int]:
        """Take the next tokens; return the text that is certain now, and how many tokens were used.

        Fewer than given are used when a stop string completes: the rest lies behind the end.
        """
        if self._stop is None:
            return self._detokenizer.add(ids), len(ids)
        parts: list[str] = []
        for used, token in enumerate(ids, 1):
            parts.append(self._stop.add(self._detokenizer.add((token,))))
            if self._stop.found is not None:
                return "".join(parts), used
        return "".join(parts), len(ids)

    def flush(self) -> str:
        """Return the text that was held back; the stream has ended (a stop string may complete here)."""
        if self._stop is None:
            return self._detokenizer.flush()
        if self._stop.found is not None:
            return ""
        text = self._stop.add(self._detokenizer.flush())
        return text if self._stop.found is not None else text + self._stop.flush()
