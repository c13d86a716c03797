"""Downloads an engine's files (tokenizer and configuration) in parts over the wire."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from mizzen.wire.client.stream import EngineOverloaded, StreamLost
from mizzen.wire.codec import MalformedFrame
from mizzen.wire.messages import FetchFile, File

MAX_FILES_BYTES = 512 * 1024 * 1024


class FileDownloads:
    """The downloads in progress from one engine."""

    def __init__(self, endpoint: str, send: Callable[[FetchFile], None], timeout_seconds: float) -> None:
        """Send requests with `send`; each part must arrive within `timeout_seconds`."""
        self._endpoint = endpoint
        self._send = send
        self._timeout = timeout_seconds
        self._parts: dict[tuple[str, int], asyncio.Future[File]] = {}

    async def fetch(self, sizes: Mapping[str, int]) -> dict[str, bytes]:
        """Return the contents of files, by name. `sizes` are the sizes in bytes that the engine announced.

        Raises:
            StreamLost: the connection was lost, or the engine did not answer in time.
            MalformedFrame: the parts do not match the announced size.
        """
        if sum(sizes.values()) > MAX_FILES_BYTES or any(size < 0 for size in sizes.values()):
            raise MalformedFrame(f"the engine announces files of {sum(sizes.values())} bytes")
        return {name: await self._file(name, size) for name, size in sizes.items()}

    def take(self, part: File) -> None:
        """Process a received part; an unexpected one is ignored."""
        future = self._parts.get((part.name, part.offset))
        if future is not None and not future.done():
            future.set_result(part)

    def fail(self, lost: StreamLost) -> None:
        """Fail all downloads in progress."""
        for future in self._parts.values():
            if not future.done():
                future.set_exception(lost)

    async def _file(self, name: str, size: int) -> bytes:
        content = bytearray()
        while True:
            part = await self._part(name, len(content))
            content += part.content
            if part.size != size or len(content) > size or (not part.content and len(content) < size):
                raise MalformedFrame(f"{name}: {size} bytes were announced, the parts differ")
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
