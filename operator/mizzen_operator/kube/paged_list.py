"""Reads names and versions from pages of a list without decoding the objects themselves."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from mizzen_operator.kube.store import ObjectName, ObjectVersion


class _Metadata(msgspec.Struct, rename="camel"):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    continue_: str = msgspec.field(name="continue", default="")


class _Item(msgspec.Struct):
    metadata: _Metadata


class _Page(msgspec.Struct):
    metadata: _Metadata
    items: list[_Item] | None = None


_decode = msgspec.json.Decoder(_Page).decode


@dataclass(slots=True)
class ObjectList:
    """A list that arrives in pages, which all show the same resourceVersion.

    Attributes:
        objects: uid and version of each object.
        version: resourceVersion of the list; 0 before the first page.
        continue_token: token of the next page; empty after the last.
    """

    objects: dict[ObjectName, ObjectVersion] = field(default_factory=dict)
    version: int = 0
    continue_token: str = ""

    def add_page(self, page: bytes) -> None:
        """Add a page as JSON, of whole objects or of their metadata.

        Raises:
            msgspec.ValidationError, msgspec.DecodeError: the text is not a page of a list.
        """
        read = _decode(page)
        self.version, self.continue_token = int(read.metadata.resource_version), read.metadata.continue_
        for item in read.items or ():  # null if the list is empty
            meta = item.metadata
            name = ObjectName(meta.namespace, meta.name)
            self.objects[name] = ObjectVersion(meta.uid, int(meta.resource_version))


class _AnyPage(msgspec.Struct):
    metadata: _Metadata


def read_continue_token(page: bytes) -> str:
    """Return the continue token of a page of any kind; empty after the last page."""
    return msgspec.json.decode(page, type=_AnyPage).metadata.continue_
