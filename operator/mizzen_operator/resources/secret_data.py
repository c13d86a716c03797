# SPDX-License-Identifier: Apache-2.0
"""Reads values from Secrets, and encodes values for Secrets."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import zmq


def secret_values(secret: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the Base64 values of a Secret, by key; empty if somebody has removed its `data`."""
    return secret.get("data") or {}


def read_value(secret: Mapping[str, Any], key: str) -> str:
    """Return a value of a Secret as text.

    Raises:
        ValueError: the key is missing or its value is invalid; the message names the key and the Secret.
    """
    try:
        return base64.b64decode(secret["data"][key]).decode()
    except (KeyError, TypeError, ValueError) as error:
        raise unusable_error(secret, key) from error


def encode_value(value: str) -> str:
    """Return a value in Base64, the encoding of values in a Secret's `data`."""
    return base64.b64encode(value.encode()).decode()


def annotation(secret: Mapping[str, Any], name: str) -> str:
    """Return the value of a Secret's annotation; empty if the Secret does not have that annotation."""
    return secret["metadata"].get("annotations", {}).get(name, "")


def read_key_pair(secret: Mapping[str, Any], key: str) -> tuple[str, str]:
    """Return a secret CURVE key from a Secret, and the public key that belongs to it, both in Z85.

    Raises:
        ValueError: the key is missing or is not a CURVE key; the message names the key and the Secret.
    """
    text = read_value(secret, key)
    try:
        return text, zmq.curve_public(text.encode()).decode()
    except (zmq.ZMQError, ValueError) as error:
        raise unusable_error(secret, key) from error


def unusable_error(secret: Mapping[str, Any], key: str) -> ValueError:
    """Return the error for a Secret in which a value is missing or invalid; its message says what to do."""
    name = secret["metadata"]["name"]
    return ValueError(f"Secret {name} has no usable {key}: delete it to have it recreated")
