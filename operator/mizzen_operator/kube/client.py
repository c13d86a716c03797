# SPDX-License-Identifier: Apache-2.0
"""Asynchronous client of the API server. Objects are plain dictionaries.

Writes use one field manager, pass a rate limiter, and update the store of watched objects. Every request may
be repeated: names are deterministic, and a delete contains the object's uid.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any
from urllib.parse import urlencode

import aiohttp
import msgspec
from kubernetes.aio.client import Configuration

from mizzen_operator.api import labels, reasons
from mizzen_operator.kube.errors import KubeError, error_from_response, is_webhook_failure, retry_delay
from mizzen_operator.kube.paged_list import ObjectList, read_continue_token
from mizzen_operator.kube.rate_limiter import TokenBucket
from mizzen_operator.kube.refs import ObjectRef
from mizzen_operator.kube.store import ObjectName, ObjectStore
from mizzen_operator.kube.transport import REQUEST_SECONDS, Connection, load_configuration
from mizzen_operator.metrics import Metrics

CREDENTIALS_SECONDS = 2 * REQUEST_SECONDS
RETRY_DELAYS_SECONDS = (0.2, 0.5, 1.0)
"""Delays before retries of a request that the API server could not handle.

Without retries, one failure among a reconcile's many requests would make the whole reconcile start over.
"""
MAX_RETRIED_SECONDS = 1.0
"""A failed request is retried only if it has failed within this time.

After a slower failure the reconcile fails, so that its back-off grows and other services get its slot.
"""
RETRIED_CODES = frozenset({429, 500, 502, 503, 504})
PAGE = 500
APPLY, MERGE = "application/apply-patch+yaml", "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
JSON = "application/json"
ABSENT_VERSION = "1"
"""A resourceVersion that no object has. Applying with it fails with a conflict if the object exists."""
METADATA = f"{JSON};as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
OBJECT_METADATA = f"{JSON};as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
_QUERY = {"fieldManager": labels.FIELD_MANAGER, "fieldValidation": "Ignore"}
"""Query parameters of writes. Field validation would take a third of an apply's time, only to warn."""


class KubeClient:
    """Client of the API server, shared by all reconciles."""

    def __init__(
        self,
        configuration: Configuration,
        metrics: Metrics,
        rate_limiter: TokenBucket | None = None,
        stores: Callable[[str], ObjectStore | None] = lambda kind: None,
    ) -> None:
        """Create a client.

        Args:
            configuration: how to reach the API server.
            metrics: request metrics.
            rate_limiter: limits the rate of writes, if given; only the number of workers limits reads.
            stores: returns the store of a kind, or None if the kind is not watched. Reads use the store;
                writes update it.
        """
        self._stores = stores
        self._connection = Connection(configuration)
        self._old_connections: list[Connection] = []
        self._logged_in = time.monotonic()
        self._metrics = metrics
        self._rate_limiter = rate_limiter

    async def _reload_credentials(self) -> bool:
        """Reload the credentials, because token files are rotated; return whether they were reloaded.

        They are reloaded at most once per CREDENTIALS_SECONDS.
        """
        if time.monotonic() - self._logged_in < CREDENTIALS_SECONDS:
            return False
        self._logged_in = time.monotonic()
        for connection in self._old_connections:
            await connection.close()
        self._old_connections = [self._connection]  # requests may still be in flight on this connection
        self._connection = Connection(await load_configuration())
        return True

    async def close(self) -> None:
        """Close all connections."""
        for connection in (self._connection, *self._old_connections):
            await connection.close()

    async def get(self, ref: ObjectRef, *, live: bool = False) -> dict[str, Any] | None:
        """Return an object; None if it does not exist.

        A store holds only objects with our labels. Use a `live` read to find out whether a name is free.

        Raises:
            KubeError: the API server failed.
        """
        store = self._stores(ref.kind)
        if store is not None and not (ref.subresource or live):
            return store.get(ObjectName(ref.namespace, ref.name))
        data = await self._get_bytes(ref)
        return None if data is None else msgspec.json.decode(data)

    async def exists(self, ref: ObjectRef) -> bool:
        """Return whether an object exists; only its metadata is read, so that no Secret's values are sent.

        Raises:
            KubeError: the API server failed.
        """
        return await self._get_bytes(ref, OBJECT_METADATA) is not None

    async def _get_bytes(self, ref: ObjectRef, accept: str = JSON) -> bytes | None:
        """Return an object as JSON; None if it does not exist."""
        try:
            return await self._request("GET", ref, accept=accept)
        except KubeError as error:
            if error.code == 404:
                return None
            raise

    async def get_fresh(self, ref: ObjectRef) -> dict[str, Any] | None:
        """Read an object from the API server and store it; return None if it does not exist.

        Raises:
            KubeError: the API server failed.
        """
        body, store = await self.get(ref, live=True), self._stores(ref.kind)
        if store is not None and body is not None:
            store.put_fresh(body)
        return body

    async def list(self, ref: ObjectRef, selector: str = "") -> list[dict[str, Any]]:
        """List the objects of a kind that match a label selector.

        Args:
            ref: kind and namespace of the objects; all namespaces if it has no namespace.
            selector: label selector; empty for all objects.

        Raises:
            KubeError: the API server failed.
        """
        store = self._stores(ref.kind)
        if store is not None:
            return store.list(ref.namespace, selector)
        return await self._list(ref, {"labelSelector": selector}, JSON)

    async def list_metadata(
        self, ref: ObjectRef, selector: str, *, from_cache: bool = False
    ) -> list[dict[str, Any]]:
        """List the metadata of the objects of a kind that match a label selector.

        Args:
            ref: kind and namespace of the objects; all namespaces if it has no namespace.
            selector: label selector.
            from_cache: list from the API server's memory, which may be slightly stale.

        Raises:
            KubeError: the API server failed.
        """
        query = {"labelSelector": selector, "resourceVersion": "0" if from_cache else ""}
        return await self._list(ref, query, METADATA)

    async def metadata_pages(self, ref: ObjectRef, selector: str) -> AsyncIterator[bytes]:
        """Yield the pages of a metadata list, as JSON.

        The API server lists from its memory, so the list may be slightly stale.
        """
        async for page in self._pages(ref, {"labelSelector": selector, "resourceVersion": "0"}, METADATA):
            yield page

    async def list_versions(self, ref: ObjectRef, selector: str) -> ObjectList:
        """List the objects of a kind that match a label selector; return the uid and version of each.

        The list comes from the API server, never from a store.

        Raises:
            KubeError: the API server failed.
        """
        listing = ObjectList()
        async for page in self._pages(ref, {"labelSelector": selector}, METADATA):
            listing.add_page(page)
        return listing

    async def _list(self, ref: ObjectRef, query: Mapping[str, str], accept: str) -> list[dict[str, Any]]:
        bodies: list[dict[str, Any]] = []
        async for page in self._pages(ref, query, accept):
            bodies += msgspec.json.decode(page)["items"] or ()  # null if the list is empty
        return bodies

    async def _pages(self, ref: ObjectRef, query: Mapping[str, str], accept: str) -> AsyncIterator[bytes]:
        query = {**query, "limit": str(PAGE)}
        while True:
            nonempty = {key: value for key, value in query.items() if value}
            page = await self._request("GET", ref, nonempty, accept=accept)
            yield page
            token = read_continue_token(page)
            if not token:
                return
            query = {**query, "continue": token, "resourceVersion": ""}

    async def create(self, manifest: Mapping[str, Any]) -> bool:
        """Create an object; return False if an object with its name exists.

        Raises:
            KubeError: the API server failed, or rejected the object.
        """
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
        """Check by a dry run whether the API server would create an object.

        Args:
            manifest: the object.
            strict: reject unknown fields, which the API server drops otherwise.

        Raises:
            KubeError: the object would be rejected, or the API server failed.
        """
        ref = ObjectRef(manifest["kind"], manifest["metadata"]["namespace"])
        query = {**_QUERY, "dryRun": "All", **({"fieldValidation": "Strict"} if strict else {})}
        await self._request("POST", ref, query, manifest)

    async def replace(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Replace an object if its resourceVersion is still the same; return the new object.

        Raises:
            KubeError: the API server failed; code 409 if the object has changed.
        """
        meta = manifest["metadata"]
        ref = ObjectRef(manifest["kind"], meta["namespace"], meta["name"])
        return msgspec.json.decode(await self._request("PUT", ref, body=manifest))

    async def apply(
        self, manifest: Mapping[str, Any], subresource: str = "", *, new: bool = False
    ) -> dict[str, Any]:
        """Apply an object server-side, and return it.

        Fields that we applied before and now omit are removed.

        Raises:
            KubeError: the API server failed, or rejected the object; code 409 if it should be `new` but
                exists, in which case it is left unchanged.
        """
        meta = manifest["metadata"]
        ref = ObjectRef(manifest["kind"], meta["namespace"], meta["name"], subresource)
        query = {**_QUERY, "force": "true"}
        if new:
            manifest = {**manifest, "metadata": {**meta, "resourceVersion": ABSENT_VERSION}}
        name = ObjectName(ref.namespace, ref.name)
        return await self._write("PATCH", ref, name, query, manifest, content_type=APPLY)

    async def patch(self, ref: ObjectRef, patch: Mapping[str, Any], content_type: str = MERGE) -> None:
        """Patch an object or its subresource.

        Raises:
            KubeError: the API server failed, or rejected the patch.
        """
        name = ObjectName(ref.namespace, ref.name)
        await self._write("PATCH", ref, name, _QUERY, patch, content_type=content_type)

    async def delete(self, ref: ObjectRef, uid: str, propagation: str = "") -> bool:
        """Delete an object if it has this uid; return False if no object has its name any more.

        Args:
            ref: kind, namespace and name of the object.
            uid: uid that the object must have.
            propagation: deletion policy for dependents, such as `Background`; the kind's default if empty.

        Raises:
            KubeError: the API server failed; code 409 if the object with this name has another uid.
        """
        body: dict[str, Any] = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": {"uid": uid}}
        if propagation:
            body["propagationPolicy"] = propagation
        name, store = ObjectName(ref.namespace, ref.name), self._stores(ref.kind)
        try:
            response = await self._write("DELETE", ref, name, body=body, notify=True)
        except KubeError as error:
            if error.code == 404 and store is not None:
                store.mark_deleted(name, uid)
            if error.code == 404:
                return False
            raise
        if store is not None and not _is_object(response, ref.kind):
            store.mark_deleted(name, uid)  # deleted at once, without a grace period
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
        """Send a write and store the response, so that the next read is at least as new as the write.

        With `notify`, the store calls its `on_change` for the write itself, too.
        """
        store = self._stores(ref.kind)
        if store is None:
            return msgspec.json.decode(await self._request(verb, ref, query, body, content_type))
        version: int | None = None
        store.begin_write(name)
        try:
            answer = msgspec.json.decode(await self._request(verb, ref, query, body, content_type))
            if _is_object(answer, ref.kind):
                version = store.put_write_response(answer)
        finally:
            store.end_write(name, version, notify=notify)
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
            raise KubeError(0, reasons.UNREACHABLE, f"{verb} {path}: {error or 'timed out'}") from error
        finally:
            self._metrics.api_requests.labels(verb, kind, str(code)).inc()
            self._metrics.api_seconds.labels(verb).observe(time.monotonic() - began)
        return code, data


def _is_object(answer: Mapping[str, Any], kind: str) -> bool:
    """Return whether a response is a stored object rather than a `Status`.

    The response to a delete has no resourceVersion if somebody else deleted the object at the same moment.
    """
    return answer.get("kind") == kind and "resourceVersion" in answer["metadata"]
