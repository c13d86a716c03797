"""The base of errors that a user can do something about."""

from __future__ import annotations


class LocalError(Exception):
    """Something did not work that is no bug of this program; the message says what, and the way out."""
