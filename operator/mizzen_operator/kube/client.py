"""The API server, asynchronously: plain dictionaries, one field manager, a rate limit, deadlines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any
from urllib.parse import urlencode

import aiohttp
import msgspec
from kubernetes.aio.client import Configuration

from mizzen_operator.api import labels
from mizzen_operator.kube.errors import KubeError, error_from_response, is_webhook_failure, retry_delay
from mizzen_operator.kube.paged_list import ObjectList, read_continue_token
from mizzen_operator.kube.rate_limiter import TokenBucket
from mizzen_operator.kube.refs import ObjectRef
from mizzen_operator.kube.store import ObjectName, ObjectStore
from mizzen_operator.kube.transport import REQUEST_SECONDS, Connection, load_configuration
from mizzen_operator.metrics import Metrics

CREDENTIALS_SECONDS = 2 * REQUEST_SECONDS
RETRY_DELAYS_SECONDS = (0.2, 0.5, 1.0)
"""Before a request is sent again that the API server could not deal with: a look takes many, and begins anew
when one fails. Each may be repeated, for names are deterministic and deletions name the uid."""
MAX_RETRIED_SECONDS = 1.0
"""What took longer to fail is left to the next look: its back-off grows, and others have their turn."""
RETRIED_CODES = frozenset({429, 500, 502, 503, 504})
PAGE = 500
APPLY, MERGE = "application/apply-patch+yaml", "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
JSON = "application/json"
ABSENT_VERSION = "1"
"""What no object has as its version: that of a store in which nothing is. What is there conflicts with it."""
METADATA = f"{JSON};as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
OBJECT_METADATA = f"{JSON};as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
_QUERY = {"fieldManager": labels.FIELD_MANAGER, "fieldValidation": "Ignore"}
"""Nobody reads the API server's warnings, which cost it a second parse: a third of what an apply costs."""


class KubeClient:
    """One client for all reconciles."""

    def __init__(
        self,
        configuration: Configuration,
        metrics: Metrics,
        rate_limiter: TokenBucket | None = None,
        stores: Callable[[str], ObjectStore | None] = lambda kind: None,
    ) -> None:
        """Talk to an API server.

        Args:
            configuration: how to reach it.
            metrics: count the requests.
            rate_limiter: limits those that write; how many read at once, the number of workers does.
            stores: gives the cache of a kind whose objects are read there instead; writes go through it.
        """
        self._stores = stores
        self._connection = Connection(configuration)
        self._old_connections: list[Connection] = []
        self._logged_in = time.monotonic()
        self._metrics = metrics
        self._rate_limiter = rate_limiter

    async def _reload_credentials(self) -> bool:
        """Read the credentials anew, as tokens in files are replaced; not more than once in a while."""
        if time.monotonic() - self._logged_in < CREDENTIALS_SECONDS:
            return False
        self._logged_in = time.monotonic()
        for connection in self._old_connections:
            await connection.close()
        self._old_connections = [self._connection]  # its requests may still be under way
        self._connection = Connection(await load_configuration())
        return True

    async def close(self) -> None:
        """Close its connections."""
        for connection in (self._connection, *self._old_connections):
            await connection.close()

    async def get(self, ref: ObjectRef, *, live: bool = False) -> dict[str, Any] | None:
        """Read an object; None when there is none.

        A cache holds only what is labelled as ours: whether a name is free, a `live` read tells.
        """
        cache = self._stores(ref.kind)
        if cache is not None and not (ref.subresource or live):
            return cache.get(ObjectName(ref.namespace, ref.name))
        found = await self._get_bytes(ref)
        return None if found is None else msgspec.json.decode(found)

    async def exists(self, ref: ObjectRef) -> bool:
        """Whether there is an object, by its metadata alone: what a Secret holds is not sent.

        Raises:
            KubeError: the API server failed.
        """
        return await self._get_bytes(ref, OBJECT_METADATA) is not None

    async def _get_bytes(self, ref: ObjectRef, accept: str = JSON) -> bytes | None:
        """Read an object's text; None when there is none."""
        try:
            return await self._request("GET", ref, accept=accept)
        except KubeError as error:
            if error.code == 404:
                return None
            raise

    async def put_fresh(self, ref: ObjectRef) -> dict[str, Any] | None:
        """Read an object from the API server itself, and hold it as it is there; None when there is none.

        Raises:
            KubeError: the API server failed.
        """
        body, cache = await self.get(ref, live=True), self._stores(ref.kind)
        if cache is not None and body is not None:
            cache.put_fresh(body)
        return body

    async def list(self, ref: ObjectRef, selector: str = "") -> list[dict[str, Any]]:
        """Read all objects of a kind, of a namespace when `ref` names one, that match a label selector."""
        cache = self._stores(ref.kind)
        if cache is not None:
            return cache.list(ref.namespace, selector)
        return await self._list(ref, {"labelSelector": selector}, JSON)

    async def list_metadata(
        self, ref: ObjectRef, selector: str, *, from_cache: bool = False
    ) -> list[dict[str, Any]]:
        """Read the metadata alone of all objects of a kind that match a label selector.

        Args:
            ref: their kind, and their namespace if it is but one.
            selector: of their labels.
            from_cache: as the API server has them in memory, perhaps a moment old.
        """
        query = {"labelSelector": selector, "resourceVersion": "0" if from_cache else ""}
        return await self._list(ref, query, METADATA)

    async def metadata_pages(self, ref: ObjectRef, selector: str) -> AsyncIterator[bytes]:
        """The same as JSON, as the API server has it in memory, perhaps a moment old."""
        async for page in self._pages(ref, {"labelSelector": selector, "resourceVersion": "0"}, METADATA):
            yield page

    async def list_versions(self, ref: ObjectRef, selector: str) -> ObjectList:
        """What is there of a kind whose labels match a selector, by the API server itself.

        Raises:
            KubeError: it failed.
        """
        listing = ObjectList()
        async for page in self._pages(ref, {"labelSelector": selector}, METADATA):
            listing.add_page(page)
        return listing

    async def _list(self, ref: ObjectRef, query: Mapping[str, str], accept: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        async for page in self._pages(ref, query, accept):
            found += msgspec.json.decode(page)["items"] or ()  # null where there is nothing
        return found

    async def _pages(self, ref: ObjectRef, query: Mapping[str, str], accept: str) -> AsyncIterator[bytes]:
        query = {**query, "limit": str(PAGE)}
        while True:
            given = {key: value for key, value in query.items() if value}
            page = await self._request("GET", ref, given, accept=accept)
            yield page
            more = read_continue_token(page)
            if not more:
                return
            query = {**query, "continue": more, "resourceVersion": ""}

    async def create(self, manifest: Mapping[str, Any]) -> bool:
        """Create an object; False when one of its name is there already."""
        meta = manifest["metadata"]
        name = ObjectName(meta["namespace"], meta["name"])
        ref = ObjectRef(manifest["kind"], meta["namespace"])
        try:
            await self._write("POST", ref, name, _QUERY, manifest, notify=True)
        except KubeError as error:
            if error.reason == "AlreadyExists":
                return False
            raise
        return True

    async def dry_run_create(self, manifest: Mapping[str, Any], *, strict: bool = False) -> None:
        """Ask whether an object would be taken; it is not made.

        Args:
            manifest: the object.
            strict: not with a field that the API server does not know, which it drops otherwise.

        Raises:
            KubeError: it would not, or the API server failed.
        """
        ref = ObjectRef(manifest["kind"], manifest["metadata"]["namespace"])
        query = {**_QUERY, "dryRun": "All", **({"fieldValidation": "Strict"} if strict else {})}
        await self._request("POST", ref, query, manifest)

    async def replace(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Replace an object of the same resourceVersion."""
        meta = manifest["metadata"]
        ref = ObjectRef(manifest["kind"], meta["namespace"], meta["name"])
        return msgspec.json.decode(await self._request("PUT", ref, body=manifest))

    async def apply(
        self, manifest: Mapping[str, Any], subresource: str = "", *, new: bool = False
    ) -> dict[str, Any]:
        """Server-side apply: what this field manager set before and leaves out now is removed.

        Raises:
            KubeError: the API server failed; with 409, what should be `new` is there already, and is left.
        """
        meta = manifest["metadata"]
        ref = ObjectRef(manifest["kind"], meta["namespace"], meta["name"], subresource)
        query = {**_QUERY, "force": "true"}
        if new:
            manifest = {**manifest, "metadata": {**meta, "resourceVersion": ABSENT_VERSION}}
        return await self._write("PATCH", ref, ObjectName(ref.namespace, ref.name), query, manifest, APPLY)

    async def patch(self, ref: ObjectRef, patch: Mapping[str, Any], content_type: str = MERGE) -> None:
        """Patch an object or its subresource."""
        await self._write("PATCH", ref, ObjectName(ref.namespace, ref.name), _QUERY, patch, content_type)

    async def delete(self, ref: ObjectRef, uid: str, propagation: str = "") -> bool:
        """Delete the very object of this uid; False when it is gone.

        Args:
            ref: the object.
            uid: its own.
            propagation: what becomes of what it owns, such as `Background`; the kind's own way when empty.

        Raises:
            KubeError: the API server failed; with 409, another object may have its name.
        """
        body: dict[str, Any] = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": {"uid": uid}}
        if propagation:
            body["propagationPolicy"] = propagation
        name, cache = ObjectName(ref.namespace, ref.name), self._stores(ref.kind)
        try:
            left = await self._write("DELETE", ref, name, body=body, notify=True)
        except KubeError as error:
            if error.code == 404 and cache is not None:
                cache.mark_deleted(name, uid)
            if error.code == 404:
                return False
            raise
        if cache is not None and not _is_object(left, ref.kind):
            cache.mark_deleted(name, uid)  # it took no grace
        return True

    async def _write(
        self,
        verb: str,
        ref: ObjectRef,
        name: ObjectName,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = JSON,
        *,
        notify: bool = False,
    ) -> dict[str, Any]:
        """Change an object, and hold the answer where it is cached: the next read is as new as the write."""
        cache = self._stores(ref.kind)
        if cache is None:
            return msgspec.json.decode(await self._request(verb, ref, query, body, content_type))
        version: int | None = None
        cache.begin_write(name)
        try:
            answer = msgspec.json.decode(await self._request(verb, ref, query, body, content_type))
            if _is_object(answer, ref.kind):
                version = cache.put_write_response(answer)
        finally:
            cache.end_write(name, version, notify=notify)
        return answer

    async def _request(
        self,
        verb: str,
        ref: ObjectRef,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = JSON,
        accept: str = JSON,
    ) -> bytes:
        if self._rate_limiter is not None and verb != "GET":
            await self._rate_limiter.acquire()
        path = ref.path() + (f"?{urlencode(query)}" if query else "")
        connection = self._connection
        headers = {"Accept": accept, "Content-Type": content_type}
        sent = None if body is None else msgspec.json.encode(body)
        began = time.monotonic()
        code, data = await self._send(verb, path, ref.kind, sent, headers)
        for minimum in RETRY_DELAYS_SECONDS:
            if (
                code not in RETRIED_CODES
                or time.monotonic() - began > MAX_RETRIED_SECONDS
                or is_webhook_failure(code, data)
            ):
                break
            await asyncio.sleep(retry_delay(minimum, data))
            began = time.monotonic()
            code, data = await self._send(verb, path, ref.kind, sent, headers)
        if code == 401 and (self._connection is not connection or await self._reload_credentials()):
            code, data = await self._send(verb, path, ref.kind, sent, headers)
        if code >= 400:
            raise error_from_response(code, data, f"{verb} {ref.path()}")
        return data

    async def _send(
        self, verb: str, path: str, kind: str, body: bytes | None, headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        code, began = 0, time.monotonic()
        try:
            code, data = await self._connection.send(verb, path, body, headers)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise KubeError(0, "Unreachable", f"{verb} {path}: {error or 'timed out'}") from error
        finally:
            self._metrics.api_requests.labels(verb, kind, str(code)).inc()
            self._metrics.api_seconds.labels(verb).observe(time.monotonic() - began)
        return code, data


def _is_object(answer: Mapping[str, Any], kind: str) -> bool:
    """Whether an answer is an object that the API server holds, and not a `Status`.

    The answer to a deletion has no version where others deleted the object in the same moment.
    """
    return answer.get("kind") == kind and "resourceVersion" in answer["metadata"]
