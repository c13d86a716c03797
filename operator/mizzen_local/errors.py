# SPDX-License-Identifier: Apache-2.0
"""The base class of errors that users can resolve."""

from __future__ import annotations


class LocalError(Exception):
    """An error that is not a bug of this program; the message describes the problem and what to do about it.

    The command line prints the message without a traceback.
    """
