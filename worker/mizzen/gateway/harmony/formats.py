# SPDX-License-Identifier: Apache-2.0
"""Formats of answers in harmony format, from which grammars are built.

Reasoning is free. A grammar constrains the message after it: a call, or the text of the channel `final`.
"""

from __future__ import annotations

from collections.abc import Sequence

from mizzen.gateway.harmony.header import ANALYSIS, ASSISTANT, COMMENTARY, FINAL
from mizzen.gateway.harmony.markers import CHANNEL, CONSTRAIN, END, MESSAGE, START
from mizzen.gateway.harmony.output_parser import NAMESPACE, HarmonyParser, MessageKind
from mizzen.gateway.text.tokenizer import Tokenizer
from mizzen.gateway.tools import structural_tags as tags
from mizzen.gateway.tools.call_formats import CallSchema
from mizzen.gateway.tools.structural_tags import Format


class HarmonyFormats:
    """Builder of the formats of a model's answers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Set the tokenizer, whose vocabulary has the tokens of the format."""
        self._ids = {
            marker: tokenizer.token_id(marker) for marker in (START, END, MESSAGE, CHANNEL, CONSTRAIN)
        }

    def answer(self, last: Format, start: HarmonyParser, *, preamble: bool) -> Format:
        """Return the format of an answer: reasoning, and then a message of format `last`.

        Args:
            last: Format of the last message: `final`, `call`, or a choice of them.
            start: Parser at the end of the prompt, between messages or after the role of the first.
            preamble: True if there may also be texts for the user on the channel `commentary`.

        Raises:
            ValueError: the prompt ends after the channel of a message.
        """
        channels = (ANALYSIS, COMMENTARY) if preamble else (ANALYSIS,)
        header = tags.sequence(self._token(CHANNEL), tags.either(*map(tags.text, channels)))
        next_role = tags.sequence(self._token(START), tags.text(ASSISTANT))
        message = tags.sequence(header, self._body(), next_role)
        rest = tags.sequence({"type": "star", "content": message}, last)
        if not start.in_header and start.kind is MessageKind.REASONING:
            return tags.sequence(tags.tag("", tags.any_text(), self._token(END)), next_role, rest)
        if not start.sections:
            return tags.sequence(next_role, rest)
        if start.sections != (START,):
            raise ValueError("the chat template opens a message whose text cannot be constrained")
        return rest

    def final(self, content: Format) -> Format:
        """Return the format of the last message of an answer whose text has format `content`."""
        return tags.sequence(
            self._token(CHANNEL), tags.text(FINAL), self._type(), self._token(MESSAGE), content
        )

    def calls(self, calls: Sequence[CallSchema]) -> Format:
        """Return the format of a call, with which the model ends its turn.

        The header may name the recipient in either of the two places that the format allows.
        """
        return tags.either(*map(self._call, calls))

    def _call(self, call: CallSchema) -> Format:
        recipient = f" to={NAMESPACE}{call.name}"
        channel, kind = self._token(CHANNEL), self._type()
        headers = tags.either(
            tags.sequence(channel, tags.text(COMMENTARY + recipient), kind),
            tags.sequence(tags.text(recipient), channel, tags.text(COMMENTARY), kind),
        )
        return tags.sequence(headers, self._token(MESSAGE), tags.json_value(call.schema))

    def _body(self) -> Format:
        return tags.tag(self._token(MESSAGE), tags.any_text(), self._token(END))

    def _type(self) -> Format:
        """Return the format of the optional type of a message's text."""
        plain = tags.text(" json")
        if self._ids[CONSTRAIN] is None:
            return tags.optional(plain)
        marked = tags.sequence(tags.optional(tags.text(" ")), self._token(CONSTRAIN), tags.text("json"))
        return tags.optional(tags.either(plain, marked))

    def _token(self, marker: str) -> Format:
        return {"type": "token", "token": self._ids[marker]}
