# SPDX-License-Identifier: Apache-2.0
"""Fake model hub and S3 bucket that inject faults of real servers; they listen on loopback by default."""

from __future__ import annotations

import base64
import email.utils
import hashlib
import hmac
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

BLOCK = 8192
TITLE = "org.opencontainers.image.title"
HELD_SECONDS = 300
"""Seconds after which a body that waits for `gate` is sent even if `gate` is not set."""


@dataclass(frozen=True)
class Address:
    """Address where a server listens, and the name by which clients reach it; port 0 is any free port."""

    bind: str = "127.0.0.1"
    name: str = "127.0.0.1"
    port: int = 0


LOOPBACK = Address()


@dataclass
class Faults:
    """Faults to inject; if a fault has a count, each injection decrements it."""

    cut_after: int = 0
    """Number of bytes of a body after which the connection is closed (`cuts` times); 0 to close none."""
    cuts: int = 0
    short: int = 0
    """Number of bodies that are shorter than the file, although the response ends properly."""
    codes: list[int] = field(default_factory=list)
    """Status codes of the next responses, in order; later requests get normal responses."""
    retry_after: str = ""
    wrong_bytes: int = 0
    """Number of bodies with a corrupted byte."""
    no_ranges: bool = False
    unsatisfiable: int = 0
    """Number of range requests that get 416."""
    gate: threading.Event | None = None
    """Event for which each body waits halfway; None to send without waiting."""
    held: threading.Event = field(default_factory=threading.Event)
    """Set once a body waits for `gate`."""


class Handler(BaseHTTPRequestHandler):
    """Handler of one request; the server's `answer` chooses the response."""

    protocol_version = "HTTP/1.1"
    timeout = 120
    server: Server

    def do_GET(self) -> None:
        self.server.requests.append((self.command, self.path, dict(self.headers)))
        faults = self.server.faults
        if faults.codes:
            more = {"Retry-After": faults.retry_after} if faults.retry_after else {}
            self.reply(faults.codes.pop(0), b"busy", more)
            return
        self.server.answer(self)

    do_HEAD = do_GET

    def reply(self, code: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        """Send a complete response without faults."""
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def file(self, data: bytes, headers: dict[str, str] | None = None) -> None:
        """Send a file, or the requested range of it, with the server's faults."""
        faults, given, start, end, code = self.server.faults, dict(headers or {}), 0, len(data), 200
        if (wanted := self.headers.get("Range")) and not faults.no_ranges:
            if faults.unsatisfiable > 0:
                faults.unsatisfiable -= 1
                self.reply(416, b"", {"Content-Range": f"bytes */{len(data)}"})
                return
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, end, code = int(first), min(int(last) + 1, len(data)), 206
            given["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        part = bytearray(data[start:end])
        if self.command == "HEAD":
            self.reply(200, b"", {**given, "Content-Length": str(len(data))})
            return
        if faults.wrong_bytes > 0 and part:
            faults.wrong_bytes -= 1
            part[len(part) // 2] ^= 1
        if faults.short > 0 and len(part) > 1:
            faults.short -= 1
            del part[len(part) // 2 :]
            given["Transfer-Encoding"] = "chunked"
        else:
            given["Content-Length"] = str(len(part))
        self.send_response(code)
        for name, value in given.items():
            self.send_header(name, value)
        self.end_headers()
        with self.server.sending():
            self._send(bytes(part), chunked="Transfer-Encoding" in given)

    def _send(self, part: bytes, *, chunked: bool) -> None:
        faults, sent = self.server.faults, 0
        for at in range(0, len(part), BLOCK):
            block = part[at : at + BLOCK]
            if faults.gate is not None and at >= len(part) // 2 and not faults.gate.is_set():
                self.wfile.flush()
                faults.held.set()
                faults.gate.wait(HELD_SECONDS)
            if faults.cut_after and faults.cuts > 0 and sent >= faults.cut_after:
                faults.cuts -= 1
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
                return
            try:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(block), block) if chunked else block)
            except OSError:
                return
            sent += len(block)
            with self.server.counting:
                self.server.served[urlsplit(self.path).path] += len(block)
        if chunked:
            self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        pass

    def handle(self) -> None:
        try:
            super().handle()
        except (OSError, ValueError):  # the client or the server may have closed the connection
            pass


class Server(ThreadingHTTPServer):
    """HTTP server that injects faults, and records its requests and the bytes that it has sent."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, answer: Callable[[Handler], None], at: Address = LOOPBACK) -> None:
        super().__init__((at.bind, at.port), Handler)
        self.answer = answer
        self.faults = Faults()
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.served: Counter[str] = Counter()
        self.counting = threading.Condition()
        self._sending = 0
        self.url = f"http://{at.name}:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    @contextmanager
    def sending(self) -> Iterator[None]:
        """During the block, count one more file as being sent."""
        with self.counting:
            self._sending += 1
        try:
            yield
        finally:
            with self.counting:
                self._sending -= 1
                self.counting.notify_all()

    def settle(self) -> None:
        """Wait until no file is being sent, not even to a client that has disconnected."""
        with self.counting:
            assert self.counting.wait_for(lambda: not self._sending, 60)

    def handle_error(self, *_: object) -> None:
        pass

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class Hub:
    """Fake model hub: an API, and a second server for large files, to which the API redirects."""

    def __init__(self, api: Address = LOOPBACK, cdn: Address = LOOPBACK) -> None:
        self.large: set[str] = set()
        self.commits: dict[str, dict[str, bytes]] = {}
        self.branches: dict[str, str] = {}
        self.token = ""
        self.names: dict[str, str] = {}
        """File names that the API reports instead of the real ones, by real name."""
        self.advertised: dict[str, str] = {}
        """Checksums that the API reports instead of the real ones, by file name."""
        self.api = Server(self._api, api)
        self.cdn = Server(self._cdn, cdn)

    def push(self, files: dict[str, bytes], branch: str = "main", large: set[str] | None = None) -> str:
        """Commit files to a branch; return the commit."""
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits[commit] = dict(files)
        self.branches[branch] = commit
        self.large |= large if large is not None else {n for n in files if n.endswith(".safetensors")}
        return commit

    def _api(self, handler: Handler) -> None:
        if self.token and handler.headers.get("Authorization") != f"Bearer {self.token}":
            handler.reply(401, b'{"error": "Invalid credentials"}')
            return
        parts = [unquote(part) for part in urlsplit(handler.path).path.strip("/").split("/")]
        if parts[:2] == ["api", "models"]:
            commit = self.branches.get(parts[-1], parts[-1])
            if "/".join(parts[2:4]) != "org/tiny" or commit not in self.commits:
                handler.reply(404, b'{"error": "Repository not found"}')
                return
            siblings = [self._sibling(name, data) for name, data in self.commits[commit].items()]
            handler.reply(200, json.dumps({"sha": commit, "siblings": siblings}).encode())
            return
        commit, name = parts[3], "/".join(parts[4:])
        data = self.commits.get(commit, {}).get(name)
        if parts[2] != "resolve" or data is None:
            handler.reply(404, b"")
        elif name in self.large:
            target = f"{self.cdn.url}/{commit}/{quote(name)}?signature=s3cret"
            handler.reply(302, b"", {"Location": target})
        else:
            handler.file(data)

    def _sibling(self, name: str, data: bytes) -> dict[str, Any]:
        shown = self.names.get(name, name)
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        entry: dict[str, Any] = {"rfilename": shown, "size": len(data), "blobId": blob}
        if name in self.large:
            sha = self.advertised.get(name, hashlib.sha256(data).hexdigest())
            entry["lfs"] = {"sha256": sha, "size": len(data), "pointerSize": 134}
        return entry

    def _cdn(self, handler: Handler) -> None:
        parts = urlsplit(handler.path)
        commit, _, name = unquote(parts.path).strip("/").partition("/")
        if parts.query != "signature=s3cret" or "Authorization" in handler.headers:
            handler.reply(403, b"")
            return
        handler.file(self.commits[commit][name])

    def close(self) -> None:
        self.api.close()
        self.cdn.close()


class Bucket:
    """Fake S3 server with path-style addresses; it requires a valid signature of every request."""

    ID, SECRET, TOKEN, REGION, NAME = (
        "AKIDEXAMPLE",
        "s3cr3t/key+with=signs",
        "session-token",
        "eu-test-1",
        "models",
    )

    PROFILE = f"""
[default]
aws_access_key_id = {ID}
aws_secret_access_key = {SECRET}
aws_session_token = {TOKEN}
region = {REGION}
"""
    """Content of an AWS credentials file."""

    def __init__(self, at: Address = LOOPBACK) -> None:
        self.objects: dict[str, bytes] = {}
        self.sha256: set[str] = set()
        """Keys of objects for which the server reports a SHA-256 checksum."""
        self.parts: set[str] = set()
        """Keys of multipart uploads, whose ETag is not an MD5 checksum."""
        self.encrypted: set[str] = set()
        self.public = False
        self.page = 2
        self.server = Server(self._answer, at)

    def tag(self, key: str) -> str:
        digest = hashlib.md5(self.objects[key]).hexdigest()
        if key in self.encrypted:
            digest = hashlib.md5(b"key" + self.objects[key]).hexdigest()
        return f'"{digest}-3"' if key in self.parts else f'"{digest}"'

    def _answer(self, handler: Handler) -> None:
        parts = urlsplit(handler.path)
        if not self.public and (problem := self._unsigned(handler)):
            handler.reply(403, f"<Error><Code>{problem}</Code></Error>".encode())
            return
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        if bucket != self.NAME:
            handler.reply(404, b"<Error><Code>NoSuchBucket</Code></Error>")
        elif not key:
            handler.reply(200, self._list(query).encode())
        elif key not in self.objects:
            handler.reply(404, b"<Error><Code>NoSuchKey</Code></Error>")
        elif handler.headers.get("If-Match", self.tag(key)) != self.tag(key):
            handler.reply(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        else:
            handler.file(self.objects[key], self._headers(handler, key))

    def _headers(self, handler: Handler, key: str) -> dict[str, str]:
        headers = {"ETag": self.tag(key), "Last-Modified": email.utils.formatdate(0)}
        if key in self.sha256 and handler.headers.get("x-amz-checksum-mode") == "ENABLED":
            raw = hashlib.sha256(self.objects[key]).digest()
            headers["x-amz-checksum-sha256"] = base64.b64encode(raw).decode()
        if key in self.encrypted:
            headers["x-amz-server-side-encryption"] = "aws:kms"
        return headers

    def _list(self, query: dict[str, str]) -> str:
        keys = sorted(key for key in self.objects if key.startswith(query.get("prefix", "")))
        start = int(query.get("continuation-token", "token-0").removeprefix("token-"))
        shown, more = keys[start : start + self.page], start + self.page < len(keys)
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(self.objects[key])}</Size>"
            f"<ETag>{escape(self.tag(key))}</ETag></Contents>"
            for key in shown
        )
        token = f"<NextContinuationToken>token-{start + self.page}</NextContinuationToken>" if more else ""
        space = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
        truncated = str(more).lower()
        entries = f"<IsTruncated>{truncated}</IsTruncated>{token}{entries}"
        return f"<ListBucketResult {space}>{entries}</ListBucketResult>"

    def _unsigned(self, handler: Handler) -> str:
        """Return why a request's signature is invalid; empty if it is valid for the received bytes."""
        shown = handler.headers.get("Authorization", "")
        if not shown.startswith("AWS4-HMAC-SHA256 "):
            return "AccessDenied"
        given = dict(item.strip().split("=", 1) for item in shown.split(" ", 1)[1].split(","))
        names = given["SignedHeaders"].split(";")
        if not {"host", "x-amz-date", "x-amz-content-sha256", "x-amz-security-token"} <= set(names):
            return "AccessDenied"
        if "Range" in handler.headers and "range" not in names:
            return "UnsignedRange"
        parts = urlsplit(handler.path)
        query = "&".join(sorted(parts.query.split("&"))) if parts.query else ""
        headers = "".join(f"{name}:{handler.headers[name].strip()}\n" for name in names)
        content = handler.headers["x-amz-content-sha256"]
        request = "\n".join([handler.command, parts.path, query, headers, ";".join(names), content])
        date, scope = handler.headers["x-amz-date"], given["Credential"].partition("/")[2]
        if (
            scope != f"{date[:8]}/{self.REGION}/s3/aws4_request"
            or given["Credential"].split("/")[0] != self.ID
        ):
            return "AuthorizationHeaderMalformed"
        text = "\n".join(["AWS4-HMAC-SHA256", date, scope, hashlib.sha256(request.encode()).hexdigest()])
        key = f"AWS4{self.SECRET}".encode()
        for part in scope.split("/"):
            key = hmac.new(key, part.encode(), hashlib.sha256).digest()
        right = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
        age = abs(time.time() - time.mktime(time.strptime(date, "%Y%m%dT%H%M%SZ")) + time.timezone)
        if handler.headers["x-amz-security-token"] != self.TOKEN or age > 900:
            return "ExpiredToken"
        return "" if hmac.compare_digest(right, given["Signature"]) else "SignatureDoesNotMatch"

    def close(self) -> None:
        self.server.close()
