# SPDX-License-Identifier: Apache-2.0
"""Plan fetches from repositories on a model hub (`hf://`), through the hub's HTTP API."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from mizzen.fetch.client import Credentials, FetchClient, RequestRejected, StaticCredentials
from mizzen.fetch.errors import FetchError, UnsupportedFormat
from mizzen.fetch.plan import FetchPlan, FileFilter, RemoteFile, make_plan
from mizzen.fetch.source import HubSource

ENDPOINT = "https://huggingface.co"
_COMMIT = re.compile(r"[0-9a-f]{40}")


def parse_credentials(text: str) -> Credentials:
    """Return the credentials from the contents of a token file; an empty text means anonymous access.

    Raises:
        FetchError: the text is not a single token.
    """
    token = text.strip()
    if not token.isascii() or len(token.split()) > 1:
        raise FetchError("--credentials or HF_TOKEN must contain a single hub token and nothing else")
    return StaticCredentials(f"Bearer {token}" if token else "")


def plan_fetch(
    client: FetchClient,
    source: HubSource,
    credentials: Credentials,
    file_filter: FileFilter,
    *,
    endpoint: str = "",
    pin: str = "",
    limit: int = 0,
) -> FetchPlan:
    """Resolve the source's revision to a commit, and return a plan with the selected files of that commit.

    Args:
        client: client for the requests.
        source: repository and revision.
        credentials: credentials for the hub.
        file_filter: selects the files.
        endpoint: base URL of the hub; empty for the public hub.
        pin: commit to use instead of resolving the source's revision; empty to resolve it.
        limit: maximum total size in bytes; 0 means no limit.

    Raises:
        FetchError: the hub denies access, its answer is invalid, or `make_plan` rejects the files.
    """
    base, name = (endpoint or ENDPOINT).rstrip("/"), f"hf://{source.repo}@{source.revision}"
    wanted = pin or source.revision
    url = f"{base}/api/models/{source.repo}/revision/{quote(wanted, safe='')}?blobs=true"
    try:
        answer = json.loads(client.get(url, credentials).content)
        commit, listed = answer["sha"], answer["siblings"]
        if not _COMMIT.fullmatch(commit):
            raise ValueError(f"commit {commit!r}")
        files = [
            RemoteFile(
                path=entry["rfilename"],
                size=_size(entry),
                digest=_digest(entry),
                url=f"{base}/{source.repo}/resolve/{commit}/{quote(entry['rfilename'])}",
            )
            for entry in listed
            if file_filter.matches(entry["rfilename"])
        ]
        names = [entry["rfilename"] for entry in listed]
    except RequestRejected as error:
        raise FetchError(_explain(error, name)) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FetchError(
            f"{base} does not implement the hub's API: {type(error).__name__}: {error}"
        ) from error
    is_gguf = any(file.endswith(".gguf") for file in names)
    if is_gguf and not any(file.path.endswith(".safetensors") for file in files):
        raise UnsupportedFormat(
            f"{name} has GGUF files, which are not supported, and no safetensors: use the repository of the "
            "original model"
        )
    return make_plan(commit, files, source=name, limit=limit)


def _size(entry: Mapping[str, Any]) -> int:
    return int(entry["lfs"]["size"] if entry.get("lfs") else entry["size"])


def _digest(entry: Mapping[str, Any]) -> str:
    if lfs := entry.get("lfs"):
        return f"sha256:{lfs['sha256']}"
    return f"git:{entry['blobId']}" if entry.get("blobId") else ""


def _explain(error: RequestRejected, name: str) -> str:
    if error.code in (401, 403):
        return (
            f"{name}: access denied ({error.code}): it is private, gated or does not exist; accept its terms "
            "on the hub, and provide a token that may read it (spec.model.credentialsSecretRef, or the "
            "environment variable HF_TOKEN on the command line)"
        )
    if error.code == 404:
        return f"{name}: the hub has no such model or revision: check the name and the revision after @"
    return str(error)
