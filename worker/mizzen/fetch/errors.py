"""What may go wrong while files are fetched."""

from __future__ import annotations


class FetchError(Exception):
    """It cannot go on; the text says why, and what helps."""


class Unreachable(FetchError):
    """A server failed or did not answer, which may pass.

    Attributes:
        after: seconds until it may be asked again, by its own word; 0 when it said nothing.
    """

    def __init__(self, message: str, after: float = 0.0) -> None:
        super().__init__(message)
        self.after = after


class Corrupt(FetchError):
    """What came is not what was promised."""


class Stopped(FetchError):
    """Somebody asked for an end; what is there so far stays."""
