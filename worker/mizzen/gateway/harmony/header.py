# SPDX-License-Identifier: Apache-2.0
"""Header of a message: the role, the channel and the recipient, which precede the message's text."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mizzen.gateway.harmony.markers import CHANNEL, CONSTRAIN, START

ASSISTANT = "assistant"
ANALYSIS, COMMENTARY, FINAL = "analysis", "commentary", "final"
CHANNELS = (ANALYSIS, COMMENTARY, FINAL)
TYPES = ("json", "code", "text")
"""Types of text that may follow a recipient."""
MAX_SECTION = 256
"""Maximum number of characters in a section of a header; a longer section is text."""

_ROLE = re.compile(r"\s*([\w.-]*)(?:\s+(?:to?|to=\S*\s*)?)?")
_OPTIONAL_RECIPIENT = re.compile(r"\s*(?:to?|to=\S*\s*)?")
_CHANNEL = re.compile(r"\s*([a-z]*)(?:\s+(?:to?|to=\S*))?(?:\s+\w{0,16})?\s*")
_TYPE = re.compile(r"\s*\w{0,32}\s*")
_RECIPIENT = re.compile(r"to=(\S+)")
_KNOWN_TYPE = re.compile(rf"\s*(?:{'|'.join(TYPES)})?\s*")


@dataclass(frozen=True, slots=True)
class MessageHeader:
    """Header of a message."""

    channel: str = ""
    """Channel; empty if the header names none."""
    recipient: str = ""
    """Recipient, such as `functions.weather`; empty if the message is for the user."""


class HeaderReader:
    """Incremental reader of a header, which consists of sections that begin with markers.

    The model may leave out any section, or the marker after the header. Text that cannot be part of a header
    therefore ends it, and belongs to the message.
    """

    def __init__(self) -> None:
        self._marker = ""
        """Marker before the current section; empty before the first marker."""
        self._sections: dict[str, str] = {"": ""}

    @property
    def sections(self) -> tuple[str, ...]:
        """Markers of the header so far, without that of an empty beginning."""
        return tuple(marker for marker in self._sections if marker)

    def begin_section(self, marker: str) -> None:
        """Begin the section after `<|start|>`, `<|channel|>` or `<|constrain|>`."""
        if marker == START:
            self._sections = {}
        self._marker = marker
        self._sections[marker] = ""

    def add(self, text: str) -> str | None:
        """Add text; return None if it may be part of the header, else the message's text."""
        section = self._sections[self._marker] + text
        self._sections[self._marker] = section
        if len(section) <= MAX_SECTION and self._may_be_header(section):
            return None
        return self._split_text(section)

    def end(self, *, cut_off: bool = False) -> tuple[MessageHeader, str]:
        """End a header that no `<|message|>` follows; return it, and the text that belongs to the message.

        Words that only might have become a header are text, except words after a marker with `cut_off`,
        which means that it was not the model that ended them.
        """
        section = self._sections[self._marker]
        if self._marker == CHANNEL:
            words = section.split()
            text = words[-1] if len(words) > 1 else ""
            is_header = text.startswith("to") or any(known.startswith(text) for known in TYPES)
            return self.header(), "" if is_header else text
        if self._marker == START and not cut_off and section.lstrip().startswith(ASSISTANT):
            text = section.lstrip()[len(ASSISTANT) :]
        else:
            text = "" if self._marker else section
        is_text = text.strip() and not self.header().recipient
        return self.header(), text if is_text else ""

    def header(self) -> MessageHeader:
        """Return the header read so far."""
        words = self._sections.get(CHANNEL, "").split()
        channel = words[0] if words and not words[0].startswith("to=") else ""
        recipient = next(
            (found[1] for text in self._sections.values() if (found := _RECIPIENT.search(text))), ""
        )
        return MessageHeader(channel, recipient)

    def _may_be_header(self, section: str) -> bool:
        if "\n" in section.strip():
            return False
        if self._marker == CHANNEL:
            return _CHANNEL.fullmatch(section) is not None
        if self._marker == CONSTRAIN:
            return _TYPE.fullmatch(section) is not None
        body = section.lstrip()
        if body.startswith(ASSISTANT):
            return _OPTIONAL_RECIPIENT.fullmatch(body[len(ASSISTANT) :]) is not None
        if ASSISTANT.startswith(body) or _OPTIONAL_RECIPIENT.fullmatch(body) is not None:
            return True
        return self._marker == START and _ROLE.fullmatch(body) is not None

    def _split_text(self, section: str) -> str:
        """Return the text that follows the header within the current section, which is not a header."""
        if self._marker == CONSTRAIN:
            known = _KNOWN_TYPE.match(section)
            end = known.end() if known else 0
            self._sections[CONSTRAIN] = section[:end]
            return section[end:]
        if self._marker == CHANNEL:
            word = section.split(maxsplit=1)
            if not word or word[0] not in CHANNELS:
                self._sections[CHANNEL] = ""
                return section
            rest = section[section.index(word[0]) + len(word[0]) :]
            recipient = re.match(r"\s+to=\S+", rest)
            kept = recipient.end() if recipient else 0
            known = _KNOWN_TYPE.match(rest, kept)
            self._sections[CHANNEL] = word[0] + rest[:kept]
            return rest[known.end() if known else kept :]
        body = section.lstrip()
        self._sections[self._marker] = ""
        names_role = self._marker == START and body.startswith(ASSISTANT)
        return body[len(ASSISTANT) :] if names_role else section
