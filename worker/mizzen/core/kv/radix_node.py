"""A node of the prefix cache's radix tree, in a module of its own because many modules need the type."""

from __future__ import annotations

from mizzen.core.request import Int32

LOWEST = -(1 << 31)
"""Priority of a node that no request has used."""


class RadixNode:
    """A run of pages. Token ids are kept as bytes (native int32), because they are compared and sliced."""

    __slots__ = (
        "block_hashes", "born", "children", "end", "hits", "lock_count", "pages", "parent", "priority",
        "removed", "salt", "ticket", "token_bytes", "used",
    )  # fmt: skip

    def __init__(self, parent: RadixNode | None, data: bytes, pages: Int32, salt: bytes = b"") -> None:
        self.parent = parent
        self.token_bytes = data
        self.pages = pages
        self.end = len(pages) + (parent.end if parent else 0)
        """Number of pages from the root to this node's end."""
        self.children: dict[bytes, RadixNode] = {}
        """Child nodes, by the bytes of their first page."""
        self.salt = salt
        """Cache salt; set on roots only."""
        self.removed = False
        """Whether the node has left the tree."""
        self.lock_count = 0
        self.born = 0
        self.used = 0
        self.hits = 0
        self.priority = LOWEST
        self.ticket = 0
        self.block_hashes: list[int] | None = None

    @property
    def start(self) -> int:
        """Number of pages from the root to this node's start."""
        return self.end - len(self.pages)
