"""What a list of the API server says of its objects, without reading the objects themselves."""

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
    """A list that comes in pages, which all show the same version.

    Attributes:
        objects: what is there.
        version: when that is so; 0 before the first page.
        more: the token of the next page; empty when there is none.
    """

    objects: dict[ObjectName, ObjectVersion] = field(default_factory=dict)
    version: int = 0
    continue_token: str = ""

    def add_page(self, page: bytes) -> None:
        """Take a page as JSON, of whole objects or of their metadata alone.

        Raises:
            msgspec.ValidationError, msgspec.DecodeError: it is none.
        """
        read = _decode(page)
        self.version, self.continue_token = int(read.metadata.resource_version), read.metadata.continue_
        for item in read.items or ():  # null where there is nothing
            meta = item.metadata
            name = ObjectName(meta.namespace, meta.name)
            self.objects[name] = ObjectVersion(meta.uid, int(meta.resource_version))


class _AnyPage(msgspec.Struct):
    metadata: _Metadata


def read_continue_token(page: bytes) -> str:
    """What a page of a list of any kind says of where the next one begins; empty after the last."""
    return msgspec.json.decode(page, type=_AnyPage).metadata.continue_
