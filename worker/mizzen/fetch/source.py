# SPDX-License-Identifier: Apache-2.0
"""Parse the URI of a model source. This module does no I/O."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mizzen.fetch.errors import FetchError

DEFAULT_REVISION = "main"
_HUB = re.compile(
    r"hf://(?P<repo>[A-Za-z0-9][\w.-]{0,95}(?:/[A-Za-z0-9][\w.-]{0,95})?)(?:@(?P<revision>[\w./+-]{1,255}))?"
)
_S3 = re.compile(r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(?P<prefix>[^?#\s]*))?")
_OCI = re.compile(
    r"oci://(?P<host>[A-Za-z0-9.-]+(?::[0-9]{1,5})?)/(?P<repository>[a-z0-9]+(?:[._/-]+[a-z0-9]+)*)"
    r"(?::(?P<tag>[A-Za-z0-9_][\w.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)


@dataclass(frozen=True, slots=True)
class HubSource:
    """A repository on a model hub; `revision` is a branch, a tag or a commit."""

    repo: str
    revision: str = DEFAULT_REVISION


@dataclass(frozen=True, slots=True)
class S3Source:
    """A bucket's objects whose names begin with `prefix`, which is empty or ends with a slash."""

    bucket: str
    prefix: str = ""


@dataclass(frozen=True, slots=True)
class OciSource:
    """An artifact or image in a registry; `reference` is a tag or a digest."""

    host: str
    repository: str
    reference: str = "latest"


Source = HubSource | S3Source | OciSource


def parse_source(uri: str) -> Source:
    """Return the source of a URI: `hf://org/name@revision`, `s3://bucket/prefix`, `oci://host/repository:tag`.

    Raises:
        FetchError: the URI has none of these forms.
    """
    if match := _HUB.fullmatch(uri):
        revision = match["revision"] or DEFAULT_REVISION
        if ".." not in revision and ".." not in match["repo"]:
            return HubSource(match["repo"], revision)
    if match := _S3.fullmatch(uri):
        prefix = (match["prefix"] or "").strip("/")
        return S3Source(match["bucket"], f"{prefix}/" if prefix else "")
    if match := _OCI.fullmatch(uri):
        reference = match["digest"] or match["tag"] or "latest"
        return OciSource(match["host"], match["repository"], reference)
    raise FetchError(
        f"{uri!r} is not a source: use hf://org/name@revision, s3://bucket/prefix or oci://host/repository:tag"
    )
