"""What is read of a Secret, and how values are written into one."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import zmq


def data_of(secret: Mapping[str, Any]) -> Mapping[str, str]:
    """The values of a Secret, which has no `data` when somebody has emptied it."""
    return secret.get("data") or {}


def read(secret: Mapping[str, Any], key: str) -> str:
    """One value of a Secret as text.

    Raises:
        ValueError: names the Secret and the key that it lacks.
    """
    try:
        return base64.b64decode(secret["data"][key]).decode()
    except (KeyError, TypeError, ValueError) as error:
        raise unusable(secret, key) from error


def encode(value: str) -> str:
    """A value as a Secret holds it."""
    return base64.b64encode(value.encode()).decode()


def annotation(secret: Mapping[str, Any], name: str) -> str:
    """An annotation of a Secret; empty without."""
    return secret["metadata"].get("annotations", {}).get(name, "")


def pair_of(secret: Mapping[str, Any], key: str) -> tuple[str, str]:
    """A CURVE key that a Secret has, and its public half, both as Z85.

    Raises:
        ValueError: names the Secret and the key that it lacks, or that is none of CURVE.
    """
    text = read(secret, key)
    try:
        return text, zmq.curve_public(text.encode()).decode()
    except (zmq.ZMQError, ValueError) as error:
        raise unusable(secret, key) from error


def unusable(secret: Mapping[str, Any], key: str) -> ValueError:
    """Says that a Secret lacks a value, or has none that can be used, and what to do."""
    name = secret["metadata"]["name"]
    return ValueError(f"Secret {name} has no usable {key}: delete it to have it made anew")
