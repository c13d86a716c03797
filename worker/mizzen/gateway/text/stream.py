# SPDX-License-Identifier: Apache-2.0
"""Conversion of a stream of tokens to text: detokenization combined with stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from mizzen.gateway.text.stop import StopStrings
from mizzen.gateway.text.tokenizer import Tokenizer


class TextStream:
    """Converter of one stream of tokens to text; the text ends before the first stop string."""

    __slots__ = ("_detokenizer", "_stop")

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()) -> None:
        self._detokenizer = tokenizer.detokenizer()
        self._stop = StopStrings(stop) if stop else None

    @property
    def stopped(self) -> bool:
        """True if a stop string has ended the text."""
        return self._stop is not None and self._stop.matched is not None

    def add(self, ids: Sequence[int]) -> tuple[str, int]:
        """Add tokens; return the new text that is certain, and the number of tokens used.

        If a token completes a stop string, the tokens after it are not used.
        """
        if self._stop is None:
            return self._detokenizer.add(ids), len(ids)
        parts: list[str] = []
        for used, token in enumerate(ids, 1):
            parts.append(self._stop.add(self._detokenizer.add((token,))))
            if self._stop.matched is not None:
                return "".join(parts), used
        return "".join(parts), len(ids)

    def flush(self) -> str:
        """At the end of the stream, return the text that has been held back, up to a stop string if any."""
        if self._stop is None:
            return self._detokenizer.flush()
        if self._stop.matched is not None:
            return ""
        text = self._stop.add(self._detokenizer.flush())
        return text if self._stop.matched is not None else text + self._stop.flush()
