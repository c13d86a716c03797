"""hf://: repositories of a model hub, by its HTTP API."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from mizzen.fetch.client import Client, Credentials, Refusal, Shown
from mizzen.fetch.errors import FetchError
from mizzen.fetch.plan import Choice, Plan, Remote, made
from mizzen.fetch.source import HubSource

ENDPOINT = "https://huggingface.co"
_COMMIT = re.compile(r"[0-9a-f]{40}")


def credentials(text: str) -> Credentials:
    """The credentials in a file that holds a token.

    Raises:
        FetchError: it holds something else.
    """
    token = text.strip()
    if not token.isascii() or len(token.split()) > 1:
        raise FetchError("--credentials must hold one token of the hub, and nothing else")
    return Shown(f"Bearer {token}" if token else "")


def plan(
    client: Client,
    source: HubSource,
    shows: Credentials,
    choice: Choice,
    *,
    endpoint: str = "",
    pin: str = "",
    limit: int = 0,
) -> Plan:
    """Resolve a revision to its commit, and list that commit's files.

    Args:
        client: asks the hub.
        source: what to fetch.
        shows: credentials.
        choice: of the files.
        endpoint: of the hub; the public one when empty.
        pin: the commit that is wanted, whatever the source's revision points at by now.
        limit: bytes at most; 0 is none.

    Raises:
        FetchError: the hub refuses, or what it says makes no sense.
    """
    base, name = (endpoint or ENDPOINT).rstrip("/"), f"hf://{source.repo}@{source.revision}"
    wanted = pin or source.revision
    url = f"{base}/api/models/{source.repo}/revision/{quote(wanted, safe='')}?blobs=true"
    try:
        found = json.loads(client.get(url, shows).content)
        commit, listed = found["sha"], found["siblings"]
        if not _COMMIT.fullmatch(commit):
            raise ValueError(f"commit {commit!r}")
        files = [
            Remote(
                path=one["rfilename"],
                size=_size(one),
                digest=_digest(one),
                url=f"{base}/{source.repo}/resolve/{commit}/{quote(one['rfilename'])}",
            )
            for one in listed
            if choice.takes(one["rfilename"])
        ]
    except Refusal as error:
        raise FetchError(_words(error, name)) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FetchError(f"{base} does not speak the hub's API: {type(error).__name__}: {error}") from error
    return made(commit, files, source=name, limit=limit)


def _size(one: Mapping[str, Any]) -> int:
    return int(one["lfs"]["size"] if one.get("lfs") else one["size"])


def _digest(one: Mapping[str, Any]) -> str:
    if lfs := one.get("lfs"):
        return f"sha256:{lfs['sha256']}"
    return f"git:{one['blobId']}" if one.get("blobId") else ""


def _words(error: Refusal, name: str) -> str:
    if error.code in (401, 403):
        return (
            f"{name} is refused ({error.code}): it is private, gated, or not there: accept its "
            "terms at the hub, and give a token that may read it (spec.model.credentialsSecretRef)"
        )
    if error.code == 404:
        return (
            f"{name}: the hub has no such model or revision: check the name behind hf:// and the one behind @"
        )
    return str(error)
