"""Errors of a fetch."""

from __future__ import annotations


class FetchError(Exception):
    """The fetch failed; the message gives the reason and the remedy."""


class ServerUnavailable(FetchError):
    """A server failed or did not answer; another try may succeed.

    Attributes:
        after: seconds to wait before the next try, from `Retry-After`; 0 if the server sent none.
    """

    def __init__(self, message: str, after: float = 0.0) -> None:
        super().__init__(message)
        self.after = after


class CorruptDownload(FetchError):
    """The received data is not the data that the server announced."""


class FetchStopped(FetchError):
    """The fetch was asked to stop; the data received so far is kept."""
