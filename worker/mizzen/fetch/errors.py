# SPDX-License-Identifier: Apache-2.0
"""Errors of a fetch."""

from __future__ import annotations


class FetchError(Exception):
    """The fetch failed; the message gives the reason and says how to fix the problem."""


class ServerUnavailable(FetchError):
    """A server failed or did not answer; another try may succeed.

    Attributes:
        after: seconds to wait before the next try, from the header `Retry-After`; 0 without this header.
    """

    def __init__(self, message: str, after: float = 0.0) -> None:
        super().__init__(message)
        self.after = after


class ServerUnreachable(ServerUnavailable):
    """No response came from a server, perhaps because this machine has no way to it."""


class CorruptDownload(FetchError):
    """The received data differs from the size, range or checksum that the server announced."""


class FetchStopped(FetchError):
    """The fetch was stopped, e.g. by a signal; the data received so far is kept."""


class UnsupportedFormat(FetchError):
    """The source has weights only in a format that is not supported."""
