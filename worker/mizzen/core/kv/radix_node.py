"""MODULE."""

from __future__ import annotations

from mizzen.core.request import Int32

LOWEST = -(1 << 31)
"""The priority of what no request has used."""


class Node:
    """A run of pages. Token ids are kept as bytes (native int32), for they are compared and sliced."""

    __slots__ = (
        "born", "children", "data", "end", "gone", "hits", "names", "pages", "parent", "priority", "refs",
        "salt", "ticket", "used",
    )  # fmt: skip

    def __init__(self, parent: Node | None, data: bytes, pages: Int32, salt: bytes = b"") -> None:
        self.parent = parent
        self.data = data
        self.pages = pages
        self.end = len(pages) + (parent.end if parent else 0)
        """Pages from the root to this node's end."""
        self.children: dict[bytes, Node] = {}
        """By the bytes of their first page."""
        self.salt = salt
        """Set on roots only."""
        self.gone = False
        """Whether it has left the tree."""
        self.refs = 0
        self.born = 0
        self.used = 0
        self.hits = 0
        self.priority = LOWEST
        self.ticket = 0
        self.names: list[int] | None = None

    @property
    def start(self) -> int:
        """Pages from the root to this node's start."""
        return self.end - len(self.pages)
