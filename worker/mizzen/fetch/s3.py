"""s3://: buckets of S3 and of what speaks its protocol."""

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

from mizzen.fetch.client import Client, Credentials, Refusal
from mizzen.fetch.errors import FetchError
from mizzen.fetch.plan import MAX_FILES, Choice, Plan, Remote, made
from mizzen.fetch.sigv4 import Key, sign
from mizzen.fetch.source import S3Source

DEFAULT_REGION = "us-east-1"
_MD5 = re.compile(r'"([0-9a-f]{32})"')


class Signer:
    """Signs requests to one bucket; learns the bucket's region from its answers."""

    def __init__(self, key: Key | None, region: str) -> None:
        """Sign with a key; without one nothing is signed, as public buckets allow."""
        self._key = key
        self.region = region

    def headers(self, method: str, url: str, given: Mapping[str, str]) -> Mapping[str, str]:
        """The signature."""
        return sign(method, url, given, self._key, self.region, datetime.now(UTC)) if self._key else {}

    def refused(self, url: str, response: httpx.Response) -> bool:
        """There is no other key."""
        return False


def credentials(text: str, region: str = "") -> Signer:
    """The signer of a file in the form of `~/.aws/credentials`; its profile `default`, or its only one.

    Raises:
        FetchError: it is none.
    """
    if not text.strip():
        return Signer(None, region or DEFAULT_REGION)
    parser = configparser.ConfigParser(interpolation=None, default_section="")
    try:
        parser.read_string(text)
        name = "default" if parser.has_section("default") else parser.sections()[0]
        profile = parser[name]
        key = Key(
            profile["aws_access_key_id"],
            profile["aws_secret_access_key"],
            profile.get("aws_session_token", ""),
        )
    except (configparser.Error, KeyError, IndexError):  # its text may hold the secret
        raise FetchError(
            "--credentials must hold a profile as in ~/.aws/credentials: a line [default], and below it "
            "aws_access_key_id = … and aws_secret_access_key = …"
        ) from None
    return Signer(key, region or profile.get("region", DEFAULT_REGION))


def plan(
    client: Client,
    source: S3Source,
    shows: Signer,
    choice: Choice,
    *,
    endpoint: str = "",
    limit: int = 0,
) -> Plan:
    """List the objects below the source's prefix.

    The revision is a digest of their names, sizes and tags: a changed object makes another one.

    Raises:
        FetchError: the server refuses, or what it says makes no sense.
    """
    name = f"s3://{source.bucket}/{source.prefix}"
    try:
        try:
            found = _found(client, source, shows, choice, endpoint)
        except Refusal as error:
            region = error.headers.get("x-amz-bucket-region", "")
            if not region or region == shows.region:
                raise
            shows.region = region
            found = _found(client, source, shows, choice, endpoint)
    except Refusal as error:
        raise FetchError(_words(error, name)) from error
    except ElementTree.ParseError as error:
        raise FetchError(f"{name}: the endpoint does not speak S3's protocol: {error}") from error
    state = hashlib.sha256()
    for file in sorted(found, key=lambda file: file.path):
        state.update(f"{file.path}\0{file.size}\0{file.version}\n".encode())
    return made(f"listing-{state.hexdigest()[:40]}", found, source=name, limit=limit)


def _found(client: Client, source: S3Source, shows: Signer, choice: Choice, endpoint: str) -> list[Remote]:
    base = _base(source, shows.region, endpoint)
    found: list[Remote] = []
    for key, size, tag in _listed(client, source, shows, base):
        path = key.removeprefix(source.prefix)
        if not key.endswith("/") and choice.takes(path):
            url = f"{base}/{quote(key, safe='/-_.~')}"
            found.append(Remote(path, size, _digest(client, shows, url, tag), url, tag))
    return found


def _base(source: S3Source, region: str, endpoint: str) -> str:
    if endpoint:
        return f"{endpoint.rstrip('/')}/{source.bucket}"
    return f"https://{source.bucket}.s3.{region}.amazonaws.com"


def _listed(
    client: Client, source: S3Source, shows: Credentials, base: str
) -> Iterator[tuple[str, int, str]]:
    """Key, size and ETag of every object below the prefix."""
    more, count = "", 0
    while True:
        query = {"list-type": "2", "prefix": source.prefix, **({"continuation-token": more} if more else {})}
        url = f"{base}{'' if urlsplit(base).path else '/'}?{urlencode(query, quote_via=quote, safe='-_.~')}"
        root = ElementTree.fromstring(client.get(url, shows).content)
        for entry in root.iterfind("{*}Contents"):
            count += 1
            if count > 10 * MAX_FILES:
                raise FetchError(
                    f"s3://{source.bucket}/{source.prefix} has too many objects: name a model's folder"
                )
            size = entry.findtext("{*}Size", "")
            if not size.isdecimal():
                raise FetchError(f"s3://{source.bucket}: the list of objects says size {size!r}")
            yield entry.findtext("{*}Key", ""), int(size), entry.findtext("{*}ETag", "")
        more = root.findtext("{*}NextContinuationToken", "")
        if root.findtext("{*}IsTruncated", "") != "true" or not more:
            return


def _digest(client: Client, shows: Credentials, url: str, tag: str) -> str:
    """The checksum that the server knows of an object; empty when it knows none of the whole of it.

    An ETag is an MD5 unless the object came in several parts or is encrypted with a key of the user's.
    """
    headers = client.peek(url, shows, {"x-amz-checksum-mode": "ENABLED"})
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


def _words(error: Refusal, name: str) -> str:
    if error.code in (400, 401, 403):
        return (
            f"{name} is refused ({error.code}): give a key that may list and read it "
            "(spec.model.credentialsSecretRef), and check the region and spec.model.endpoint"
        )
    if error.code == 404:
        return f"{name}: there is no such bucket: check its name, the region and spec.model.endpoint"
    return str(error)
