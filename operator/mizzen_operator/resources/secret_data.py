"""Reads values from Secrets, and encodes values for them."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import zmq


def secret_values(secret: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the values of a Secret; it has no `data` if somebody emptied it."""
    return secret.get("data") or {}


def read_value(secret: Mapping[str, Any], key: str) -> str:
    """Return a value of a Secret as text.

    Raises:
        ValueError: names the Secret and the missing key.
    """
    try:
        return base64.b64decode(secret["data"][key]).decode()
    except (KeyError, TypeError, ValueError) as error:
        raise unusable_error(secret, key) from error


def encode_value(value: str) -> str:
    """Return a value as a Secret holds it."""
    return base64.b64encode(value.encode()).decode()


def annotation(secret: Mapping[str, Any], name: str) -> str:
    """Return an annotation of a Secret; empty if it is absent."""
    return secret["metadata"].get("annotations", {}).get(name, "")


def read_key_pair(secret: Mapping[str, Any], key: str) -> tuple[str, str]:
    """Return a CURVE key of a Secret and its public half, both as Z85.

    Raises:
        ValueError: names the Secret, and the key that is missing or not a CURVE key.
    """
    text = read_value(secret, key)
    try:
        return text, zmq.curve_public(text.encode()).decode()
    except (zmq.ZMQError, ValueError) as error:
        raise unusable_error(secret, key) from error


def unusable_error(secret: Mapping[str, Any], key: str) -> ValueError:
    """Return the error for a Secret that lacks a usable value; it says what to do."""
    name = secret["metadata"]["name"]
    return ValueError(f"Secret {name} has no usable {key}: delete it to have it recreated")
