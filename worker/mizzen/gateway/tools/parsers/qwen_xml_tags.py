# SPDX-License-Identifier: Apache-2.0
"""Tags of calls of Qwen3-Coder and Seed-OSS: where a key and a value end, also in calls with faults.

All functions read text that may continue. What they return does not change with the text that follows, so a
value may contain any text that is certainly not a tag of the call.
"""

from __future__ import annotations

import re
from collections.abc import Collection

CALL, CALL_END = "<tool_call>", "</tool_call>"
SEED_CALL, SEED_CALL_END = "<seed:tool_call>", "</seed:tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
MAX_NAME = 256
"""Maximum length of the name of a function or parameter, in characters."""
MAX_HELD = 4096
"""Number of characters after `</tool_call>` in a value that are searched for `</parameter>`.

If `</parameter>` is among them, `</tool_call>` is part of the value."""

_CLOSING = r"</\s{0,8}parameter\s{0,8}/?\s{0,8}>"
_TAG = re.compile(
    rf"(?P<closing>{_CLOSING})"
    r"""|<parameter=\s{0,8}["']?(?P<key>[^\s:="'<>]{1,200})["']?(?=[\s:=>])"""
    rf"|(?P<end>{FUNCTION_END}|{CALL_END}|{SEED_CALL_END})"
)
_AFTER_END = re.compile(rf"(?P<closing>{_CLOSING})|{CALL}|{SEED_CALL}")
_OPEN_PARAMETER = re.compile(r"""<parameter=\s{0,8}["']?[^\s:="'<>]{0,200}["']?""")
_MAX_TAG = 40
"""Upper bound of the length of a closing tag, in characters."""
_LINE_END = re.compile(r"\n[ \t]{0,64}\Z")
_KEY_END = re.compile(r"[>\n<]")
_LOOSE_KEY = re.compile(r"""\s*["']?([^\s:="'<>]+)["']?\s*(?:[:=]|(?=\s)|\Z)[ \t]*""")


def split_key(text: str, properties: Collection[str], *, at_end: bool = False) -> tuple[str, str] | None:
    """Split text after `<parameter=` into a key and the text of the value; None if more text is needed.

    A key ends at `>`. If `>` is missing, or separated from the key by other text, the key ends at `:`, `=` or
    white space: `ids: [1]`. `properties` holds the keys that the tool describes; `at_end` means that no text
    follows.
    """
    found = _KEY_END.search(text, 0, MAX_NAME)
    if found is None and len(text) < MAX_NAME and not at_end:
        return None
    head = text[: found.start()] if found is not None else text[:MAX_NAME]
    loose = _LOOSE_KEY.match(head)
    if found is not None and found[0] == ">":
        is_exact = head in properties or loose is None or loose[1] not in properties
        if is_exact or loose is None or loose.end() == len(head):
            return (head if is_exact or loose is None else loose[1]), text[found.end() :]
    if loose is None:
        return head.strip(), text[len(head) :]
    return loose[1], text[loose.end() :]


def split_value(text: str, unused: Collection[str] | None, *, at_end: bool = False) -> tuple[str, str | None]:
    """Split text at the end of a value; return the value and the text after it.

    A value ends at `</parameter>`, or a similar tag. If this tag is missing, a value ends at the next
    parameter or at the end of the call. A line break right before the end is not part of the value. If the
    end is not reached yet, return the text that certainly belongs to the value, and None.

    Args:
        text: Text of the value, and of what follows.
        unused: Keys that the tool describes and that the call has not set yet: only these can begin the next
            parameter. None if the tool describes none; any key at the beginning of a line can then.
        at_end: Whether no text follows.
    """
    for tag in _TAG.finditer(text):
        if tag["closing"]:
            return text[: tag.start()].removesuffix("\n"), text[tag.end() :]
        if tag["key"]:
            at_line_start = tag.start() == 0 or _LINE_END.search(text, 0, tag.start()) is not None
            if tag["key"] in unused if unused is not None else at_line_start:
                return _without_line_end(text[: tag.start()]), text[tag.start() :]
            continue
        is_end = _ends_call(text, tag, at_end)
        if is_end:
            return _without_line_end(text[: tag.start()]), text[tag.start() :]
        if is_end is None:
            return _certain(text[: tag.start()]), None
    last = text.rfind("<")
    partial = last >= 0 and _may_begin_tag(text[last:])
    if at_end:
        return _without_line_end(text[:last] if partial and text[last:] != "<" else text), None
    return _certain(text[:last] if partial else text), None


def _ends_call(text: str, tag: re.Match[str], at_end: bool) -> bool | None:
    """Return whether `</function>` or `</tool_call>` within a value ends the call; None if it is not certain.

    It does not if `</parameter>` follows before the next call.
    """
    after = text[tag.end() : tag.end() + MAX_HELD]
    if tag["end"] == FUNCTION_END:
        following = after.lstrip()
        ends, others = (CALL_END, SEED_CALL_END), (CALL, SEED_CALL, FUNCTION)
        if not following.startswith((*ends, *others)):
            if len(after) == MAX_HELD or not any(other.startswith(following) for other in (*ends, *others)):
                return False
            return True if at_end else None
        if not following.startswith(ends):
            return True
    found = _AFTER_END.search(after)
    if found is not None:
        return not found["closing"]
    if len(after) == MAX_HELD:
        return False
    return True if at_end else None


def _may_begin_tag(tail: str) -> bool:
    """Return whether text from `<` on may be the beginning of a tag."""
    if PARAMETER.startswith(tail) or (len(tail) < MAX_NAME and _OPEN_PARAMETER.fullmatch(tail)):
        return True
    compact = "".join(tail.split())
    return len(tail) <= _MAX_TAG and any(
        end.startswith(compact)
        for end in (PARAMETER_END, "</parameter/>", FUNCTION_END, CALL_END, SEED_CALL_END)
    )


def _without_line_end(text: str) -> str:
    return _LINE_END.sub("", text)


def _certain(text: str) -> str:
    """Return text without a line break at its end, which may not belong to the value."""
    found = _LINE_END.search(text, max(0, len(text) - 66))
    return text if found is None else text[: found.start()]
