# SPDX-License-Identifier: Apache-2.0
"""A node of the prefix cache's radix tree. Many modules need this type, so it has a separate module."""

from __future__ import annotations

from mizzen.core.request import Int32

LOWEST = -(1 << 31)
"""Priority of a node that no request has used."""


class RadixNode:
    """A node of the radix tree: holds a run of consecutive pages of a cached prefix.

    Token ids are kept as bytes (native int32), because bytes are fast to compare and to slice.
    """

    __slots__ = (
        "block_hashes", "children", "created", "end", "heap_entry", "hits", "lock_count", "pages", "parent",
        "priority", "removed", "salt", "token_bytes", "used",
    )  # fmt: skip

    def __init__(self, parent: RadixNode | None, data: bytes, pages: Int32, salt: bytes = b"") -> None:
        self.parent = parent
        self.token_bytes = data
        self.pages = pages
        self.end = len(pages) + (parent.end if parent else 0)
        """Number of pages from the root to the end of this node."""
        self.children: dict[bytes, RadixNode] = {}
        """Child nodes, by the token bytes of their first page."""
        self.salt = salt
        """Cache salt; set on roots only."""
        self.removed = False
        """Whether the node was removed from the tree."""
        self.lock_count = 0
        """Number of locks on this node and its descendants."""
        self.created = 0
        self.used = 0
        self.hits = 0
        self.priority = LOWEST
        self.heap_entry = 0
        self.block_hashes: list[int] | None = None
        """Hashes of the blocks that end in this node; None until they are computed."""

    @property
    def start(self) -> int:
        """Number of pages from the root to the start of this node."""
        return self.end - len(self.pages)
