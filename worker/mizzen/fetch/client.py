# SPDX-License-Identifier: Apache-2.0
"""HTTP client for all kinds of sources, with timeouts, and with retries after a back-off.

If a server redirects a request to another server, the other server gets no credentials.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit
from weakref import WeakSet

import httpx

from mizzen.fetch.errors import (
    CorruptDownload,
    FetchError,
    FetchStopped,
    ServerUnavailable,
    ServerUnreachable,
)

FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.25, 30.0
MAX_REDIRECTS = 5
MAX_BODY = 64 * 1024 * 1024
"""Maximum size in bytes of the body of a response to `FetchClient.get`, e.g. of a listing or a manifest."""
_NETWORK_ADVICE = (
    "check the network, or name a mirror (spec.model.endpoint; for the hub on the command line HF_ENDPOINT) "
    "or a proxy (HTTPS_PROXY)"
)
_TRANSIENT_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
_REDIRECT_STATUSES = frozenset({301, 302, 303, 307, 308})
Result = TypeVar("Result")


class Credentials(Protocol):
    """Credentials of a fetch. They create the headers that authorize its requests."""

    def headers(self, method: str, url: str, given: Mapping[str, str]) -> Mapping[str, str]:
        """Return the headers that authorize one request; `given` are the request's other headers."""
        ...

    def handle_unauthorized(self, url: str, response: httpx.Response) -> bool:
        """Update the credentials after a response with status 401; return whether to repeat the request."""
        ...


class StaticCredentials:
    """Credentials that send the same `Authorization` header with every request."""

    def __init__(self, authorization: str = "") -> None:
        """Use `authorization` as the value of the header; if it is empty, no header is sent."""
        self.authorization = authorization

    def headers(self, method: str, url: str, given: Mapping[str, str]) -> Mapping[str, str]:
        """Return the `Authorization` header, or no header if its value is empty."""
        return {"Authorization": self.authorization} if self.authorization else {}

    def handle_unauthorized(self, url: str, response: httpx.Response) -> bool:
        """Return False, because there are no other credentials to try."""
        return False


def origin(url: str) -> tuple[str, str, int]:
    """Return the scheme, the host in lower case, and the port of a URL."""
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    return parts.scheme, (parts.hostname or "").lower(), port


class FetchClient:
    """Client for the GET and HEAD requests of one fetch. Thread-safe."""

    def __init__(
        self,
        *,
        timeout: float,
        attempts: int,
        connections: int,
        stop: threading.Event,
        on_retry: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Create a client that has at most `connections` + 2 open connections.

        Args:
            timeout: seconds without data after which a request fails.
            attempts: number of consecutive failures after which `retry` gives up.
            connections: number of concurrent downloads.
            stop: event that ends all waits and retries once it is set.
            on_retry: called with a message before each retry.
        """
        self._stop = stop
        self._abandoned = threading.Event()
        self._streams: WeakSet[Any] = WeakSet()
        self._lock = threading.Lock()
        self._attempts = attempts
        self._on_retry = on_retry
        self._http = httpx.Client(
            timeout=httpx.Timeout(timeout, pool=None),
            limits=httpx.Limits(max_connections=connections + 2, max_keepalive_connections=connections),
            follow_redirects=False,
            headers={"User-Agent": "mizzen-fetch", "Accept-Encoding": "identity"},
            auth=lambda request: request,  # otherwise httpx would send passwords from ~/.netrc
        )

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def abandon(self) -> None:
        """Abort the running requests of all threads, even if the server sends no data."""
        with self._lock:
            self._abandoned.set()
            streams = list(self._streams)
        for stream in streams:
            _shut_down(stream)

    def _trace(self, event: str, about: Mapping[str, Any]) -> None:
        """Remember the stream of each new connection for `abandon`; httpx calls this for its trace events.

        A TLS connection causes a TCP and a TLS event, each with a stream, and uses the TLS event's stream.
        """
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            stream = about["return_value"]
            with self._lock:
                self._streams.add(stream)
                abandoned = self._abandoned.is_set()
            if abandoned:
                _shut_down(stream)

    def raise_if_stopped(self) -> None:
        """Raise `FetchStopped` if the stop event is set or `abandon` was called."""
        if self._stop.is_set() or self._abandoned.is_set():
            raise FetchStopped("the fetch was stopped; the data fetched so far is kept for the next start")

    def get(
        self, url: str, credentials: Credentials, headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        """Send a GET request, with retries, and return the response with its complete body.

        Raises:
            FetchError: the server rejects the request or keeps failing, or the body exceeds `MAX_BODY`.
        """

        def send() -> httpx.Response:
            with self.stream(url, credentials, headers) as response:
                body = bytearray()
                for part in read(response):
                    body += part
                    if len(body) > MAX_BODY:
                        raise FetchError(f"{redacted(url)} returned more than {MAX_BODY} bytes")
                return httpx.Response(response.status_code, headers=response.headers, content=bytes(body))

        return self.retry(send)

    def head(self, url: str, credentials: Credentials, headers: Mapping[str, str]) -> Mapping[str, str]:
        """Send a HEAD request, with retries, and return the headers of the response.

        Raises:
            FetchError: the server rejects the request or keeps failing.
        """

        def send() -> Mapping[str, str]:
            with self.stream(url, credentials, headers, "HEAD") as response:
                return response.headers

        return self.retry(send)

    def retry(self, work: Callable[[], Result], progress: Callable[[], int] = lambda: 0) -> Result:
        """Call `work` until it succeeds, with exponential back-off, and return its result.

        Args:
            work: function to call; it raises ServerUnavailable if another call may succeed.
            progress: returns a number that grows while data arrives. If it has grown since the last failure,
                the next failure counts as the first again.

        Raises:
            ServerUnavailable: `work` failed too often in a row.
            FetchError: `work` raised another FetchError, or the fetch was stopped.
        """
        failures, at = 0, progress()
        while True:
            self.raise_if_stopped()
            try:
                return work()
            except ServerUnavailable as error:
                failures = 1 if progress() != at else failures + 1
                at = progress()
                if failures >= self._attempts:
                    if isinstance(error, ServerUnreachable):
                        raise ServerUnreachable(f"{error}; {_NETWORK_ADVICE}") from error
                    raise
                pause = min(MAX_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** (failures - 1))
                pause = max(pause * random.uniform(0.5, 1.0), min(error.after, MAX_PAUSE_SECONDS))
                self._on_retry(f"{error}; try {failures + 1} of {self._attempts} in {pause:.1f} s")
                self._stop.wait(pause)

    @contextmanager
    def stream(
        self,
        url: str,
        credentials: Credentials,
        headers: Mapping[str, str] | None = None,
        method: str = "GET",
    ) -> Iterator[httpx.Response]:
        """Send a request, follow redirects, and yield the response with its body unread.

        The credentials are sent only to URLs with the scheme, host and port of `url`.

        Raises:
            ServerUnavailable: the server did not answer or failed temporarily.
            RequestRejected: the server rejected the request.
            FetchError: a redirect is not allowed, there are too many redirects, or the body is compressed.
        """
        home, given = origin(url), dict(headers or {})
        reauthorized = False
        for _ in range(MAX_REDIRECTS + 2):
            authorization = credentials.headers(method, url, given) if origin(url) == home else {}
            try:
                request = self._http.build_request(
                    method, url, headers={**given, **authorization}, extensions={"trace": self._trace}
                )
                response = self._http.send(request, stream=True)
            except (httpx.TransportError, httpx.InvalidURL, OSError) as error:
                raise ServerUnreachable(
                    f"{redacted(url)} does not answer: {describe_error(error)}"
                ) from error
            try:
                if response.status_code in _REDIRECT_STATUSES:
                    url = _redirect_target(url, response)
                    continue
                if response.status_code == 401 and not reauthorized and origin(url) == home:
                    reauthorized = True
                    if credentials.handle_unauthorized(url, response):
                        continue
                _check_status(response, url)
                yield response
                return
            finally:
                response.close()
        raise FetchError(f"{redacted(url)} was reached after more than {MAX_REDIRECTS} redirects")


def _shut_down(stream: Any) -> None:
    """Shut down a connection; unlike closing it, this wakes up the thread that reads from it."""
    with suppress(OSError):
        stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)


def _redirect_target(url: str, response: httpx.Response) -> str:
    """Return the URL to which a response redirects.

    Raises:
        FetchError: the target is invalid, equals `url`, or is http although `url` is https.
    """
    target = str(httpx.URL(url).join(response.headers.get("location", "")))
    scheme, host, _ = origin(target)
    if scheme not in ("http", "https") or not host or target == url:
        raise FetchError(f"{redacted(url)} redirects to {redacted(target)!r}, which is not another web page")
    if scheme == "http" and origin(url)[0] == "https":
        raise FetchError(
            f"{redacted(url)} redirects to {redacted(target)}, which is not encrypted: not followed"
        )
    return target


def _check_status(response: httpx.Response, url: str) -> None:
    """Check the status and encoding of a response.

    Raises:
        ServerUnavailable: the status is a temporary failure.
        RequestRejected: the status is a permanent failure.
        FetchError: the body is compressed.
    """
    code = response.status_code
    if code in _TRANSIENT_STATUSES:
        raise ServerUnavailable(f"{redacted(url)} returned {code}", _retry_after(response))
    if code not in (200, 206):
        raise RequestRejected(code, f"{redacted(url)} returned {code}", response.headers)
    if response.headers.get("content-encoding", "identity") not in ("identity", ""):
        raise FetchError(
            f"{redacted(url)} sent {response.headers['content-encoding']}, which was not requested"
        )


class RequestRejected(FetchError):
    """The server rejected a request with a status code that does not allow a retry."""

    def __init__(self, code: int, message: str, headers: Mapping[str, str]) -> None:
        super().__init__(message)
        self.code = code
        self.headers = headers


def _retry_after(response: httpx.Response) -> float:
    text = response.headers.get("retry-after", "")
    return float(text) if text.isdecimal() else 0.0


def read(response: httpx.Response, size: int = 1024 * 1024) -> Iterator[bytes]:
    """Yield the body of a response in chunks of up to `size` bytes.

    Raises:
        ServerUnavailable: the connection failed before the end of the body.
    """
    try:
        yield from response.iter_raw(size)
    except (httpx.TransportError, OSError) as error:
        raise ServerUnavailable(
            f"{redacted(str(response.url))} broke off: {describe_error(error)}"
        ) from error


def redacted(url: str) -> str:
    """Return a URL without its password and query, which may be secret."""
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname or ""
    return f"{parts.scheme}://{host}{f':{parts.port}' if parts.port else ''}{parts.path}"[:300]


def describe_error(error: Exception) -> str:
    """Return the type and text of an error as one line of at most 300 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


class RateLimiter:
    """Limit of the total download rate of all threads."""

    def __init__(self, rate: int, stop: threading.Event) -> None:
        """Limit the rate to `rate` bytes per second; 0 means no limit. Setting `stop` ends all waits."""
        self._rate = rate
        self._stop = stop
        self._lock = threading.Lock()
        self._free_at = time.monotonic()

    def acquire(self, count: int) -> None:
        """Wait until `count` more bytes can be downloaded without exceeding the rate."""
        if not self._rate:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + count / self._rate
            wait = self._free_at - now
        self._stop.wait(wait)


def check_range(url: str, response: httpx.Response, start: int, end: int, size: int) -> int:
    """Check the response to a range request, and return the file offset at which the response's data begins.

    The offset is `start`, or 0 if the server ignores ranges and sends the whole file.

    Args:
        url: URL of the file, for messages.
        response: response to a request with `Range: bytes=start-(end-1)`.
        start: offset of the first requested byte.
        end: offset of the byte after the last requested byte.
        size: expected size of the file in bytes.

    Raises:
        CorruptDownload: the response has another range, or the file has another size.
    """
    if response.status_code == 200:
        length = response.headers.get("content-length", "")
        if length.isdecimal() and int(length) != size:
            raise CorruptDownload(f"{redacted(url)} now has {length} bytes, expected {size}")
        return 0
    wanted = f"bytes {start}-{end - 1}/{size}"
    received = response.headers.get("content-range", "")
    if received != wanted:
        raise CorruptDownload(f"{redacted(url)} sent the range {received!r}, expected {wanted!r}")
    return start
