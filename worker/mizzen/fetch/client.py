"""HTTP as all sources need it: redirects without credentials, deadlines, tries with pauses between them."""

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

from mizzen.fetch.errors import Corrupt, FetchError, Stopped, Unreachable

FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.25, 30.0
MAX_REDIRECTS = 5
MAX_BODY = 64 * 1024 * 1024
"""Of lists and manifests."""
_PASSES = frozenset({408, 425, 429, 500, 502, 503, 504})
_MOVED = frozenset({301, 302, 303, 307, 308})
Result = TypeVar("Result")


class Credentials(Protocol):
    """Makes the headers that show who asks."""

    def headers(self, method: str, url: str, given: Mapping[str, str]) -> Mapping[str, str]:
        """Headers for a request of `url` with the headers `given`; asked anew for each request."""
        ...

    def refused(self, url: str, response: httpx.Response) -> bool:
        """Whether a 401 has taught it something, so that another try is worth it."""
        ...


class Shown:
    """Shows the same in every request."""

    def __init__(self, authorization: str = "") -> None:
        """Show this `Authorization`; nothing when it is empty."""
        self.authorization = authorization

    def headers(self, method: str, url: str, given: Mapping[str, str]) -> Mapping[str, str]:
        """What is shown."""
        return {"Authorization": self.authorization} if self.authorization else {}

    def refused(self, url: str, response: httpx.Response) -> bool:
        """There is nothing else to show."""
        return False


def origin(url: str) -> tuple[str, str, int]:
    """Scheme, host and port of a URL."""
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    return parts.scheme, (parts.hostname or "").lower(), port


class Client:
    """GET requests of one fetch, from any thread."""

    def __init__(
        self,
        *,
        timeout: float,
        attempts: int,
        connections: int,
        stop: threading.Event,
        on_trouble: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Ask servers; `stop` ends every wait, `on_trouble` hears of what is tried again."""
        self._stop = stop
        self._abandoned = threading.Event()
        self._streams: WeakSet[Any] = WeakSet()
        self._lock = threading.Lock()
        self._attempts = attempts
        self._on_trouble = on_trouble
        self._http = httpx.Client(
            timeout=httpx.Timeout(timeout, pool=None),
            limits=httpx.Limits(max_connections=connections + 2, max_keepalive_connections=connections),
            follow_redirects=False,
            headers={"User-Agent": "mizzen-fetch", "Accept-Encoding": "identity"},
            auth=lambda request: request,  # without it, passwords of ~/.netrc would go along
        )

    def close(self) -> None:
        """Close its connections."""
        self._http.close()

    def abandon(self) -> None:
        """End what is under way in all threads, also where a server is silent."""
        with self._lock:
            self._abandoned.set()
            streams = list(self._streams)
        for stream in streams:
            _cut(stream)

    def _trace(self, event: str, about: Mapping[str, Any]) -> None:
        """Hear of connections as they are made; with TLS each is made twice, and the later one counts."""
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            stream = about["return_value"]
            with self._lock:
                self._streams.add(stream)
                late = self._abandoned.is_set()
            if late:
                _cut(stream)

    def check(self) -> None:
        """Raise Stopped once an end is asked for."""
        if self._stop.is_set() or self._abandoned.is_set():
            raise Stopped("it was asked to end; what is there so far is kept for the next start")

    def get(
        self, url: str, credentials: Credentials, headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        """A whole answer, however often it must be asked for.

        Raises:
            FetchError: the server refuses, or fails for too long.
        """

        def ask() -> httpx.Response:
            with self.stream(url, credentials, headers) as response:
                body = bytearray()
                for part in read(response):
                    body += part
                    if len(body) > MAX_BODY:
                        raise FetchError(f"{shown(url)} answers more than {MAX_BODY} bytes")
                return httpx.Response(response.status_code, headers=response.headers, content=bytes(body))

        return self.persist(ask)

    def peek(self, url: str, credentials: Credentials, headers: Mapping[str, str]) -> Mapping[str, str]:
        """The headers of a file, by HEAD.

        Raises:
            FetchError: the server refuses, or fails for too long.
        """

        def ask() -> Mapping[str, str]:
            with self.stream(url, credentials, headers, "HEAD") as response:
                return response.headers

        return self.persist(ask)

    def persist(self, work: Callable[[], Result], moved: Callable[[], int] = lambda: 0) -> Result:
        """Do something until no server fails any more.

        Args:
            work: raises Unreachable when a server failed.
            moved: a number that grows as long as something comes; tries count from its last change.

        Raises:
            FetchError: the work's own, or Unreachable after too many tries in a row.
        """
        failures, at = 0, moved()
        while True:
            self.check()
            try:
                return work()
            except Unreachable as error:
                failures = 1 if moved() != at else failures + 1
                at = moved()
                if failures >= self._attempts:
                    raise
                pause = min(MAX_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** (failures - 1))
                pause = max(pause * random.uniform(0.5, 1.0), min(error.after, MAX_PAUSE_SECONDS))
                self._on_trouble(f"{error}; try {failures + 1} of {self._attempts} in {pause:.1f} s")
                self._stop.wait(pause)

    @contextmanager
    def stream(
        self,
        url: str,
        credentials: Credentials,
        headers: Mapping[str, str] | None = None,
        method: str = "GET",
    ) -> Iterator[httpx.Response]:
        """The answer to a request, its body unread, after redirects. Credentials go to the first host alone.

        Raises:
            Unreachable: the server failed in a way that may pass.
            FetchError: it refuses.
        """
        home, given = origin(url), dict(headers or {})
        learned = False
        for _ in range(MAX_REDIRECTS + 2):
            shows = credentials.headers(method, url, given) if origin(url) == home else {}
            try:
                request = self._http.build_request(
                    method, url, headers={**given, **shows}, extensions={"trace": self._trace}
                )
                response = self._http.send(request, stream=True)
            except (httpx.TransportError, httpx.InvalidURL, OSError) as error:
                raise Unreachable(f"{shown(url)} does not answer: {brief(error)}") from error
            try:
                if response.status_code in _MOVED:
                    url = _next(url, response)
                    continue
                if response.status_code == 401 and not learned and origin(url) == home:
                    learned = True
                    if credentials.refused(url, response):
                        continue
                _require(response, url)
                yield response
                return
            finally:
                response.close()
        raise FetchError(f"{shown(url)} is the end of more than {MAX_REDIRECTS} redirects")


def _cut(stream: Any) -> None:
    """End a connection for whoever reads from it, which closing it would not."""
    with suppress(OSError):
        stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)


def _next(url: str, response: httpx.Response) -> str:
    """Where a redirect leads.

    Raises:
        FetchError: nowhere, or from an encrypted connection to a plain one.
    """
    target = str(httpx.URL(url).join(response.headers.get("location", "")))
    scheme, host, _ = origin(target)
    if scheme not in ("http", "https") or not host or target == url:
        raise FetchError(f"{shown(url)} redirects to {shown(target)!r}, which is no other page")
    if scheme == "http" and origin(url)[0] == "https":
        raise FetchError(
            f"{shown(url)} redirects to {shown(target)}, which is not encrypted: it is not followed"
        )
    return target


def _require(response: httpx.Response, url: str) -> None:
    """Check that an answer is a good one.

    Raises:
        Unreachable, FetchError, Refusal: it is not.
    """
    code = response.status_code
    if code in _PASSES:
        raise Unreachable(f"{shown(url)} answers {code}", _after(response))
    if code not in (200, 206):
        raise Refusal(code, f"{shown(url)} answers {code}", response.headers)
    if response.headers.get("content-encoding", "identity") not in ("identity", ""):
        raise FetchError(
            f"{shown(url)} sends {response.headers['content-encoding']}, which was not asked for"
        )


class Refusal(FetchError):
    """A server's answer that no other try changes, with its status."""

    def __init__(self, code: int, message: str, headers: Mapping[str, str]) -> None:
        super().__init__(message)
        self.code = code
        self.headers = headers


def _after(response: httpx.Response) -> float:
    text = response.headers.get("retry-after", "")
    return float(text) if text.isdecimal() else 0.0


def read(response: httpx.Response, size: int = 1024 * 1024) -> Iterator[bytes]:
    """The parts of a body as they are sent.

    Raises:
        Unreachable: the connection failed before the end.
    """
    try:
        yield from response.iter_raw(size)
    except (httpx.TransportError, OSError) as error:
        raise Unreachable(f"{shown(str(response.url))} broke off: {brief(error)}") from error


def shown(url: str) -> str:
    """A URL without what may be secret in it."""
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname or ""
    return f"{parts.scheme}://{host}{f':{parts.port}' if parts.port else ''}{parts.path}"[:300]


def brief(error: Exception) -> str:
    """An error's kind and text, on one line and not too long."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


class Pace:
    """Lets so many bytes a second pass, over all threads."""

    def __init__(self, rate: int, stop: threading.Event) -> None:
        """Pass `rate` bytes a second; 0 passes all."""
        self._rate = rate
        self._stop = stop
        self._lock = threading.Lock()
        self._free_at = time.monotonic()

    def take(self, count: int) -> None:
        """Wait until `count` more bytes may pass."""
        if not self._rate:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + count / self._rate
            wait = self._free_at - now
        self._stop.wait(wait)


def begins(url: str, response: httpx.Response, start: int, end: int, size: int) -> int:
    """Where the body of an answer to `Range: bytes=start-(end-1)` begins: at `start`, or at 0 without ranges.

    Raises:
        Corrupt: it is another range, or of a file of another size.
    """
    if response.status_code == 200:
        length = response.headers.get("content-length", "")
        if length.isdecimal() and int(length) != size:
            raise Corrupt(f"{shown(url)} has {length} bytes now, {size} were promised")
        return 0
    wanted = f"bytes {start}-{end - 1}/{size}"
    found = response.headers.get("content-range", "")
    if found != wanted:
        raise Corrupt(f"{shown(url)} sends {found!r}, {wanted!r} was asked for")
    return start
