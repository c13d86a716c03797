# SPDX-License-Identifier: Apache-2.0
"""Reads names and versions from pages of a list without decoding the objects themselves."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from mizzen_operator.kube.store import ObjectName, ObjectVersion


class _ListedMetadata(msgspec.Struct, rename="camel"):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    continue_: str = msgspec.field(name="continue", default="")


class _ListedObject(msgspec.Struct):
    metadata: _ListedMetadata


class _ListPage(msgspec.Struct):
    metadata: _ListedMetadata
    items: list[_ListedObject] | None = None


_decode = msgspec.json.Decoder(_ListPage).decode


@dataclass(slots=True)
class ObjectList:
    """A list of objects that arrives in pages; all pages have the same resourceVersion.

    Attributes:
        objects: uid and version of each object.
        version: resourceVersion of the list; 0 before the first page.
        continue_token: token of the next page; empty after the last page.
    """

    objects: dict[ObjectName, ObjectVersion] = field(default_factory=dict)
    version: int = 0
    continue_token: str = ""

    def add_page(self, page: bytes) -> None:
        """Add a page, given as JSON; its items are objects or only their metadata.

        Raises:
            msgspec.ValidationError, msgspec.DecodeError: `page` is not a page of a list.
        """
        decoded = _decode(page)
        self.version, self.continue_token = int(decoded.metadata.resource_version), decoded.metadata.continue_
        for item in decoded.items or ():  # null if the list is empty
            meta = item.metadata
            name = ObjectName(meta.namespace, meta.name)
            self.objects[name] = ObjectVersion(meta.uid, int(meta.resource_version))


class _AnyPage(msgspec.Struct):
    metadata: _ListedMetadata


def read_continue_token(page: bytes) -> str:
    """Return the continue token of a page of any kind; empty if it is the last page."""
    return msgspec.json.decode(page, type=_AnyPage).metadata.continue_
