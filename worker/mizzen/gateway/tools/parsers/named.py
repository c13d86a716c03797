# SPDX-License-Identifier: Apache-2.0
"""Readers of a tool call that consists of a name and a JSON object with the arguments."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection

from mizzen.gateway.tools.json_scanner import ValueScanner

MAX_HEAD = 256
"""Maximum number of characters that may precede the arguments of a call."""
NAME_START = re.compile(r"[\w.-]", re.ASCII)


class HeadedCallReader(ABC):
    """Base of readers of a call that is a head, such as a name, and a JSON object with the arguments.

    It has the interface of `CallReader`.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._head = ""
        self._scanner = ValueScanner()
        self.name: str | None = None
        self.started = False
        self.failed = False

    @property
    def ended(self) -> bool:
        """True if the arguments have ended or the text is not a call."""
        return self.failed or self._scanner.done

    @property
    def arguments_complete(self) -> bool:
        """True if the arguments are complete."""
        return self._scanner.done

    @property
    def raw(self) -> str:
        """Text read before the arguments, or before the text turned out not to be a call."""
        return self._head

    def add(self, text: str) -> tuple[str, str]:
        """Read more text; return the new text of the arguments, and the text after the call."""
        at = 0 if self.started else self._read_head(text)
        if not self.started:
            return "", text[at:]
        end = self._scanner.scan(text, at)
        return text[at:end], text[end:]

    def complete(self) -> tuple[str, str]:
        """Leave the call incomplete: how its JSON would go on is unknown."""
        return "", ""

    @abstractmethod
    def _read_head(self, text: str) -> int:
        """Move the beginning of a text to `_head`; return the index after it.

        Call `_start` if the arguments follow, and set `failed` if the text is not a call.
        """

    def _start(self, name: str) -> None:
        """Start the call of the tool `name`, whose arguments follow."""
        self.name, self.started = name, True


class NamedCallReader(HeadedCallReader):
    """Reader of a call `name…{…}`."""

    def __init__(self, names: Collection[str], head: re.Pattern[str]) -> None:
        """Set the names of the tools, and the pattern of the text before the arguments.

        The first group of `head` is the name.
        """
        super().__init__(names)
        self._head_pattern = head

    def _read_head(self, text: str) -> int:
        limit = MAX_HEAD - len(self._head)
        brace = text.find("{", 0, limit)
        at = brace if brace >= 0 else min(len(text), limit)
        self._head += text[:at]
        if brace < 0:
            self.failed = len(self._head) == MAX_HEAD
            return at
        head = self._head_pattern.fullmatch(self._head)
        if head is not None and head[1] in self._names:
            self._start(head[1])
        else:
            self.failed = True
        return at
