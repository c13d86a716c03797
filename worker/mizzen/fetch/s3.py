# SPDX-License-Identifier: Apache-2.0
"""Plan fetches of objects in buckets of Amazon S3 and compatible servers (`s3://`)."""

from __future__ import annotations

import base64
import binascii
import configparser
import hashlib
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from urllib.parse import quote, urlencode, urlsplit
from xml.etree import ElementTree

import httpx

from mizzen.fetch.client import Credentials, FetchClient, RequestRejected
from mizzen.fetch.errors import FetchError
from mizzen.fetch.plan import MAX_FILES, FetchPlan, FileFilter, RemoteFile, make_plan
from mizzen.fetch.sigv4 import AccessKey, sign
from mizzen.fetch.source import S3Source

DEFAULT_REGION = "us-east-1"
_MD5 = re.compile(r'"([0-9a-f]{32})"')


class Signer:
    """Credentials that sign the requests to one bucket; `region` changes if the server reports another
    one."""

    def __init__(self, key: AccessKey | None, region: str) -> None:
        """Sign requests with `key`; if it is None, requests are unsigned, which public buckets allow."""
        self._key = key
        self.region = region

    def headers(self, method: str, url: str, given: Mapping[str, str]) -> Mapping[str, str]:
        """Return the headers that sign a request, or no headers if there is no key."""
        return sign(method, url, given, self._key, self.region, datetime.now(UTC)) if self._key else {}

    def handle_unauthorized(self, url: str, response: httpx.Response) -> bool:
        """Return False, because there is no other key to try."""
        return False


def parse_credentials(text: str, region: str = "") -> Signer:
    """Return the signer for a text in the format of `~/.aws/credentials`.

    It uses the profile `default`, or else the first profile. An empty text means unsigned requests. `region`,
    if not empty, takes precedence over the region in the profile.

    Raises:
        FetchError: the text has no valid profile.
    """
    if not text.strip():
        return Signer(None, region or DEFAULT_REGION)
    parser = configparser.ConfigParser(interpolation=None, default_section="")
    try:
        parser.read_string(text)
        name = "default" if parser.has_section("default") else parser.sections()[0]
        profile = parser[name]
        key = AccessKey(
            profile["aws_access_key_id"],
            profile["aws_secret_access_key"],
            profile.get("aws_session_token", ""),
        )
    except (configparser.Error, KeyError, IndexError):  # the error text may contain the secret
        raise FetchError(
            "--credentials must contain a profile as in ~/.aws/credentials: a line [default], followed by "
            "aws_access_key_id = … and aws_secret_access_key = …"
        ) from None
    return Signer(key, region or profile.get("region", DEFAULT_REGION))


def plan_fetch(
    client: FetchClient,
    source: S3Source,
    credentials: Signer,
    file_filter: FileFilter,
    *,
    endpoint: str = "",
    limit: int = 0,
) -> FetchPlan:
    """List the objects below the source's prefix, and return a plan with the selected ones.

    The revision of the plan is a hash of the objects' names, sizes and ETags, so it changes if an object
    changes.

    Args:
        client: client for the requests.
        source: bucket and prefix.
        credentials: signer of the requests; its region is corrected if the server reports another one.
        file_filter: selects the objects.
        endpoint: base URL of the server; empty for Amazon S3.
        limit: maximum total size in bytes; 0 means no limit.

    Raises:
        FetchError: the server denies access, its answer is invalid, or `make_plan` rejects the files.
    """
    name = f"s3://{source.bucket}/{source.prefix}"
    try:
        try:
            files = _list_files(client, source, credentials, file_filter, endpoint)
        except RequestRejected as error:
            region = error.headers.get("x-amz-bucket-region", "")
            if not region or region == credentials.region:
                raise
            credentials.region = region
            files = _list_files(client, source, credentials, file_filter, endpoint)
    except RequestRejected as error:
        raise FetchError(_explain(error, name)) from error
    except ElementTree.ParseError as error:
        raise FetchError(f"{name}: the endpoint does not speak the S3 protocol: {error}") from error
    state = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.path):
        state.update(f"{file.path}\0{file.size}\0{file.version}\n".encode())
    return make_plan(f"listing-{state.hexdigest()[:40]}", files, source=name, limit=limit)


def _list_files(
    client: FetchClient, source: S3Source, credentials: Signer, file_filter: FileFilter, endpoint: str
) -> list[RemoteFile]:
    base = _bucket_url(source, credentials.region, endpoint)
    files: list[RemoteFile] = []
    for key, size, tag in _list_objects(client, source, credentials, base):
        path = key.removeprefix(source.prefix)
        if not key.endswith("/") and file_filter.matches(path):
            url = f"{base}/{quote(key, safe='/-_.~')}"
            files.append(RemoteFile(path, size, _object_digest(client, credentials, url, tag), url, tag))
    return files


def _bucket_url(source: S3Source, region: str, endpoint: str) -> str:
    if endpoint:
        return f"{endpoint.rstrip('/')}/{source.bucket}"
    return f"https://{source.bucket}.s3.{region}.amazonaws.com"


def _list_objects(
    client: FetchClient, source: S3Source, credentials: Credentials, base: str
) -> Iterator[tuple[str, int, str]]:
    """Yield the key, the size in bytes and the ETag of each object below the prefix."""
    more, count = "", 0
    while True:
        query = {"list-type": "2", "prefix": source.prefix, **({"continuation-token": more} if more else {})}
        url = f"{base}{'' if urlsplit(base).path else '/'}?{urlencode(query, quote_via=quote, safe='-_.~')}"
        root = ElementTree.fromstring(client.get(url, credentials).content)
        for entry in root.iterfind("{*}Contents"):
            count += 1
            if count > 10 * MAX_FILES:
                raise FetchError(
                    f"s3://{source.bucket}/{source.prefix} has too many objects: use one model's folder"
                )
            size = entry.findtext("{*}Size", "")
            if not size.isdecimal():
                raise FetchError(f"s3://{source.bucket}: the list of objects has the invalid size {size!r}")
            yield entry.findtext("{*}Key", ""), int(size), entry.findtext("{*}ETag", "")
        more = root.findtext("{*}NextContinuationToken", "")
        if root.findtext("{*}IsTruncated", "") != "true" or not more:
            return


def _object_digest(client: FetchClient, credentials: Credentials, url: str, tag: str) -> str:
    """Return an object's digest in the format of `RemoteFile.digest`; empty if the server provides none.

    `tag` is the object's ETag. It is the object's MD5, unless the object was uploaded in parts or is
    encrypted with a key that S3 does not manage.
    """
    headers = client.head(url, credentials, {"x-amz-checksum-mode": "ENABLED"})
    try:
        raw = base64.b64decode(headers.get("x-amz-checksum-sha256", ""), validate=True)
    except binascii.Error:
        raw = b""
    if len(raw) == 32 and headers.get("x-amz-checksum-type", "FULL_OBJECT") == "FULL_OBJECT":
        return f"sha256:{raw.hex()}"
    encrypted = headers.get("x-amz-server-side-encryption", "AES256") != "AES256"
    match = (
        None
        if encrypted or "x-amz-server-side-encryption-customer-algorithm" in headers
        else _MD5.fullmatch(tag)
    )
    return f"md5:{match[1]}" if match else ""


def _explain(error: RequestRejected, name: str) -> str:
    if error.code in (400, 401, 403):
        return (
            f"{name}: access denied ({error.code}): provide a key that may list and read it "
            "(spec.model.credentialsSecretRef), and check the region and spec.model.endpoint"
        )
    if error.code == 404:
        return f"{name}: no such bucket: check its name, the region and spec.model.endpoint"
    return str(error)
