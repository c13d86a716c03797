"""Plan fetches from `s3://`: buckets of S3 and compatible servers."""

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
    """Signs requests to one bucket. `region` is updated if the server reports another one."""

    def __init__(self, key: AccessKey | None, region: str) -> None:
        """Sign with `key`; None leaves requests unsigned, for public buckets."""
        self._key = key
        self.region = region

    def headers(self, method: str, url: str, given: Mapping[str, str]) -> Mapping[str, str]:
        """Return the headers that sign a request; no headers if there is no key."""
        return sign(method, url, given, self._key, self.region, datetime.now(UTC)) if self._key else {}

    def handle_unauthorized(self, url: str, response: httpx.Response) -> bool:
        """Return False: there is no other key to try."""
        return False


def parse_credentials(text: str, region: str = "") -> Signer:
    """Return the signer for a text in the format of `~/.aws/credentials`.

    It uses the profile `default`, or else the first one; an empty text gives an unsigned client.

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
    """List the objects below the prefix of the source.

    The revision is a digest of their names, sizes and ETags, so a changed object changes the revision.

    Raises:
        FetchError: the server denies access, or its answer is invalid.
    """
    name = f"s3://{source.bucket}/{source.prefix}"
    try:
        try:
            found = _list_files(client, source, credentials, file_filter, endpoint)
        except RequestRejected as error:
            region = error.headers.get("x-amz-bucket-region", "")
            if not region or region == credentials.region:
                raise
            credentials.region = region
            found = _list_files(client, source, credentials, file_filter, endpoint)
    except RequestRejected as error:
        raise FetchError(_explain(error, name)) from error
    except ElementTree.ParseError as error:
        raise FetchError(f"{name}: the endpoint does not speak the S3 protocol: {error}") from error
    state = hashlib.sha256()
    for file in sorted(found, key=lambda file: file.path):
        state.update(f"{file.path}\0{file.size}\0{file.version}\n".encode())
    return make_plan(f"listing-{state.hexdigest()[:40]}", found, source=name, limit=limit)


def _list_files(
    client: FetchClient, source: S3Source, credentials: Signer, file_filter: FileFilter, endpoint: str
) -> list[RemoteFile]:
    base = _bucket_url(source, credentials.region, endpoint)
    found: list[RemoteFile] = []
    for key, size, tag in _list_objects(client, source, credentials, base):
        path = key.removeprefix(source.prefix)
        if not key.endswith("/") and file_filter.matches(path):
            url = f"{base}/{quote(key, safe='/-_.~')}"
            found.append(RemoteFile(path, size, _object_digest(client, credentials, url, tag), url, tag))
    return found


def _bucket_url(source: S3Source, region: str, endpoint: str) -> str:
    if endpoint:
        return f"{endpoint.rstrip('/')}/{source.bucket}"
    return f"https://{source.bucket}.s3.{region}.amazonaws.com"


def _list_objects(
    client: FetchClient, source: S3Source, credentials: Credentials, base: str
) -> Iterator[tuple[str, int, str]]:
    """Yield key, size in bytes and ETag of each object below the prefix."""
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
    """Return the server's checksum of a whole object; empty if it has none.

    An ETag is an MD5 unless the object was uploaded in parts or is encrypted with the user's key.
    """
    headers = client.head(url, credentials, {"x-amz-checksum-mode": "ENABLED"})
    try:
        raw = base64.b64decode(headers.get("x-amz-checksum-sha256", ""), validate=True)
    except binascii.Error:
        raw = b""
    if len(raw) == 32 and headers.get("x-amz-checksum-type", "FULL_OBJECT") == "FULL_OBJECT":
        return f"sha256:{raw.hex()}"
    encrypted = headers.get("x-amz-server-side-encryption", "AES256") != "AES256"
    found = (
        None
        if encrypted or "x-amz-server-side-encryption-customer-algorithm" in headers
        else _MD5.fullmatch(tag)
    )
    return f"md5:{found[1]}" if found else ""


def _explain(error: RequestRejected, name: str) -> str:
    if error.code in (400, 401, 403):
        return (
            f"{name}: access denied ({error.code}): provide a key that can list and read it "
            "(spec.model.credentialsSecretRef), and check the region and spec.model.endpoint"
        )
    if error.code == 404:
        return f"{name}: no such bucket: check its name, the region and spec.model.endpoint"
    return str(error)
