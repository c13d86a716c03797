# SPDX-License-Identifier: Apache-2.0
"""Errors for requests that the engine refuses before it schedules them."""

from __future__ import annotations


class InvalidRequest(ValueError):
    """A request is invalid for every engine of this model; the text names the field."""


class InvalidImages(InvalidRequest):
    """The images of a request are invalid; the text begins with the name of the field, `images`."""
