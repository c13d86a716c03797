# SPDX-License-Identifier: Apache-2.0
"""Downloads an engine's files (tokenizer and configuration) in parts over the wire; used by `EngineLink`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from mizzen.wire.client.stream import EngineOverloaded, StreamLost
from mizzen.wire.codec import MalformedFrame
from mizzen.wire.messages import FILE_PART_BYTES, FetchFile, File

MAX_FILES_BYTES = 512 * 1024 * 1024


class FileDownloads:
    """File parts that were requested from one engine and have not arrived yet."""

    def __init__(self, endpoint: str, send: Callable[[FetchFile], None], timeout_seconds: float) -> None:
        """Store the settings; no file is requested until `fetch` is called.

        Args:
            endpoint: endpoint of the engine, for error messages.
            send: function that sends the engine a request for a file part.
            timeout_seconds: maximum time for a requested part to arrive.
        """
        self._endpoint = endpoint
        self._send = send
        self._timeout = timeout_seconds
        self._parts: dict[tuple[str, int], asyncio.Future[File]] = {}

    async def fetch(self, sizes: Mapping[str, int]) -> dict[str, bytes]:
        """Download files and return their contents by name.

        Args:
            sizes: sizes in bytes that the engine announced, by file name.

        Raises:
            StreamLost: the connection was lost, or a part did not arrive in time.
            MalformedFrame: the received parts do not add up to the announced size, or the announced sizes
                are negative or exceed `MAX_FILES_BYTES` in total.
        """
        if sum(sizes.values()) > MAX_FILES_BYTES or any(size < 0 for size in sizes.values()):
            raise MalformedFrame(f"the engine announces files of {sum(sizes.values())} bytes")
        return {name: await self._file(name, size) for name, size in sizes.items()}

    def add_part(self, part: File) -> None:
        """Hand a received part to the download that waits for it; ignore a part that was not requested."""
        future = self._parts.get((part.name, part.offset))
        if future is not None and not future.done():
            future.set_result(part)

    def fail(self, lost: StreamLost) -> None:
        """Fail all downloads in progress with `lost`."""
        for future in self._parts.values():
            if not future.done():
                future.set_exception(lost)

    def ping(self, sizes: Mapping[str, int]) -> None:
        """Request a small part of one of the files, which an engine that is alive sends; ignore the part.

        `sizes` are the sizes in bytes that the engine announced, by file name.
        """
        if not sizes:
            return
        name = min(sizes, key=lambda file: sizes[file] % FILE_PART_BYTES)
        try:
            self._send(FetchFile(name, sizes[name] // FILE_PART_BYTES * FILE_PART_BYTES))
        except (EngineOverloaded, StreamLost):
            return  # the engine stays silent, which the caller detects

    async def _file(self, name: str, size: int) -> bytes:
        content = bytearray()
        while True:
            part = await self._part(name, len(content))
            content += part.content
            if part.size != size or len(content) > size or (not part.content and len(content) < size):
                raise MalformedFrame(
                    f"{name}: {size} bytes were announced, but the received parts do not add up to them"
                )
            if len(content) == size:
                return bytes(content)

    async def _part(self, name: str, offset: int) -> File:
        future: asyncio.Future[File] = asyncio.get_running_loop().create_future()
        self._parts[name, offset] = future
        try:
            self._send(FetchFile(name, offset))
            async with asyncio.timeout(self._timeout):
                return await future
        except EngineOverloaded as error:
            raise StreamLost("overloaded", str(error)) from error
        except TimeoutError:
            raise StreamLost("silent", f"{self._endpoint} did not send {name}") from None
        finally:
            self._parts.pop((name, offset), None)
